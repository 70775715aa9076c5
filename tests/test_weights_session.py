from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import InvalidInput, UpdateConflict, WeightUpdateError, from_wire, to_wire
from midstream.types import ParamMeta
from midstream.weights.columns import from_columns, to_columns
from midstream.weights.session import SessionState, TensorRecord, UpdateSession

NAMES = ["embed", "a.q", "a.k", "a.v", "head"]


def d(text: str) -> str:
    """A digest of its own for each text."""
    return text.encode().hex().ljust(64, "0")


def session(tied: dict[str, str] | None = None, lease_s: float = 10.0, dtype: str = "bfloat16") -> UpdateSession:
    tied = tied or {}
    params = {name: ParamMeta(name, dtype, (4, 2)) for name in NAMES if name not in tied}
    return UpdateSession(params, tied, lease_s, {name: d(f"0{name}") for name in params})


def record(name: str, version: str = "1") -> TensorRecord:
    return TensorRecord(name, d(version + name), 16)


def manifest(names: list[str], version: str = "1", **changes: Any) -> dict[str, Any]:
    data = {
        "names": names,
        "dtype_names": ["bfloat16"] * len(names),
        "shapes": [[4, 2]] * len(names),
        "digests": [d(version + name) for name in names],
    }
    return {**data, **changes}


def run(s: UpdateSession, names: list[str], version: str = "1", **start: Any) -> list[str]:
    s.start(0.0, **start)
    s.record(record(name, version) for name in names)
    filled = s.verify()
    s.prepared()
    s.committed()
    return filled


def test_needs_no_torch() -> None:
    code = "import midstream.weights.session, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_whole_life() -> None:
    s = session()
    assert s.state is SessionState.IDLE
    s.start(0.0)
    assert s.state is SessionState.OPEN
    s.record([record("embed"), record("a.q")])
    s.record([record("a.k"), record("a.v"), record("head"), record("embed")])
    assert s.summary() == {"updated": 5, "of": 5, "bytes": 80}
    assert s.verify() == NAMES
    s.prepared()
    assert s.state is SessionState.PREPARED
    assert s.held_digests == {name: d("0" + name) for name in NAMES}
    assert s.new_digests == {name: d("1" + name) for name in NAMES}
    s.committed()
    assert s.state is SessionState.COMMITTED
    assert s.held_digests == {name: d("1" + name) for name in NAMES}


def test_two_updates_in_a_row_and_back() -> None:
    s = session()
    for version in "1", "1", "2", "0":
        assert run(s, NAMES, version) == NAMES
        assert s.held_digests == {name: d(version + name) for name in NAMES}


@pytest.mark.parametrize("sent", [["embed"], ["head"], ["embed", "head"]])
def test_case_001_either_tied_name_fills_the_storage(sent: list[str]) -> None:
    s = session(tied={"head": "embed"})
    s.start(0.0)
    s.record(record(name) for name in ["a.q", "a.k", "a.v"])
    s.record(TensorRecord(name, d("same"), 16) for name in sent)
    assert s.verify() == ["embed", "a.q", "a.k", "a.v"]
    assert s.summary()["updated"] == s.summary()["of"] == 4
    assert s.new_digests["embed"] == d("same") and "head" not in s.new_digests


def test_case_001_tied_names_with_different_bytes_name_the_pair() -> None:
    s = session(tied={"head": "embed"})
    s.start(0.0)
    s.record(record(name) for name in NAMES)
    with pytest.raises(WeightUpdateError, match="tied") as error:
        s.verify()
    assert error.value.tensors == ["embed", "head"]
    assert s.state is SessionState.ABORTED


def test_case_001_untied_partial_update_leaves_the_head() -> None:
    s = session()
    assert run(s, ["embed"], mode="partial") == ["embed"]
    assert s.held_digests["embed"] == d("1embed") and s.held_digests["head"] == d("0head")


def test_case_010_partial_and_full_are_not_mixed_up() -> None:
    s = session()
    assert run(s, ["a.q", "a.k", "a.v"], mode="partial") == ["a.q", "a.k", "a.v"]
    assert {n for n, digest in s.held_digests.items() if digest == d("0" + n)} == {"embed", "head"}
    with pytest.raises(WeightUpdateError) as error:
        run(s, ["a.q", "a.k", "a.v"], mode="full")
    assert error.value.tensors == ["embed", "head"]
    for mode in "full", "partial":
        with pytest.raises(WeightUpdateError, match="no tensor was received"):
            run(s, [], mode=mode)
    with pytest.raises(WeightUpdateError, match="no tensors"):
        s.start(0.0, mode="partial", manifest=manifest([]))


def test_one_missing_piece_is_named_exactly() -> None:
    s = session()
    with pytest.raises(WeightUpdateError, match=r"a\.k") as error:
        run(s, [name for name in NAMES if name != "a.k"])
    assert error.value.tensors == ["a.k"]
    assert from_wire(to_wire(error.value)).tensors == ["a.k"]  # type: ignore[attr-defined]


