from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes_weights import DictSource, FakeEngine, PipeClient, random_weights, serve
from midstream.errors import Conflict, EngineDead, InvalidInput, TimedOut, UpdateConflict, WeightUpdateError
from midstream.weights import ipc
from midstream.weights.ipc import IPCTrainerWeightTransferEngine, SharedBuffer
from midstream.weights.manifest import from_source

SMALL = {"packed_buffer_size_bytes": 512}


def connect(engine: Any, source: DictSource, **info: Any) -> IPCTrainerWeightTransferEngine:
    return IPCTrainerWeightTransferEngine.trainer_init({**SMALL, **info}, client=engine, source=source)


def holds(engine: FakeEngine, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(engine.held[name], tensor) for name, tensor in weights.items())


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("buffer_bytes", [1, 512, 1024, 1 << 20])
@pytest.mark.parametrize("manifest", [True, False])
def test_an_update_to_w1_is_w1_and_back(buffer_bytes: int, manifest: bool) -> None:
    w0, w1 = random_weights(0), random_weights(1)
    engine, source = FakeEngine(w0), DictSource(w1)
    trainer = connect(engine, source, packed_buffer_size_bytes=buffer_bytes)
    for version, weights in ("a", w1), ("b", w1), ("c", w0), ("d", w1):
        source.tensors = weights
        reply = trainer.send_weights(version, manifest=manifest)
        assert holds(engine, weights)
        assert reply["updated"] == reply["of"] == len(w1)
        assert reply["bytes"] == sum(t.nbytes for t in w1.values()) and reply["version"] == version
    trainer.shutdown()


def test_any_order_and_any_chunking_give_the_same_id() -> None:
    w1 = random_weights(1)
    ids = set()
    for seed, buffer_bytes in enumerate((1, 600, 900, 4096)):
        names = list(w1)
        random.Random(seed).shuffle(names)
        trainer = connect(
            engine := FakeEngine(random_weights(0)),
            DictSource({name: w1[name] for name in names}),
            packed_buffer_size_bytes=buffer_bytes,
        )
        ids.add(trainer.send_weights()["weights_id"])
        assert holds(engine, w1)
    assert len(ids) == 1


def test_buffers_fit_the_largest_tensor_and_no_more_than_is_sent() -> None:
    w0 = random_weights(0)  # the largest has 32 * 8 * 2 bytes
    whole = 512 + 9 * 128 + 3 * 64
    engine = FakeEngine(w0)
    for asked, got in (1, 512), (1000, 1024), (whole, whole), (1 << 40, 4 * whole):
        reply = engine.init_weight_transfer_engine({"init_info": {"packed_buffer_size_bytes": asked}})
        assert reply["buffer_bytes"] == got
    wide = {name: tensor.float() for name, tensor in w0.items()}
    for asked, source, got in (1, w0, 512), (1 << 30, w0, whole), (1, wide, 1024), (1, {}, 512):
        assert connect(engine, DictSource(source), packed_buffer_size_bytes=asked)._buffer_bytes == got
    narrow = connect(engine, DictSource(w0), packed_buffer_size_bytes=1)
    narrow.source = DictSource(wide)
    with pytest.raises(InvalidInput, match="raise packed_buffer_size_bytes to 1024"):
        narrow.send_weights(manifest=False)
    assert not engine.session.is_open


def test_the_engine_reads_in_place_from_two_buffers() -> None:
    engine = FakeEngine(random_weights(0))
    trainer = connect(engine, DictSource(random_weights(1)))
    bases = [buffer.data.data_ptr() for buffer in engine.worker._buffers]  # type: ignore[attr-defined]
    trainer.send_weights()
    used = {base for base in bases for view in engine.views if base <= view < base + 512}
    assert used == set(bases)
    assert all(any(base <= view < base + 512 for base in bases) for view in engine.views)


