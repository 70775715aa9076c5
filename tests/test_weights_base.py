"""What a trainer tells of its numerics when it opens the channel, and what the engine's status then says."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from fakes_weights import DictSource
from midstream.errors import Conflict
from midstream.ops.numerics import fingerprint
from midstream.rl.engine_thread import EngineThread
from midstream.rl.policy import Policy
from midstream.rl.sync import open_transfer
from midstream.serving.client import HTTPClient
from midstream.serving.llm import LLM
from midstream.weights.base import trainer_engines
from servers import MODEL, OPTIONS, served

UNKNOWN = "no (trainer numerics unknown)"


@pytest.mark.parametrize("backend", ["ipc", "nccl", "disk"])
def test_each_trainer_half_tells_its_source_s_numerics(backend: str, tmp_path: pathlib.Path) -> None:
    half = trainer_engines.lookup(backend)
    info: dict[str, Any] = {"directory": str(tmp_path)} if backend == "disk" else {}
    with LLM(str(MODEL), dtype="float32", weight_transfer_backend=backend, num_blocks=64) as llm:
        assert llm.status()["exact"] == UNKNOWN
        same = Policy(MODEL, "float32", llm.config.block_size)
        foreign = DictSource({name: tensor for name, tensor in same})
        numerics = llm.status()["fingerprint"]
        other = {**numerics, "torch": "2.12.0", "isa": "AVX2", "kernels": "another build"}
        gap = ", ".join(f"{k}: {numerics[k]} / {other[k]}" for k in ("isa", "kernels", "torch"))
        sources: list[tuple[Any, str]] = [
            (same, "yes"),
            (foreign, UNKNOWN),
            (Policy(MODEL, "bfloat16", 16), "no (engine and trainer differ in dtype: float32 / bfloat16)"),
            (Policy(MODEL, "float32", 32), "no (engine and trainer differ in block_size: 16 / 32)"),
        ]
        for source, said in sources:
            trainer = half.trainer_init(info, client=llm, source=source)
            assert llm.status()["exact"] == said
            trainer.shutdown()
        foreign.fingerprint = other  # type: ignore[attr-defined]
        trainer = half.trainer_init(info, client=llm, source=foreign)
        assert llm.status()["exact"] == f"no (engine and trainer differ in {gap})"
        trainer.send_weights("v1")
        assert llm.status()["exact"].startswith("no") and llm.status()["version"] == "v1"
        trainer.shutdown()


def test_a_channel_that_was_opened_anew_knows_nothing_of_the_trainer_before() -> None:
    with LLM(str(MODEL), num_blocks=64) as llm:
        same = Policy(MODEL)
        trainer = trainer_engines.lookup("ipc").trainer_init({}, client=llm, source=same)
        assert llm.status()["exact"] == "yes"
        with pytest.raises(Exception, match="packed_buffer_size_bytes"):
            llm.init_weight_transfer_engine({"init_info": {"packed_buffer_size_bytes": -1}})
        assert llm.status()["exact"] == UNKNOWN
        trainer.shutdown()
        with pytest.raises(Conflict):
            trainer.send_weights()


def test_over_http_our_own_trainer_is_exact_and_a_foreign_one_unknown() -> None:
    policy = Policy(MODEL)
    assert policy.fingerprint == fingerprint(policy.dtype, policy.block_size)
    with served(engine={**OPTIONS, "weight_transfer_backend": "nccl"}) as server:
        loop = EngineThread()
        try:

            async def connect() -> HTTPClient:
                return HTTPClient(server.url)

            client = loop.run(connect(), 10, "connect")
            for source, said in ((policy, "yes"), (DictSource(dict(policy)), UNKNOWN)):
                transfer = open_transfer("nccl", client, loop, source, timeout_s=20)
                transfer.send_weights("v1")
                assert server.status()["exact"] == said
                transfer.shutdown()
            loop.run(client.aclose(), 10, "close")
        finally:
            loop.close()
