"""Weight updates to an engine of two ranks that share the experts: all take the same bytes, or none takes any."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import Driver, digests_of
from fakes_weights import DictSource
from midstream.errors import InvalidInput, TimedOut, WeightUpdateError
from midstream.serving.llm import LLM
from midstream.types import CompletionOutput, RequestOutput, SamplingParams
from midstream.weights.base import TrainerWeightTransferEngine, trainer_engines
from midstream.weights.manifest import weights_id
from test_engine_routes import ids_of
from test_models_moe import fuse
from test_weights_engine import Background

torch.set_num_threads(1)

NAME = "qwen3-moe"
W0, W1, W2 = (random_weights(NAME, seed) for seed in range(3))
THEIRS = "model.layers.1.mlp.experts.7.up_proj.weight"
"""Of an expert that the second rank alone holds."""
SMALL: dict[str, dict[str, Any]] = {"ipc": {"packed_buffer_size_bytes": 1 << 15}, "nccl": {"timeout_s": 5.0}}
RANKS: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "dp_timeout_s": 20.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("m")
    for seed in range(3):
        write_checkpoint(root / f"w{seed}", NAME, seed)
    return root


def test_an_update_is_named_alike_on_ranks_that_refused_different_starts(models: pathlib.Path) -> None:
    names = []
    for refused in (0, 2):
        driver = Driver(models / "w0", data_parallel_size=2)
        for op in range(1, refused + 1):
            driver.core.call(op, "start_weight_update", {})
            driver.core.call(op + 10, "abort_weight_update", {})
        driver.core.call(7, "start_weight_update", {})
        names.append(driver.core.session.session_id)
        driver.close()
    assert names[0] == names[1]


@pytest.fixture(scope="module", params=["ipc", "nccl"])
def engine(models: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Background]:
    made = Background(models / "w0", weight_transfer_backend=request.param, **RANKS)
    yield made
    made.close()


@pytest.fixture
def trainer(engine: Background) -> Iterator[TrainerWeightTransferEngine]:
    yield connect(engine)
    last = connect(engine)
    last.source = DictSource(W0)
    last.send_weights("0")
    last.shutdown()


def connect(engine: Background, **info: Any) -> TrainerWeightTransferEngine:
    backend = engine.llm.config.weight_transfer_backend
    cls = trainer_engines.lookup(backend)
    return cls.trainer_init({**SMALL[backend], **info}, client=engine.client, source=DictSource(W1))  # type: ignore[arg-type]


def numbers(engine: Background) -> list[int]:
    return [rank["number"] for rank in engine.client.status()["ranks"]]


async def both(engine: Background, params: SamplingParams, prompt: list[int]) -> list[RequestOutput]:
    """The answer of each rank."""
    found = []
    for session in sessions(engine):
        async for output in engine.llm.generate(prompt, params, session=session):
            if output.finished:
                found.append(output)
    return found


def sessions(engine: Background) -> list[str]:
    """A session of each rank."""
    router = engine.llm._engine.requests.router
    names = [f"session {i}" for i in range(2)]
    for rank, name in enumerate(names):
        router.begin(1 - rank, 1)
        assert router.pick(name) == rank
        router.end(1 - rank, 1)
    return names


def test_an_update_is_the_same_on_all_ranks_twice_in_a_row_and_back(
    engine: Background, trainer: TrainerWeightTransferEngine, models: pathlib.Path
) -> None:
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, detokenize=False)
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        for path, weights in (("w1", W1), ("w1", W1), ("w2", W2), ("w0", W0)):
            before = numbers(engine)
            trainer.source = DictSource(weights)
            reply = trainer.send_weights("x")
            assert reply["updated"] == reply["of"] == len(W0) and reply["weights_id"] == weights_id(digests_of(weights))
            assert numbers(engine) == [before[0] + 1] * 2 == [reply["number"]] * 2
            assert engine.client.weight_digests()["digests"] == digests_of(weights)
            llm.update_weights({"weight_dir": str(models / path)})
            alone = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0]
            for output in engine.run(both(engine, params, [5, 6, 7, 8])):
                assert output.outputs[0].token_ids == alone.token_ids
                assert output.outputs[0].processed_logprobs == alone.processed_logprobs


def test_ranks_of_one_machine_read_the_same_memory(engine: Background, trainer: TrainerWeightTransferEngine) -> None:
    if engine.llm.config.weight_transfer_backend != "ipc":
        assert [c.getpeername()[0] for c in trainer._connections] == ["127.0.0.1"] * 2  # type: ignore[attr-defined]
        return
    mapped = []
    for rank in engine.llm._ranks:
        maps = pathlib.Path(f"/proc/{rank.process.pid}/maps").read_text()
        mapped.append(set(re.findall(r" (\d+) +/memfd:midstream-weights", maps)))
    assert mapped[0] == mapped[1] and len(mapped[0]) == 2
    shared = {"channel": "x", "buffer_bytes": 1, "buffers": [{"path": "/etc/passwd", "identity": [1, 2, 3]}] * 2}
    for bad in (shared, {"channel": "x"}, {**shared, "buffers": []}):
        with pytest.raises(InvalidInput, match="shared must be the reply of one worker's init"):
            engine.client.init_weight_transfer_engine({"init_info": {"shared": bad}})


class Torn(DictSource):
    """Breaks off in the middle."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, item in enumerate(super().__iter__()):
            if i == len(self.tensors) // 2:
                raise RuntimeError("the trainer fell over")
            yield item