def test_all_missing_names_are_in_the_error() -> None:
    params = {f"x.{i}": ParamMeta(f"x.{i}", "float32", (1,)) for i in range(100)}
    s = UpdateSession(params, {}, 10.0, {name: d(name) for name in params})
    s.start(0.0)
    s.record([TensorRecord("x.0", d("1"), 4)])
    with pytest.raises(WeightUpdateError, match="and 87 more") as error:
        s.verify()
    assert error.value.tensors == list(params)[1:]


def test_case_012_declared_dtype() -> None:
    s = session()
    s.start(0.0)
    with pytest.raises(WeightUpdateError, match=r"a\.q has dtype float32, the engine holds bfloat16.*cast='allow'"):
        s.check("a.q", "float32", (4, 2))
    s.abort("test")
    s.start(0.0, cast="allow")
    s.check("a.q", "float32", (4, 2))
    for dtype in "int8", "float8_e4m3fn":
        with pytest.raises(WeightUpdateError, match=dtype):
            s.check("a.q", dtype, (4, 2))


def test_case_019_a_finish_after_nothing_fails() -> None:
    s = session()
    s.start(0.0, manifest=manifest(NAMES))
    with pytest.raises(WeightUpdateError, match="no tensor was received") as error:
        s.verify()
    assert error.value.tensors == NAMES
    assert s.held_digests == {name: d("0" + name) for name in NAMES}


def test_case_019_a_wrong_byte_is_found_by_the_manifest() -> None:
    s = session()
    s.start(0.0, manifest=manifest(NAMES))
    s.record(record(name, "x" if name == "a.v" else "1") for name in NAMES)
    with pytest.raises(WeightUpdateError, match="manifest") as error:
        s.verify()
    assert error.value.tensors == ["a.v"]


def test_case_023_defaults_are_echoed_and_layout_is_checked() -> None:
    s = session()
    reply = s.start(0.0)
    assert reply == {
        "session_id": "update-1",
        "lease_s": 10.0,
        "mode": "full",
        "cast": "deny",
        "format": "checkpoint",
    }
    with pytest.raises(WeightUpdateError, match=r"has shape \[2, 4\], the checkpoint format has \[4, 2\]"):
        s.check("a.q", "bfloat16", (2, 4))


def test_case_028_second_start_says_who_holds_it() -> None:
    s = session()
    first = s.start(100.0)["session_id"]
    with pytest.raises(UpdateConflict) as error:
        s.start(103.5)
    assert error.value.details == {"session_id": first, "age_s": 3.5}
    assert first in str(error.value) and "3.5 s" in str(error.value)
    assert s.abort("by hand") == first
    second = s.start(104.0)["session_id"]
    assert second != first
    assert s.abort("again") == second and s.abort("nothing left") is None


def test_case_028_an_idle_session_ends_with_its_lease() -> None:
    s = session(lease_s=10.0)
    assert not s.expired(1e9)
    s.start(0.0)
    assert not s.expired(10.0) and s.expired(10.5)
    s.touch(10.0)
    assert not s.expired(20.0) and s.expired(20.5)
    s.touch(5.0)  # a late message does not shorten it
    assert not s.expired(20.0)
    assert s.start(20.5)["session_id"] == "update-2"


def test_case_029_a_failed_chunk_leaves_what_is_served() -> None:
    s = session()
    before = s.held_digests
    s.start(0.0)
    s.record([record("embed")])
    s.record([record("a.q")])
    with pytest.raises(WeightUpdateError) as error:
        s.record([record("a.k"), record("a.q", "other"), record("embed", "other")])
    assert error.value.tensors == ["a.q", "embed"]
    assert s.state is SessionState.ABORTED and s.held_digests == before
    assert run(s, NAMES) == NAMES


def test_case_030_finish_after_a_failed_chunk_is_refused() -> None:
    s = session()
    s.start(0.0)
    s.abort("chunk 2 was corrupt")
    for verb in s.verify, s.prepared, s.require_open:
        with pytest.raises(UpdateConflict, match="update-1, is aborted: chunk 2 was corrupt"):
            verb()
    with pytest.raises(UpdateConflict):
        s.committed()
    assert s.held_digests == {name: d("0" + name) for name in NAMES}


def test_verbs_out_of_order() -> None:
    s = session()
    with pytest.raises(UpdateConflict, match="call start_weight_update first"):
        s.verify()
    with pytest.raises(UpdateConflict):
        s.record([record("embed")])
    s.start(0.0)
    with pytest.raises(UpdateConflict, match="not verified"):
        s.prepared()
    s.record(record(name) for name in NAMES)
    s.verify()
    s.record([record("embed")])
    with pytest.raises(UpdateConflict, match="not verified"):  # a chunk after verify
        s.prepared()
    s.verify()
    s.prepared()
    with pytest.raises(UpdateConflict, match="takes no more chunks"):
        s.record([record("embed")])
    with pytest.raises(UpdateConflict, match="is prepared since"):
        s.start(1.0)
    assert s.expired(11.0) and s.abort("lease") == "update-1"
    with pytest.raises(UpdateConflict):
        s.committed()


