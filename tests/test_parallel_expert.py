"""Expert parallel over real processes: the bits of one rank, whatever each rank has to do; and losing a rank."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import config_of, random_weights, write_checkpoint
from cores import Driver
from midstream.engine.core import EngineCore
from midstream.errors import InvalidInput, RankLost, TimedOut
from midstream.models.config import ModelConfig
from midstream.models.llama import Llama
from midstream.models.weights import stage_all
from midstream.ops.attention import AttentionMetadata
from midstream.ops.numerics import difference
from midstream.parallel.expert import GroupAllToAll
from midstream.parallel.groups import Group, Meeting

LIMIT_S = 60.0
SIZE = 16


def _rank(target: Callable[..., Any], rank: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.save(target(rank, folder, *arguments), f"{folder}/result-{rank}.pt")


def run_ranks(target: Callable[..., Any], folder: pathlib.Path, *arguments: Any, size: int = 2) -> list[Any]:
    """``target(rank, folder, …)`` in ``size`` processes; what each returned, or its exit code where it did not."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(target, r, str(folder), arguments)) for r in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    hanging = [process for process in ranks if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join(LIMIT_S)
    assert not hanging, "a rank did not come to its end"
    files = [folder / f"result-{rank}.pt" for rank in range(size)]
    return [torch.load(f, weights_only=True) if f.exists() else p.exitcode for f, p in zip(files, ranks, strict=True)]


def open_group(rank: int, folder: str, address: str = "", size: int = 2, timeout_s: float = 30.0) -> Group:
    return Group("experts", address or f"file://{folder}/meeting", rank, size, timeout_s)


# -- the model ---------------------------------------------------------------------------------------------------------


def _forwards(rank: int, folder: str, address: str, size: int, num_experts: int, dtype: torch.dtype) -> list[Any]:
    """Random batches, each rank its own: against all experts here. How many tokens each step had, and what differed."""
    changes = {"num_experts": num_experts, "num_experts_per_tok": 3}
    config = ModelConfig.from_hf(config_of("qwen3-moe", **changes))
    tensors = random_weights("qwen3-moe", dtype=dtype, **changes)
    cpu = torch.device("cpu")
    group = open_group(rank, folder, address, size)
    exchange = GroupAllToAll(group, num_experts)
    own = stage_all(config, tensors.items(), dtype, cpu, exchange.experts)
    whole = stage_all(config, tensors.items(), dtype, cpu)
    assert len(own.layers[0].experts) == len(exchange.experts) < num_experts == len(whole.layers[0].experts)
    together, alone = Llama(config, exchange=exchange), Llama(config)
    rng = random.Random(rank)
    sizes, wrong = [], 0
    for step in range(40):
        tokens = 0 if step % size == rank and step < 8 else rng.choice([0, 1, 1, 2, 3, 17, 64])
        tokens = 0 if step == 20 else tokens  # on both
        sizes.append(tokens)
        if not tokens:
            together.attend_empty(own)
            continue
        ids = torch.tensor([rng.randrange(160) for _ in range(tokens)])
        if step % 5 == 0:
            ids[:] = ids[0]  # all of them to the same experts: others have no row
        shapes = ((config.head_dim, SIZE), (SIZE, config.head_dim))
        found, wanted = (
            (
                model.serve(
                    of, ids, torch.arange(tokens), *_caches(config, shapes, tokens, dtype), _meta(tokens), routes
                ),
                torch.stack(routes),
            )
            for model, of, routes in ((together, own, []), (alone, whole, []))
        )
        wrong += not (torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1]))
    group.close()
    return [sizes, wrong, list(exchange.experts)]


