from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes_weights import DictSource, FakeEngine, random_weights
from midstream.errors import InvalidInput, TimedOut, WeightUpdateError
from midstream.weights.base import (
    Registry,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    trainer_engines,
    worker_engines,
)
from midstream.weights.ipc import IPCTrainerWeightTransferEngine, IPCWeightTransferEngine
from midstream.weights.manifest import from_source, weights_id

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass
class NoInfo:
    update: str | None = None
    needed: int = 0


class NothingWorker(WeightTransferEngine):
    """A transport that says yes and delivers nothing."""

    init_info_cls = NoInfo
    update_info_cls = NoInfo

    def init_transfer_engine(self, init_info: NoInfo) -> dict[str, Any]:
        return {}

    def receive_weights(self, update_info: NoInfo) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def shutdown(self) -> None:
        pass


class NothingTrainer(TrainerWeightTransferEngine):
    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any) -> NothingTrainer:
        return cls(client, source)

    def transfer(self, session_id: str) -> None:
        self.client.update_weights({"update_info": {"update": session_id}})

    def shutdown(self) -> None:
        pass


def registry() -> Registry[WeightTransferEngine]:
    return Registry(WeightTransferEngine, {"ipc": "midstream.weights.ipc:IPCWeightTransferEngine"})


def test_by_name_by_class_and_by_path() -> None:
    assert worker_engines.lookup("ipc") is IPCWeightTransferEngine
    assert trainer_engines.lookup("ipc") is IPCTrainerWeightTransferEngine
    assert worker_engines.lookup(NothingWorker) is NothingWorker
    assert worker_engines.lookup(f"{__name__}:NothingWorker") is NothingWorker
    r = registry()
    r.register("nothing", NothingWorker)
    r.register("later", f"{__name__}:NothingWorker")
    assert r.lookup("nothing") is r.lookup("later") is NothingWorker


def test_a_path_is_imported_when_it_is_looked_up() -> None:
    r = registry()
    r.register("broken", "no_such_module_here:Engine")
    with pytest.raises(InvalidInput, match="no_such_module_here"):
        r.lookup("broken")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("ncl", r"unknown WeightTransferEngine 'ncl': known are \['ipc'\], or name one as module:Class"),
        ("midstream.weights.ipc:Missing", "can not be loaded"),
        ("midstream.weights.ipc:", "module:Class"),
        (":Class", "module:Class"),
        (int, "not a subclass"),
        ("midstream.weights.ipc:IPCTrainerWeightTransferEngine", "not a subclass of WeightTransferEngine"),
        ("midstream.weights.ipc:NUM_BUFFERS", "not a subclass"),
    ],
)
def test_unknown_backends(key: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        registry().lookup(key)


def test_register_refuses_a_name_that_is_taken_or_no_name() -> None:
    r = registry()
    with pytest.raises(InvalidInput, match="'ipc' is registered already"):
        r.register("ipc", NothingWorker)
    assert r.lookup("ipc") is IPCWeightTransferEngine
    for name in "", "a:b":
        with pytest.raises(InvalidInput, match="colon"):
            r.register(name, NothingWorker)
    with pytest.raises(InvalidInput, match="not a subclass"):
        r.register("int", int)  # type: ignore[arg-type]


def test_infos_are_made_from_dicts_that_fit() -> None:
    assert NothingWorker.parse_update_info({"needed": 3}) == NoInfo(None, 3)
    with pytest.raises(InvalidInput, match=r"unknown \['needs'\], missing \[\]; the fields are \['update', 'needed'\]"):
        NothingWorker.parse_init_info({"needs": 3})
    with pytest.raises(InvalidInput, match="made from a dict, got list"):
        NothingWorker.parse_init_info([])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"missing \['channel', 'buffer'"):
        IPCWeightTransferEngine.parse_update_info({})


def test_case_019_a_transport_that_delivers_nothing_never_succeeds() -> None:
    w0, w1 = random_weights(0), random_weights(1)
    engine = FakeEngine(w0, backend=NothingWorker)
    before = engine.digests()
    trainer = NothingTrainer.trainer_init({}, client=engine, source=DictSource(w1))
    for options in {}, {"manifest": False}, {"mode": "partial"}:
        with pytest.raises(WeightUpdateError, match="no tensor was received"):
            trainer.send_weights("v1", **options)
        assert engine.digests() == before and engine.version == "v0"


def test_a_failed_abort_does_not_hide_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(random_weights(0), backend=NothingWorker)
    trainer = NothingTrainer.trainer_init({}, client=engine, source=DictSource(random_weights(1)))

    def unreachable() -> dict[str, Any]:
        raise TimedOut("nobody answers")

    monkeypatch.setattr(engine, "abort_weight_update", unreachable)
    with pytest.raises(WeightUpdateError, match="no tensor was received") as error:
        trainer.send_weights()
    assert "nobody answers" in error.value.__notes__[0]


def test_a_users_own_class_by_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "my_transfer_engine", raising=False)
    w0, w1, w2 = (random_weights(seed) for seed in range(3))
    engine = FakeEngine(w0, backend="my_transfer_engine:FileWeightTransferEngine")
    trainer_cls = trainer_engines.lookup("my_transfer_engine:FileTrainerWeightTransferEngine")
    with pytest.raises(InvalidInput, match="does not exist on this side"):
        trainer_cls.trainer_init({"directory": str(tmp_path / "no")}, client=engine, source=DictSource(w1))
    source = DictSource(w1)
    trainer = trainer_cls.trainer_init({"directory": str(tmp_path)}, client=engine, source=source)
    for version, weights in ("v1", w1), ("v2", w2), ("v1 again", w1):
        source.tensors = weights
        reply = trainer.send_weights(version)
        assert reply["updated"] == reply["of"] == len(w1) and reply["version"] == engine.version == version
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in weights.items())
        listed = from_source(source)
        assert reply["weights_id"] == weights_id(dict(zip(listed["names"], listed["digests"], strict=True)))
    assert list(tmp_path.iterdir()) == []
    for info, message in ({"file": "../x"}, "plain file name"), ({"file": "gone"}, "can not be read"):
        engine.start_weight_update()
        with pytest.raises(InvalidInput, match=message):
            engine.update_weights({"update_info": info})
        engine.abort_weight_update()
    trainer.shutdown()