def test_the_trainer_writes_the_next_chunk_while_the_engine_reads_and_never_the_one_it_reads() -> None:
    engine, source = FakeEngine(random_weights(0)), DictSource(random_weights(1))
    trainer = connect(engine, source)
    engine.gate = threading.Event()
    given: list[str] = []
    third = threading.Event()
    chunks = ipc.packing.plan(source.metadata(), 512)

    class Watched(DictSource):
        def __iter__(self):  # type: ignore[no-untyped-def]
            for name, tensor in super().__iter__():
                if name == chunks[2][0].meta.name:
                    third.set()
                given.append(name)
                yield name, tensor

    trainer.source = Watched(source.tensors)
    thread = threading.Thread(target=trainer.send_weights, kwargs={"manifest": False})
    thread.start()
    # Chunk 1 is written although chunk 0 has not been read; chunk 2 shares its buffer with chunk 0.
    until(lambda: len(given) >= len(chunks[0]) + len(chunks[1]))
    until(lambda: all(future is not None for future in trainer._reading))
    assert not third.is_set()
    engine.gate.set()
    thread.join(10)
    assert third.is_set() and holds(engine, source.tensors)


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    pause = threading.Event()
    for _ in range(int(limit_s / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError(f"not within {limit_s} s")


def test_case_001_tied_names_through_the_buffers() -> None:
    w0, w1 = random_weights(0), random_weights(1)
    alias = {"head.weight": "embed.weight"}
    for sent in (w1, {**{n: t for n, t in w1.items() if n != "embed.weight"}, "head.weight": w1["embed.weight"]}):
        engine = FakeEngine(w0, tied=alias)
        connect(engine, DictSource(sent)).send_weights()
        assert holds(engine, w1)
    engine = FakeEngine(w0, tied=alias)
    torn = {**w1, "head.weight": w0["embed.weight"]}
    for manifest in True, False:
        with pytest.raises(WeightUpdateError, match="tied") as error:
            connect(engine, DictSource(torn)).send_weights(manifest=manifest)
        assert error.value.tensors == ["embed.weight", "head.weight"]
        assert holds(engine, w0)


def test_case_010_a_partial_update_touches_nothing_else() -> None:
    w0, w1 = random_weights(0), random_weights(1)
    engine = FakeEngine(w0)
    some = {name: w1[name] for name in list(w1)[2:5]}
    storage = {name: tensor.data_ptr() for name, tensor in engine.held.items()}
    trainer = connect(engine, DictSource(some))
    with pytest.raises(WeightUpdateError, match="not listed"):
        trainer.send_weights("v1")
    reply = trainer.send_weights("v1", mode="partial")
    assert (reply["updated"], reply["of"]) == (3, len(w1))
    assert holds(engine, {**w0, **some})
    assert all(engine.held[name].data_ptr() == storage[name] for name in w0 if name not in some)


def test_case_012_dtype_contract() -> None:
    w0, masters = random_weights(0), random_weights(1, torch.float32)
    cast = {name: tensor.bfloat16() for name, tensor in masters.items()}
    engine = FakeEngine(w0)
    for manifest in True, False:
        with pytest.raises(WeightUpdateError, match=r"embed\.weight has dtype float32, the engine holds bfloat16"):
            connect(engine, DictSource(masters)).send_weights(manifest=manifest)
        assert holds(engine, w0)
    # declared as bf16: the trainer casts while it writes
    connect(engine, DictSource(masters, torch.bfloat16)).send_weights()
    assert holds(engine, cast)
    # declared as fp32 with cast="allow": the engine casts
    other = FakeEngine(w0)
    trainer = connect(other, DictSource(masters))
    session = other.start_weight_update(cast="allow")
    trainer.transfer(session["session_id"])
    other.finish_weight_update()
    assert holds(other, cast)
    assert other.session.held_digests == engine.session.held_digests


def test_case_019_a_bit_flipped_on_the_way_is_named() -> None:
    w0, w1 = random_weights(0), random_weights(1)
    engine = FakeEngine(w0)
    engine.corrupt = {2}
    trainer = connect(engine, DictSource(w1))
    with pytest.raises(WeightUpdateError, match="manifest has the digest of") as error:
        trainer.send_weights("v1")
    assert set(error.value.tensors) == {slot.meta.name for slot in ipc.packing.plan(trainer.source.metadata(), 512)[2]}
    assert holds(engine, w0) and engine.version == "v0"


def test_case_023_kernel_layout_under_checkpoint_names_is_a_shape_error() -> None:
    w0 = random_weights(0)
    engine = FakeEngine(w0)
    turned = {name: tensor.t().contiguous() if tensor.ndim == 2 else tensor for name, tensor in w0.items()}
    with pytest.raises(WeightUpdateError, match=r"has shape \[8, 32\], the checkpoint format has \[32, 8\]") as error:
        connect(engine, DictSource(turned)).send_weights(manifest=False)
    assert error.value.tensors == ["embed.weight"]
    assert holds(engine, w0)


def test_case_028_a_second_start_and_a_trainer_that_went_away() -> None:
    engine = FakeEngine(random_weights(0), lease_s=5.0)
    lost = engine.start_weight_update()["session_id"]
    trainer = connect(engine, DictSource(random_weights(1)))
    with pytest.raises(UpdateConflict, match=lost):
        trainer.send_weights()
    assert engine.session.session_id == lost and engine.session.is_open  # not aborted by the one who lost
    engine.now = 6.0
    trainer.send_weights("v1")
    assert holds(engine, random_weights(1))


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("mode", ["full", "partial"])
def test_case_029_and_030_a_fault_at_every_chunk_leaves_w0_and_v0(manifest: bool, mode: Any) -> None:
    w0, w1 = random_weights(0), random_weights(1)
    source = DictSource(w1)
    num_chunks = len(ipc.packing.plan(source.metadata(), 512))
    assert num_chunks >= 4
    for bad in range(num_chunks):
        engine = FakeEngine(w0)
        trainer = connect(engine, source)
        real, calls = engine.update_weights, iter(range(100))

        def failing(request: dict[str, Any], real: Any = real, calls: Any = calls, bad: int = bad) -> dict[str, Any]:
            if next(calls) == bad:
                request["update_info"]["dtype_names"][0] = "bf16"
            return real(request)

        engine.update_weights = failing  # type: ignore[method-assign]
        with pytest.raises(WeightUpdateError, match="unknown dtype of"):
            trainer.send_weights("v1", manifest=manifest, mode=mode)
        assert holds(engine, w0) and engine.version == "v0" and engine.number == 0
        assert not engine.session.is_open and engine.staged == {}
        with pytest.raises(UpdateConflict):
            engine.finish_weight_update(weight_version="v1")
        assert engine.version == "v0"
        trainer.send_weights("v1", manifest=manifest, mode=mode)  # the same channel works at once
        assert holds(engine, w1) and engine.version == "v1"


def test_a_source_that_fails_or_lies_in_the_middle_aborts_the_update() -> None:
    w0, w1 = random_weights(0), random_weights(1)
    engine = FakeEngine(w0)
    trainer = connect(engine, source := DictSource(w1))

    class Broken(DictSource):
        def __iter__(self):  # type: ignore[no-untyped-def]
            for index, pair in enumerate(super().__iter__()):
                if index == 5:
                    raise RuntimeError("gather failed")
                yield pair

    trainer.source = Broken(w1)
    with pytest.raises(RuntimeError, match="gather failed"):
        trainer.send_weights(manifest=False)
    assert not engine.session.is_open and holds(engine, w0)
    extra = DictSource({**w1, "more": torch.zeros(1)})
    extra.metadata = source.metadata  # type: ignore[method-assign]
    trainer.source = extra
    with pytest.raises(InvalidInput, match="gave more"):
        trainer.send_weights(manifest=False)
    trainer.source = source
    trainer.send_weights("v1")
    assert holds(engine, w1)


def test_a_silent_engine_ends_in_a_timeout_and_the_buffer_is_not_reused_before_it_answers() -> None:
    w0, w1 = random_weights(0), random_weights(1)
    engine = FakeEngine(w0)
    trainer = connect(engine, DictSource(w1), timeout_s=0.05)
    engine.gate = threading.Event()
    with pytest.raises(TimedOut, match=r"buffer 0 within 0\.05 s"):
        trainer.send_weights(manifest=False)
    assert not engine.session.is_open
    with pytest.raises(TimedOut):  # still reading
        trainer.send_weights()
    engine.start_weight_update(mode="partial")
    (late,) = [future for future in trainer._reading if future is not None]
    engine.gate.set()
    assert isinstance(late.exception(10), UpdateConflict)  # it belongs to an update that is over
    assert engine.session.is_open and engine.session.summary()["updated"] == 0
    engine.abort_weight_update()
    trainer.send_weights("v1")
    assert holds(engine, w1) and engine.version == "v1"


def test_a_new_trainer_takes_over_and_the_old_one_is_told() -> None:
    engine = FakeEngine(random_weights(0))
    first = connect(engine, DictSource(random_weights(1)))
    second = connect(engine, DictSource(random_weights(2)))
    with pytest.raises(UpdateConflict, match="was replaced"):
        first.send_weights()
    second.send_weights("v2")
    assert holds(engine, random_weights(2))


def test_after_shutdown() -> None:
    engine = FakeEngine(random_weights(0))
    trainer = connect(engine, DictSource(random_weights(1)))
    trainer.shutdown()
    trainer.shutdown()
    with pytest.raises(Conflict, match="was shut down"):
        trainer.send_weights()
    assert not engine.session.is_open
    engine.worker.shutdown()
    engine.worker.shutdown()
    info = engine.worker.parse_update_info(chunk())
    with pytest.raises(Conflict, match="call init_weight_transfer_engine first"):
        engine.worker.receive_weights(info)


def chunk(**changes: Any) -> dict[str, Any]:
    two = {
        "names": ["embed.weight", "layers.0.norm.weight"],
        "dtype_names": ["bfloat16", "bfloat16"],
        "shapes": [[8, 8], [7]],
    }
    return {"channel": "?", "buffer": 0, **two, **changes}


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [
        ({"shapes": [[8, 8], [225]]}, ["layers.0.norm.weight"]),
        ({"shapes": [[16, 16], [7]]}, ["layers.0.norm.weight"]),
        ({"dtype_names": ["float32", "bf16"]}, ["layers.0.norm.weight"]),
        ({"dtype_names": ["", "bf16"]}, ["embed.weight", "layers.0.norm.weight"]),
        ({"shapes": [[8, 8], [1 << 62]]}, []),
    ],
)
def test_chunks_that_can_not_be_right_name_their_tensors(changes: Any, tensors: list[str]) -> None:
    """Where each tensor lies follows from the list, so what is not in the buffer can not be named."""
    engine = FakeEngine(random_weights(0))
    channel = engine.init_weight_transfer_engine({"init_info": SMALL})["channel"]
    assert len(list(engine.worker.receive_weights(engine.worker.parse_update_info(chunk(channel=channel))))) == 2
    with pytest.raises(InvalidInput, match=r"norm\.weight") as error:
        engine.worker.receive_weights(engine.worker.parse_update_info(chunk(**{"channel": channel, **changes})))
    assert getattr(error.value, "tensors", []) == tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffer": 2}, "buffer must be 0 or 1, got 2"),
        ({"buffer": True}, "buffer must be 0 or 1"),
        ({"names": ["embed.weight"]}, "equally long"),
        ({"names": [], "dtype_names": [], "shapes": []}, "not be empty"),
        ({"names": "ab"}, "names must be a list"),
        ({"names": ["a", 1]}, "names must be a list of strings"),
        ({"shapes": [[8, 8], [-7]]}, "integers >= 0"),
        ({"shapes": [[8, 8], [7.0]]}, "integers >= 0"),
        ({"surprise": 1}, r"unknown \['surprise'\]"),
    ],
)
def test_malformed_update_infos(changes: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ipc.IPCWeightTransferEngine.parse_update_info(chunk(**changes))


@pytest.mark.parametrize("info", [{"packed_buffer_size_bytes": 0}, {"packed_buffer_size_bytes": "1"}, {"timeout_s": 0}])
def test_malformed_init_infos(info: Any) -> None:
    with pytest.raises(InvalidInput):
        connect(FakeEngine(random_weights(0)), DictSource({}), **info)


def test_a_buffer_can_not_be_shrunk_or_mistaken(tmp_path: Path) -> None:
    buffer = SharedBuffer.create(4096)
    path = f"/proc/self/fd/{buffer.fd}"
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    peer = SharedBuffer.open(path, buffer.identity)
    peer.data[7] = 42
    assert buffer.data[7] == 42
    other = tmp_path / "other"
    other.write_bytes(b"x" * 4096)
    with pytest.raises(InvalidInput, match="not the engine's buffer"):
        SharedBuffer.open(str(other), buffer.identity)
    buffer.close()
    with pytest.raises(InvalidInput, match="can not be opened"):
        SharedBuffer.open(path, peer.identity)
    assert peer.data[7] == 42  # freed with the last holder, not the first
    buffer.close()
    fds = num_fds()
    dropped = SharedBuffer.create(4096)
    assert num_fds() == fds + 2  # one for the trainer to find, one of the mapping
    del dropped
    assert num_fds() == fds


def test_no_linux_and_no_memory_are_said_at_init(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # trainers of other tests
    engine = FakeEngine(random_weights(0))
    fds = num_fds()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(InvalidInput, match="lower packed_buffer_size_bytes"):
            connect(engine, DictSource({}))
    assert num_fds() == fds
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(InvalidInput, match="needs Linux"):
        connect(engine, DictSource({}))


def test_case_040_200_updates_keep_fds_and_memory_flat() -> None:
    gc.collect()  # trainers of other tests
    until(lambda: not any("weight-transfer" in thread.name for thread in threading.enumerate()))
    engine = FakeEngine(random_weights(0))
    sources = [DictSource(random_weights(seed)) for seed in (1, 2)]
    trainer = connect(engine, sources[0])

    def rounds(count: int) -> tuple[int, int, int]:
        for index in range(count):
            trainer.source = sources[index % 2]
            trainer.send_weights(str(index), manifest=index % 4 == 0)
        gc.collect()
        return num_fds(), threading.active_count(), rss_bytes()

    shm = set(os.listdir("/dev/shm"))
    fds, threads, rss = rounds(20)
    fds_after, threads_after, rss_after = rounds(200)
    assert (fds_after, threads_after) == (fds, threads)
    assert rss_after - rss < 4 << 20
    assert set(os.listdir("/dev/shm")) == shm


def test_case_040_twenty_trainers_one_after_another_leave_nothing() -> None:
    engine = FakeEngine(random_weights(0))

    def one() -> tuple[int, int]:
        trainer = connect(engine, DictSource(random_weights(1)))
        trainer.send_weights()
        trainer.shutdown()
        del trainer
        until(lambda: not any("weight-transfer" in thread.name for thread in threading.enumerate()))
        return num_fds(), threading.active_count()

    before = one()
    assert [one() for _ in range(20)] == [before] * 20


def test_case_040_two_processes_and_a_kill_in_the_middle() -> None:
    """A real engine process; then it is killed with a chunk on the way: the trainer is told and keeps nothing."""
    fds, shm = num_fds(), set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, 0), daemon=True)
    process.start()
    theirs.close()
    try:
        client = PipeClient(ours)
        w1 = random_weights(1, torch.float32)
        trainer = connect(client, DictSource(w1, torch.bfloat16))
        expected = dict(zip(w1, from_source(trainer.source)["digests"], strict=True))
        before = client.digests()
        assert before != expected
        trainer.source = DictSource({"embed.weight": w1["embed.weight"]}, torch.bfloat16)
        with pytest.raises(WeightUpdateError, match="not listed"):
            trainer.send_weights()
        assert client.digests() == before
        trainer.source = DictSource(w1, torch.bfloat16)
        assert trainer.send_weights("v1")["updated"] == len(w1)
        assert client.digests() == expected

        class Killer(DictSource):
            def __iter__(self):  # type: ignore[no-untyped-def]
                for index, pair in enumerate(super().__iter__()):
                    if index == 6:
                        os.kill(process.pid, signal.SIGKILL)
                    yield pair

        trainer.source = Killer(w1, torch.bfloat16)
        with pytest.raises(EngineDead):
            trainer.send_weights("v2", manifest=False)
        process.join(10)
        assert process.exitcode == -signal.SIGKILL
        with pytest.raises(EngineDead):
            connect(client, DictSource(w1))
        trainer.shutdown()
    finally:
        process.kill()
        process.join(10)
        process.close()
        ours.close()
    del trainer
    gc.collect()
    assert set(os.listdir("/dev/shm")) == shm
    until(lambda: num_fds() <= fds + 1)  # multiprocessing keeps one for its resource tracker