def test_a_chunk_of_another_update_is_refused() -> None:
    s = session()
    old = s.start(0.0)["session_id"]
    s.abort("trainer died")
    new = s.start(1.0)["session_id"]
    s.require_open(new)
    s.require_open()
    with pytest.raises(UpdateConflict, match=f"{old}.*{new} is open"):
        s.require_open(old)


def test_unknown_names_modes_and_casts() -> None:
    s = session()
    with pytest.raises(InvalidInput, match="mode must be full or partial, got 'some'"):
        s.start(0.0, mode="some")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="cast must be deny or allow, got True"):
        s.start(0.0, cast=True)  # type: ignore[arg-type]
    assert s.state is SessionState.IDLE
    s.start(0.0)
    with pytest.raises(WeightUpdateError, match=r"base_model\.model\.a\.q is no tensor of this model"):
        s.check("base_model.model.a.q", "bfloat16", (4, 2))


def test_what_a_manifest_lists_must_arrive_under_that_name() -> None:
    s = session(tied={"head": "embed"})
    s.start(0.0, mode="partial", manifest=manifest(["a.q", "a.k"]))
    s.record([record("a.q")])
    with pytest.raises(WeightUpdateError, match=r"never received: a\.k") as error:
        s.verify()
    assert error.value.tensors == ["a.k"]
    both = {**manifest(["embed", "head"]), "digests": [d("same")] * 2}
    s.start(0.0, mode="partial", manifest=both)
    s.record([TensorRecord("embed", d("same"), 16)])
    with pytest.raises(WeightUpdateError) as error:
        s.verify()
    assert error.value.tensors == ["head"]


@pytest.mark.parametrize(
    ("names", "changes", "tensors"),
    [
        (NAMES[:-1], {}, ["head"]),
        ([*NAMES, "lora"], {}, ["lora"]),
        (NAMES, {"shapes": [[4, 2], [2, 4], [4, 2], [8], [4, 2]]}, ["a.q", "a.v"]),
        (NAMES, {"dtype_names": ["float32", *["bfloat16"] * 4]}, ["embed"]),
        (NAMES, {"digests": ["00", *[d("1")] * 4]}, ["embed"]),
        ([*NAMES, "head"], {}, ["head"]),
    ],
)
def test_a_bad_manifest_is_refused_before_a_byte_moves(names: list[str], changes: Any, tensors: list[str]) -> None:
    s = session()
    with pytest.raises(WeightUpdateError) as error:
        s.start(0.0, cast="allow", manifest=manifest(names, **changes))
    assert error.value.tensors == tensors
    assert s.state is SessionState.IDLE


@pytest.mark.parametrize("changes", [{"shapes": [[4, 2]]}, {"extra": 1}, {"names": "abc"}, {"shapes": [[-1]] * 5}])
def test_a_malformed_manifest_is_invalid_input(changes: Any) -> None:
    with pytest.raises(InvalidInput, match="manifest"):
        session().start(0.0, manifest={**manifest(NAMES), **changes})


def test_manifest_round_trip_and_tied_names() -> None:
    data = manifest(["embed", "a.q", "a.k", "a.v"])
    listed = {key: column for key, column in data.items() if key != "digests"}
    assert to_columns(from_columns(listed)) == listed
    s = session(tied={"head": "embed"})
    s.start(0.0, manifest=data)
    with pytest.raises(WeightUpdateError, match="not in the manifest"):
        s.check("head", "bfloat16", (4, 2))
    s.abort("test")
    with pytest.raises(WeightUpdateError, match="tied") as error:
        s.start(0.0, manifest=manifest(NAMES))
    assert error.value.tensors == ["embed", "head"]


CALLS = st.sampled_from(
    ["start", "manifest", "partial", "one", "all", "other", "verify", "prepared", "committed", "abort"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(CALLS, max_size=30))
def test_any_order_of_calls_serves_one_whole_version_or_another(calls: list[str]) -> None:
    """What is held changes at ``committed`` only, and then to exactly what was verified."""
    s = session()
    actions = {
        "start": lambda: s.start(0.0),
        "manifest": lambda: s.start(0.0, manifest=manifest(NAMES)),
        "partial": lambda: s.start(0.0, mode="partial"),
        "one": lambda: s.record([record("a.q")]),
        "all": lambda: s.record(record(name) for name in NAMES),
        "other": lambda: s.record([record("head", "2")]),
        "verify": s.verify,
        "prepared": s.prepared,
        "committed": s.committed,
        "abort": lambda: s.abort("test"),
    }
    for call in calls:
        before, expected, prepared = s.held_digests, s.new_digests, s.state is SessionState.PREPARED
        try:
            actions[call]()
        except (UpdateConflict, WeightUpdateError):
            assert s.held_digests == before
            continue
        if call == "committed":
            assert prepared and s.held_digests == expected
        else:
            assert s.held_digests == before