def _caches(config: ModelConfig, shapes: Any, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    blocks = -(-tokens // SIZE)
    return [torch.zeros(config.num_layers, blocks, config.num_kv_heads, *shape, dtype=dtype) for shape in shapes]


def _meta(tokens: int) -> AttentionMetadata:
    lengths = torch.tensor([0, tokens], dtype=torch.int32)
    tables = torch.arange(-(-tokens // SIZE), dtype=torch.int32)[None]
    return AttentionMetadata(tables, lengths, lengths[1:].clone(), torch.arange(tokens))


@pytest.mark.parametrize(("size", "num_experts", "dtype"), [(2, 8, torch.bfloat16), (3, 7, torch.float32)])
def test_any_number_of_ranks_gives_the_bits_of_one(
    tmp_path: pathlib.Path, size: int, num_experts: int, dtype: torch.dtype
) -> None:
    meeting = Meeting()
    results = run_ranks(_forwards, tmp_path, meeting.address, size, num_experts, dtype, size=size)
    assert [wrong for _, wrong, _ in results] == [0] * size
    held = [len(experts) for _, _, experts in results]
    assert [e for _, _, experts in results for e in experts] == list(range(num_experts)) and max(held) - min(held) <= 1
    steps = list(zip(*(sizes for sizes, _, _ in results), strict=True))
    assert any(not any(step) for step in steps) and any(0 in step and any(step) for step in steps)


# -- the engine --------------------------------------------------------------------------------------------------------


def _engine(rank: int, folder: str) -> list[Any]:
    """Requests, an update through staging, and requests again; in lockstep, with empty steps where there is no other.
    The weights_ids and digests, how many experts are held, and what the requests came to."""
    group = open_group(rank, folder)
    driver = Driver(pathlib.Path(folder) / "w0")
    driver.core.close()
    driver.core = core_of(driver.config, group, driver.turn.set)
    found: list[Any] = [[driver.core.version()["weights_id"]], [], []]
    requests(driver, rank, "a")
    lockstep(driver)
    found[2].append(results(driver))
    driver.now("update_weights", request={"weight_dir": f"{folder}/w{1}"})
    found[0].append(driver.core.version()["weights_id"])
    found[1] = [driver.digests(), len(driver.core.worker.weights.layers[0].experts)]
    requests(driver, rank, "b")
    lockstep(driver)
    found[2].append(results(driver))
    driver.now("update_weights", request={"weight_dir": f"{folder}/w0-fused"})
    found[0].append(driver.core.version()["weights_id"])
    driver.close()
    group.close()
    return found


def core_of(config: Any, group: Group, wake: Any = lambda: None) -> EngineCore:
    """With the experts of its group; its steps are the test's, so it takes no votes."""
    core = EngineCore(config, wake, SimpleNamespace(experts=group))  # type: ignore[arg-type]
    core._lockstep = None
    return core


def lockstep(driver: Driver, steps: int = 60) -> None:
    for _ in range(steps):
        if not driver.step():
            driver.core.worker.execute_empty()
    assert not driver.core.scheduler.has_unfinished


def requests(driver: Driver, rank: int, name: str) -> None:
    for i in range(4 - 2 * rank):  # the second rank has less to do, and ends before
        prompt = [(7 * i * i + 3 * j + rank) % 158 + 2 for j in range(5 + 9 * i)]
        options = {"n": 2, "max_tokens": 9 + 5 * i - 3 * rank, "return_routed_experts": True}
        driver.add(prompt, f"{name}{i}", seed=i, **options)


def results(driver: Driver) -> list[Any]:
    return [
        [name, out.index, out.token_ids, out.processed_logprobs, bytes(out.routed_experts.data).hex()]
        for name, builder in driver.builders.items()
        for out in builder.output.outputs
    ]


def test_two_ranks_serve_and_update_as_one(tmp_path: pathlib.Path) -> None:
    from test_models_moe import fuse

    for i in range(2):
        write_checkpoint(tmp_path / f"w{i}", "qwen3-moe", seed=i)
    write_checkpoint(tmp_path / "w0-fused", "qwen3-moe")
    save_file(fuse(random_weights("qwen3-moe")), tmp_path / "w0-fused" / "model.safetensors")
    ranks = run_ranks(_engine, tmp_path)
    ids = []
    for rank, (found_ids, (digests, num_experts), found) in enumerate(ranks):
        driver = Driver(tmp_path / "w0")
        ids = [driver.core.version()["weights_id"]]
        requests(driver, rank, "a")
        driver.run()
        assert found[0] == results(driver)
        driver.now("update_weights", request={"weight_dir": str(tmp_path / "w1")})
        ids.append(driver.core.version()["weights_id"])
        requests(driver, rank, "b")
        driver.run()
        assert found[1] == results(driver) and found[1][: len(found[0])] == found[0]
        assert digests == driver.digests() and num_experts == 4
        assert found_ids == [*ids, ids[0]] and ids[0] != ids[1]
        driver.close()


def _alone(rank: int, folder: str) -> list[Any]:
    group = open_group(rank, folder, timeout_s=5.0)
    driver = Driver(pathlib.Path(folder) / "w0")
    driver.core.close()
    driver.core = core_of(driver.config, group, driver.turn.set)
    requests(driver, 0, "a")
    driver.step()
    if rank == 1:
        os._exit(7)
    try:
        lockstep(driver)
    except RankLost as error:
        return [error.message, len(driver.core.scheduler.live)]
    return ["nothing was raised"]


def test_a_step_without_the_other_rank_ends_the_engine_and_no_request_alone(tmp_path: pathlib.Path) -> None:
    """One rank alone would answer its requests with an error, and go on."""
    write_checkpoint(tmp_path / "w0", "qwen3-moe")
    (message, num_live), code = run_ranks(_alone, tmp_path)
    assert "rank 0 of 2 lost another one" in message and num_live == 8 and code == 7


def test_the_fingerprint_knows_the_order_of_addition_and_not_the_number_of_ranks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Driver(write_checkpoint(tmp_path / "m", "qwen3-moe"))
    group = Group("experts", f"file://{tmp_path}/meeting", 0, 1, 5.0)
    grouped = core_of(alone.config, group)
    assert grouped.worker.fingerprint == alone.core.worker.fingerprint
    monkeypatch.setattr(GroupAllToAll, "combine_order", "on the way")
    reducing = core_of(alone.config, group)
    gap = difference(reducing.worker.fingerprint, grouped.worker.fingerprint)
    assert gap == "combine_order: on the way / ascending expert id"
    for core in (grouped, reducing, alone.core):
        core.close()
    group.close()


# -- groups ------------------------------------------------------------------------------------------------------------


def _lost(rank: int, folder: str, how: str) -> list[Any]:
    group = open_group(rank, folder, timeout_s=2.0)
    rows = torch.ones(4, 3)
    assert group.all_to_all(rows, [2, 2], [2, 2]).tolist() == rows.tolist()
    if rank == 1 and how == "gone":
        os._exit(7)
    if rank == 1:  # silent until the other gave up
        waiting = open_group(rank, folder + "/other", timeout_s=20.0)
        waiting.close()
        return []
    try:
        group.all_to_all(rows, [2, 2], [2, 2])
    except RankLost as error:
        if how == "silent":
            open_group(rank, folder + "/other", timeout_s=20.0).close()
        return [error.message]
    return ["nothing was raised"]


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_rank_that_is_gone_or_silent_is_an_error_of_the_others(tmp_path: pathlib.Path, how: str) -> None:
    (tmp_path / "other").mkdir()
    first, second = run_ranks(_lost, tmp_path, how)
    assert "rank 0 of 2 lost another one, or it was silent for 2 s" in first[0]
    assert second == (7 if how == "gone" else [])


def test_a_group_that_is_not_complete_in_time_says_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TimedOut, match="not all 2 ranks met at file:"):
        open_group(0, str(tmp_path), timeout_s=0.3)
    meeting = Meeting(timeout_s=5.0)
    with pytest.raises(TimedOut, match="not all 2 ranks met at tcp:"):
        Group("experts", meeting.address, 1, 2, 0.3)
    group = Group("alone", meeting.address, 0, 1, 5.0)
    assert group.all_to_all(torch.ones(2, 2), [2], [2]).tolist() == [[1, 1], [1, 1]]
    with pytest.raises(InvalidInput, match="2 ranks needs at least as many experts"):
        group.size = 2
        GroupAllToAll(group, 1)
    group.close()
    with pytest.raises(InvalidInput, match="tcp://host:port or file:///path"):
        Group("experts", "here", 0, 1)
    with pytest.raises(InvalidInput, match=r"rank must be in \[0, 2\), got 2"):
        Group("experts", meeting.address, 2, 2)
    with pytest.raises(InvalidInput, match="ranks can not meet"):
        Meeting(port=int(meeting.address.rpartition(":")[2]))