def test_a_torn_update_changes_no_rank(engine: Background, trainer: TrainerWeightTransferEngine) -> None:
    before = numbers(engine)
    trainer.source = Torn(W1)
    with pytest.raises(RuntimeError, match="fell over"):
        trainer.send_weights(manifest=False)
    trainer = connect(engine)
    trainer.source = DictSource({**W1, THEIRS: torch.full_like(W1[THEIRS], torch.nan)})
    with pytest.raises(WeightUpdateError, match=re.escape(THEIRS)):
        trainer.send_weights()
    assert engine.client.status()["update"] is None and numbers(engine) == before
    assert engine.client.weight_digests()["digests"] == digests_of(W0)
    connect(engine).send_weights("whole")
    assert engine.client.weight_digests()["digests"] == digests_of(W1)


def test_case_004_wrong_or_missing_experts_fail_with_the_list_on_all_ranks(
    engine: Background, trainer: TrainerWeightTransferEngine
) -> None:
    trainer.source = DictSource(fuse(W1))
    trainer.send_weights("fused")
    assert engine.client.weight_digests()["digests"] == digests_of(W1)
    wrong = {name.replace(THEIRS, "nobody"): tensor for name, tensor in W2.items()}
    trainer.source = DictSource(wrong)
    with pytest.raises(WeightUpdateError, match="nobody is no tensor of this model") as found:
        trainer.send_weights(manifest=False)
    assert "nobody" in found.value.tensors
    trainer = connect(engine)
    trainer.source = DictSource({name: tensor for name, tensor in W2.items() if name != THEIRS})
    with pytest.raises(WeightUpdateError) as found:
        trainer.send_weights(manifest=False)
    assert found.value.tensors == [THEIRS]
    assert engine.client.weight_digests()["digests"] == digests_of(W1) and len(set(numbers(engine))) == 1


def test_case_024_one_element_of_one_expert_is_one_name(
    engine: Background, trainer: TrainerWeightTransferEngine
) -> None:
    check = engine.llm.weight_checker
    trainer.send_weights("1")
    assert engine.run(check("checksum"))["checksums"] == digests_of(W1)
    flipped = {**W1, THEIRS: W1[THEIRS].clone()}
    flipped[THEIRS][3, 5] += 1
    trainer.source = DictSource(flipped)
    trainer.send_weights("2")
    checked = engine.run(check("compare", digests_of(W1)))
    assert (checked["match"], checked["mismatches"]) == (False, [THEIRS])
    assert engine.run(check("compare", digests_of(flipped)))["match"] is True


def test_case_025_a_wrong_number_of_workers_ends_both_sides_in_time(engine: Background) -> None:
    if engine.llm.config.weight_transfer_backend == "nccl":
        with pytest.raises(TimedOut, match=r"init: ranks \[3\] did not connect within 0.5 s"):
            connect(engine, world_size=4, timeout_s=0.5)
        with pytest.raises(InvalidInput, match="rank 1: rank_offset must be in .* got 1 of 2 for worker 1"):
            connect(engine, world_size=2)
    trainer = connect(engine)
    assert trainer.send_weights("1")["version"] == "1"
    trainer.source = DictSource(W0)
    trainer.send_weights("0")
    trainer.shutdown()


def test_case_110_routes_over_ranks_are_those_of_one(models: pathlib.Path) -> None:
    """With and without a prefix that another request left, after preemption, and beside requests of the other rank."""
    base = [(7 * i * i + 3 * i) % 158 + 2 for i in range(37)]
    prompts = [base, [*base[:33], 9, 9], base[:5], *(base[: 30 + i] for i in range(5)), base]
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "detokenize": False, "return_routed_experts": True}

    def params(i: int) -> SamplingParams:
        return SamplingParams(seed=i % 3, **options)

    with LLM(str(models / "w0"), num_blocks=200, enable_prefix_caching=False) as llm:
        wanted = [llm.generate([prompt], params(i), use_tqdm=False)[0].outputs[0] for i, prompt in enumerate(prompts)]
    tight = Background(models / "w0", num_blocks=8, max_num_batched_tokens=24, **{**RANKS, "dp_vote": "interval"})
    try:
        found: list[CompletionOutput] = []
        for _ in range(2):  # the second time with prefixes in both caches
            futures = [tight.begin(prompt, params(i)) for i, prompt in enumerate(prompts)]
            found = [future.result(30.0).outputs[0] for future in futures]
            for one, two in zip(found, wanted, strict=True):
                assert (one.token_ids, one.processed_logprobs) == (two.token_ids, two.processed_logprobs)
                assert np.array_equal(ids_of(one.routed_experts), ids_of(two.routed_experts))
        assert sum(out.num_preemptions for out in found) > 0 and sum(out.num_cached_tokens for out in found) > 0
    finally:
        tight.close()


def test_tokens_say_which_version_their_cache_is_of_on_every_rank(
    engine: Background, trainer: TrainerWeightTransferEngine
) -> None:
    params = SamplingParams(max_tokens=400, seed=3, ignore_eos=True, detokenize=False)
    first = engine.client.status()["number"]
    futures = [engine.begin([5 + i, 6], params) for i in range(4)]
    while (
        engine.client.status()["num_sampled_tokens"] == 0
        or min(rank["running"] for rank in engine.client.status()["ranks"]) == 0
    ):
        assert not any(future.done() for future in futures)
    trainer.send_weights("kept", kv_policy="keep")
    for future in futures:
        out = future.result(30.0).outputs[0]
        assert [span.number for span in out.weight_versions] == [first, first + 1]
        (kept, start, end), *_ = out.kv_versions
        assert (kept, start) == (first, 0) and 0 < end <= 402
