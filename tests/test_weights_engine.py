"""Whole weight updates: the trainer's half of a backend against a real engine, in this process and in another."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pathlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import LIMIT_S, TINY, Driver, digests_of
from fakes_weights import VERBS, DictSource, PipeClient
from midstream.errors import Conflict, EngineDead, MidstreamError, UpdateConflict, WeightUpdateError, to_wire
from midstream.models.weights import EMBEDDING, HEAD
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.llm import LLM
from midstream.types import SamplingParams
from midstream.weights import packing
from midstream.weights.base import trainer_engines, worker_engines
from midstream.weights.columns import from_columns
from midstream.weights.ipc import IPCTrainerWeightTransferEngine
from midstream.weights.manifest import weights_id

torch.set_num_threads(1)

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
PARAMS = SamplingParams(max_tokens=16, seed=3, ignore_eos=True, detokenize=False)
LONG = SamplingParams(max_tokens=480, seed=3, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "max_num_seqs": 8}
W0, W1, W2 = (random_weights("llama", seed, **TINY) for seed in range(3))
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_checkpoint(root / f"w{seed}", "llama", seed, **TINY)
        write_checkpoint(root / f"tied{seed}", "qwen3", seed, **TINY)
    write_checkpoint(root / "bf16", "llama", 0, torch.bfloat16, **TINY)
    return root


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def connect(client: Any, tensors: dict[str, torch.Tensor], **info: Any) -> IPCTrainerWeightTransferEngine:
    source = DictSource(tensors, info.pop("dtype", None))
    info = {"packed_buffer_size_bytes": 4096, **info}
    return IPCTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)


def ask(llm: LLM, prompt: list[int] | None = None) -> Any:
    out = llm.generate([prompt or [5, 6, 7, 8]], PARAMS)[0].outputs[0]
    return out.token_ids, out.token_logprobs


def held(llm: LLM) -> dict[str, str]:
    return llm._call("weight_digests")["digests"]  # type: ignore[no-any-return]


def reference(models: pathlib.Path, name: str) -> Any:
    with LLM(str(models / name), num_blocks=64) as llm:
        return ask(llm)


class LoopClient:
    """A WeightTransferClient for an AsyncLLM whose loop runs in another thread."""

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self.llm, self.loop = llm, loop

    def __getattr__(self, verb: str) -> Any:
        if verb not in (*VERBS, "status", "weight_digests"):
            raise AttributeError(verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(getattr(self.llm, verb)(*args, **kwargs), self.loop).result(LIMIT_S)

        return call


class Background:
    """An AsyncLLM in a loop of its own thread, so that a test can be a plain, blocking trainer."""

    def __init__(self, model: pathlib.Path, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.llm = AsyncLLM(str(model), **{**OPTIONS, **options})
        self.run(self.llm.start())
        self.client = LoopClient(self.llm, self.loop)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LIMIT_S)

    def begin(self, prompt: list[int], params: SamplingParams) -> Any:
        """A future of the finished output."""
        return asyncio.run_coroutine_threadsafe(self.llm.generate_one(prompt, params), self.loop)

    def ask(self) -> Any:
        out = self.run(self.llm.generate_one([5, 6, 7, 8], PARAMS)).outputs[0]
        return out.token_ids, out.token_logprobs

    def close(self) -> None:
        try:
            self.run(self.llm.aclose())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(LIMIT_S)
            self.loop.close()


@pytest.fixture
def background(models: pathlib.Path) -> Iterator[Any]:
    made: list[Background] = []

    def build(name: str = "w0", **options: Any) -> Background:
        made.append(Background(models / name, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize("buffer_bytes", [1, 4096, 1 << 20])
def test_ipc_in_process_w1_is_a_fresh_engine_from_w1_twice_and_back(models: pathlib.Path, buffer_bytes: int) -> None:
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        before = ask(llm)
        trainer = connect(llm, W1, packed_buffer_size_bytes=buffer_bytes)
        for number, (tensors, name) in enumerate([(W1, "w1"), (W1, "w1"), (W0, "w0"), (W1, "w1")], 1):
            trainer.source = DictSource(tensors)
            reply = trainer.send_weights(f"v{number}")
            assert (reply["updated"], reply["of"], reply["number"], reply["version"]) == (12, 12, number, f"v{number}")
            assert reply["weights_id"] == weights_id(digests_of(tensors)) and held(llm) == digests_of(tensors)
            assert ask(llm) == (before if name == "w0" else reference(models, "w1"))
        trainer.shutdown()


def test_case_001_tied_heads_end_to_end(models: pathlib.Path) -> None:
    tied1 = random_weights("qwen3", 1, **TINY)
    expected = reference(models, "tied1")
    for tensors in (tied1, {**tied1, HEAD: tied1[EMBEDDING]}):
        with LLM(str(models / "tied0"), num_blocks=64) as llm:
            trainer = connect(llm, tensors)
            reply = trainer.send_weights()
            assert reply["updated"] == reply["of"] == len(tied1) and ask(llm) == expected
            trainer.source = DictSource({**tied1, HEAD: tied1[EMBEDDING] * 2})
            for manifest in (True, False):
                with pytest.raises(WeightUpdateError) as torn:
                    trainer.send_weights(manifest=manifest)
                assert HEAD in torn.value.tensors
            assert ask(llm) == expected
            trainer.shutdown()
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        connect(llm, {EMBEDDING: W1[EMBEDDING]}).send_weights(mode="partial")
        assert held(llm) == {**digests_of(W0), **digests_of({EMBEDDING: W1[EMBEDDING]})}


def test_case_002_pieces_of_a_fused_tensor_in_any_chunks_end_to_end(models: pathlib.Path) -> None:
    expected = reference(models, "w1")
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        for seed in range(5):
            names = list(W1)
            random.Random(seed).shuffle(names)
            trainer = connect(llm, {n: W1[n] for n in names}, packed_buffer_size_bytes=1)
            trainer.send_weights(manifest=seed % 2 == 0)
            assert ask(llm) == expected
            trainer.source = DictSource({n: t for n, t in W0.items() if n != K_PROJ})
            with pytest.raises(WeightUpdateError) as missing:
                trainer.send_weights(manifest=seed % 2 == 0)
            assert missing.value.tensors == [K_PROJ] and ask(llm) == expected
            trainer.source = DictSource(W0)
            trainer.send_weights()
            trainer.shutdown()


def test_case_012_masters_in_fp32_reach_a_bf16_engine_as_their_cast(models: pathlib.Path) -> None:
    masters = {n: t + 1e-4 for n, t in W1.items()}
    with LLM(str(models / "bf16"), num_blocks=64) as llm:
        trainer = connect(llm, masters, dtype=torch.bfloat16, packed_buffer_size_bytes=1 << 20)
        trainer.send_weights()
        assert held(llm) == digests_of({n: t.bfloat16() for n, t in masters.items()})
        trainer.source = DictSource(masters)
        for manifest in (True, False):
            with pytest.raises(WeightUpdateError, match="float32"):
                trainer.send_weights(manifest=manifest)
        trainer.shutdown()


def test_case_014_mixed_dtypes_in_one_buffer_end_to_end(models: pathlib.Path) -> None:
    """Odd sizes before wider types: with cast="allow" each tensor may come in a dtype of its own."""
    kinds = (torch.float16, torch.float32, torch.bfloat16, torch.float64)
    mixed = {n: t.to(kinds[i % 4]) for i, (n, t) in enumerate(W1.items())}
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        trainer = connect(llm, mixed, packed_buffer_size_bytes=1 << 17)
        for seed in range(5):
            names = list(mixed)
            random.Random(seed).shuffle(names)
            trainer.source = DictSource({n: mixed[n] for n in names})
            session = llm.start_weight_update(cast="allow")
            trainer.transfer(session["session_id"])
            reply = llm.finish_weight_update()
            assert reply["bytes"] == sum(t.nbytes for t in mixed.values())
            assert held(llm) == digests_of({n: t.float() for n, t in mixed.items()})
        trainer.shutdown()


def test_case_019_a_flipped_bit_in_the_shared_buffer_is_found(models: pathlib.Path) -> None:
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        before = ask(llm)
        trainer = connect(llm, W1, packed_buffer_size_bytes=1 << 20)
        real = llm.update_weights

        def flipped(request: dict[str, Any]) -> dict[str, Any]:
            info = request["update_info"]
            (slots,) = packing.plan(from_columns({k: info[k] for k in ("names", "dtype_names", "shapes")}), 1 << 20)
            (slot,) = [slot for slot in slots if slot.meta.name == K_PROJ]
            trainer._buffers[info["buffer"]].data[slot.offset + 5] ^= 1
            return real(request)

        llm.update_weights = flipped  # type: ignore[method-assign]
        with pytest.raises(WeightUpdateError, match="manifest") as wrong:
            trainer.send_weights("v1")
        assert wrong.value.tensors == [K_PROJ] and ask(llm) == before and llm.status()["version"] == "0"
        llm.update_weights = real  # type: ignore[method-assign]
        assert trainer.send_weights("v1")["version"] == "v1" and ask(llm) == reference(models, "w1")
        # what the trainer writes after the commit is nobody's business
        for buffer in trainer._buffers:
            buffer.data.fill_(255)
        assert ask(llm) == reference(models, "w1") and held(llm) == digests_of(W1)
        trainer.shutdown()


def test_a_chunk_that_fails_while_the_next_is_on_its_way_aborts_the_update(models: pathlib.Path) -> None:
    """The trainer's abort comes from one thread while its other one is inside update_weights."""
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        before = ask(llm)
        trainer = connect(llm, W1, packed_buffer_size_bytes=1)
        for round_ in range(20):
            names = list(W1)
            random.Random(round_).shuffle(names)
            bad = {("nobody" if i == round_ % 12 else n): W1[n] for i, n in enumerate(names)}
            trainer.source = DictSource(bad)
            with pytest.raises(WeightUpdateError, match="nobody is no tensor of this model"):
                trainer.send_weights(manifest=False)
            assert not llm.core.session.is_open and ask(llm) == before
        trainer.source = DictSource(W1)
        trainer.send_weights()
        assert ask(llm) == reference(models, "w1")
        trainer.shutdown()


def test_ipc_to_another_process_while_requests_run(models: pathlib.Path, background: Any) -> None:
    engine = background("w0", max_num_batched_tokens=64)
    trainer = connect(engine.client, W1)
    running = [engine.begin([5 + i, 6], LONG) for i in range(6)]
    for number in range(1, 7):
        trainer.source = DictSource((W1, W2, W0)[number % 3])
        reply = trainer.send_weights(f"v{number}", kv_policy="keep" if number % 2 else None)
        assert reply["number"] == number and reply["updated"] == 12 and reply["stall_ms"] < 1000
    outputs = [future.result(LIMIT_S).outputs[0] for future in running]
    for out in outputs:
        spans = out.weight_versions
        assert [s.start for s in spans] == [0, *(s.end for s in spans)][:-1] and spans[-1].end == 480
        assert [s.number for s in spans] == sorted({s.number for s in spans})
        assert all(s.version == ("0" if s.number == 0 else f"v{s.number}") for s in spans)
    trainer.source = DictSource(W1)
    trainer.send_weights("last")
    assert engine.ask() == reference(models, "w1")
    assert engine.client.weight_digests()["digests"] == digests_of(W1)
    trainer.shutdown()


def test_case_040_two_hundred_updates_leave_both_sides_flat(background: Any) -> None:
    engine = background("w0")
    trainer = connect(engine.client, W1, packed_buffer_size_bytes=1 << 15)
    sources = [DictSource(W1), DictSource(W2)]

    def rounds(count: int) -> list[tuple[int, int, int]]:
        for index in range(count):
            trainer.source = sources[index % 2]
            trainer.send_weights(manifest=False)
        gc.collect()
        found = []
        for pid in (os.getpid(), engine.llm._ranks[0].process.pid):
            rss = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            threads = len(os.listdir(f"/proc/{pid}/task"))
            found.append((len(os.listdir(f"/proc/{pid}/fd")), threads, rss))
        return found

    shm = set(os.listdir("/dev/shm"))
    looks = [rounds(40), rounds(100), rounds(100)]
    for (*before, rss), (*middle, rss_middle), (*after, rss_after) in zip(*looks, strict=True):
        assert before == middle == after
        # What leaks leaks in both halves; one step is another test's memory, which came back or went to this one.
        assert min(rss_middle - rss, rss_after - rss_middle) < 3 << 20
    assert set(os.listdir("/dev/shm")) == shm
    trainer.shutdown()


@pytest.fixture
def driver(models: pathlib.Path) -> Iterator[Driver]:
    made = Driver(models / "w0", update_lease_s=10.0)
    yield made
    made.close()


def test_a_whole_update_in_one_call_is_refused_while_another_s_is_open(driver: Driver, models: pathlib.Path) -> None:
    """Its label and policy would be lost. Without them it can not be told from a chunk, and is one."""
    request = {"weight_dir": str(models / "w1")}
    session = driver.now("start_weight_update")["session_id"]
    for options in ({"weight_version": "v7"}, {"kv_policy": "keep"}, {"weight_version": "v7", "kv_policy": "keep"}):
        error = driver.error(driver.call("update_weights", request={**request, **options}))
        assert isinstance(error, UpdateConflict) and error.details["session_id"] == session
        assert error.details["age_s"] >= 0 and all(name in str(error) for name in (*options, "abort_weight_update"))
    assert driver.core.status()["update"]["updated"] == 0
    assert driver.now("update_weights", request={**request, "weight_version": None})["received"] == len(W1)
    assert driver.now("finish_weight_update", weight_version="a")["version"] == "a"
    reply = driver.now("update_weights", request={**request, "weight_version": "v7", "kv_policy": "keep"})
    assert (reply["version"], reply["kv_policy"], reply["number"]) == ("v7", "keep", 2)


@pytest.mark.parametrize("clear_cache, wrong", [(False, "recompute"), (True, "keep")])
def test_a_one_call_update_whose_finish_fails_leaves_nothing(
    driver: Driver, models: pathlib.Path, clear_cache: bool, wrong: str
) -> None:
    request = {"weight_dir": str(models / "w1")}
    driver.pause("keep", clear_cache)
    for _ in range(2):
        with pytest.raises(Conflict, match="the pause demands .* and the finish named the other"):
            driver.now("update_weights", request={**request, "kv_policy": wrong})
        assert driver.core.status()["update"] is None and driver.digests() == digests_of(W0)
    assert driver.now("update_weights", request=request)["number"] == 1
    # one with a start stays prepared: its trainer finishes it again
    driver.now("start_weight_update")
    driver.now("update_weights", request=request)
    with pytest.raises(Conflict, match="named the other"):
        driver.now("finish_weight_update", kv_policy=wrong)
    assert driver.core.status()["update"]["state"] == "prepared"
    assert driver.now("finish_weight_update")["number"] == 2
    driver.resume()
    assert driver.now("update_weights", request={**request, "kv_policy": wrong})["kv_policy"] == wrong


def ends_by_abort(driver: Driver, skip: Callable[[float], None]) -> None:
    assert driver.now("abort_weight_update")["aborted"]


def ends_by_its_lease(driver: Driver, skip: Callable[[float], None]) -> None:
    skip(10.5)
    driver.step()


def ends_by_a_bad_chunk(driver: Driver, skip: Callable[[float], None]) -> None:
    with pytest.raises(WeightUpdateError):
        driver.wait(driver.send(("nobody", torch.zeros(1))))


def ends_by_a_finish_that_misses_tensors(driver: Driver, skip: Callable[[float], None]) -> None:
    with pytest.raises(WeightUpdateError, match="never received"):
        driver.now("finish_weight_update")


def ends_by_a_new_channel(driver: Driver, skip: Callable[[float], None]) -> None:
    driver.now("init_weight_transfer_engine", request={"init_info": {}})


def ends_by_its_lease_in_a_gap(driver: Driver, skip: Callable[[float], None]) -> None:
    """What looks at the clock first is a reset: an update of its own, that commits."""
    driver.pause("keep")
    skip(10.5)
    driver.now("weight_checker", action="reset")
    driver.resume()


@pytest.mark.parametrize(
    "end",
    [
        *(ends_by_abort, ends_by_its_lease, ends_by_a_bad_chunk, ends_by_a_finish_that_misses_tensors),
        *(ends_by_a_new_channel, ends_by_its_lease_in_a_gap),
    ],
)
def test_late_chunks_of_an_update_that_ended_are_refused_for_one_lease(
    driver: Driver, models: pathlib.Path, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:
    real, offset = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + offset[0])

    def skip(seconds: float) -> None:
        offset[0] += seconds

    late = {"weight_dir": str(models / "w1")}

    def broken_off() -> str:
        session = driver.now("start_weight_update")["session_id"]
        driver.wait(driver.send((K_PROJ, W1[K_PROJ])))
        end(driver, skip)
        return str(session)

    def refused(session: str) -> None:
        for request in (late, {**late, "weight_version": "v"}):
            error = driver.error(driver.call("update_weights", request=request))
            assert isinstance(error, UpdateConflict) and f"weight update {session} is aborted (" in str(error)
            assert re.search(r"for (9|10)\.\d s more", str(error)) and "start_weight_update" in str(error)

    session = broken_off()
    refused(session)
    assert isinstance(driver.error(driver.call("finish_weight_update")), UpdateConflict)
    driver.now("init_weight_transfer_engine", request={"init_info": {}})
    refused(session)  # neither is a word about that trainer
    skip(10.5)
    assert driver.now("update_weights", request=late)["updated"] == len(W1)
    refused(broken_off())
    assert driver.now("abort_weight_update")["aborted"] is None  # the operator's: there is no such trainer
    assert driver.now("update_weights", request=late)["updated"] == len(W1)
    refused(broken_off())
    assert driver.update(W0)["updated"] == len(W1)  # a start
    assert driver.now("update_weights", request=late)["updated"] == len(W1)


def test_a_one_call_update_that_failed_may_be_called_again(driver: Driver, models: pathlib.Path) -> None:
    for _ in range(2):
        with pytest.raises(WeightUpdateError, match="never received"):
            driver.wait(driver.send((K_PROJ, W1[K_PROJ])))
    gate = threading.Event()
    op = driver.send(("gate", gate), *W1.items())
    assert driver.now("abort_weight_update")["aborted"]
    assert isinstance(driver.error(op), UpdateConflict)
    gate.set()
    assert driver.now("update_weights", request={"weight_dir": str(models / "w1")})["updated"] == len(W1)


def test_weights_that_overflow_fail_requests_and_not_the_engine(models: pathlib.Path) -> None:
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        trainer = connect(llm, {name: torch.full_like(t, 3e38) if "norm" in name else t for name, t in W0.items()})
        trainer.send_weights("broken")
        with pytest.raises(MidstreamError, match="the step failed"):
            ask(llm)
        trainer.source = DictSource(W1)  # type: ignore[assignment]
        trainer.send_weights("mended")
        assert ask(llm) == reference(models, "w1")
        trainer.shutdown()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 1, 777, -1])
def test_one_element_that_is_no_number_refuses_the_update(models: pathlib.Path, value: float, at: int) -> None:
    """Committed, it would fail every request in flight."""
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        before = ask(llm)
        broken = {name: tensor.clone() for name, tensor in W1.items()}
        for name in (EMBEDDING, "model.norm.weight"):
            broken[name].view(-1)[at % broken[name].numel()] = value
        trainer = connect(llm, broken, packed_buffer_size_bytes=1 << 20)
        with pytest.raises(WeightUpdateError, match="NaN or infinity") as caught:
            trainer.send_weights("broken")
        assert caught.value.tensors == [EMBEDDING, "model.norm.weight"]
        assert ask(llm) == before and llm.status()["number"] == 0
        trainer.shutdown()


def test_a_cast_that_overflows_refuses_the_update(models: pathlib.Path) -> None:
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        wide = {name: tensor.double() for name, tensor in W1.items()}
        wide[EMBEDDING][3, 5] = 1e300
        trainer = connect(llm, wide)
        session = llm.start_weight_update(cast="allow")
        with pytest.raises(WeightUpdateError, match="infinity as float32"):
            trainer.transfer(session["session_id"])
        wide[EMBEDDING][3, 5] = 1.0
        trainer.transfer(llm.start_weight_update(cast="allow")["session_id"])
        assert llm.finish_weight_update()["number"] == 1
        trainer.shutdown()


@pytest.mark.parametrize("where", ["in process", "another process"])
def test_a_user_s_own_transfer_engine_end_to_end(
    models: pathlib.Path, background: Any, tmp_path: pathlib.Path, where: str
) -> None:
    backend: str | type = "my_transfer_engine:FileWeightTransferEngine"
    if where == "in process":
        backend = worker_engines.lookup("my_transfer_engine:FileWeightTransferEngine")  # a class serves as well
    half = trainer_engines.lookup("my_transfer_engine:FileTrainerWeightTransferEngine")
    engine = background("w0", weight_transfer_backend=backend) if where == "another process" else None
    llm = None if engine else LLM(str(models / "w0"), num_blocks=64, weight_transfer_backend=backend)
    client = engine.client if engine else llm
    ask_now = engine.ask if engine else lambda: ask(llm)  # type: ignore[arg-type]
    before = ask_now()
    with pytest.raises(MidstreamError):
        half.trainer_init({"directory": str(tmp_path / "nowhere")}, client=client, source=DictSource(W1))
    trainer = half.trainer_init({"directory": str(tmp_path)}, client=client, source=DictSource(W1))
    reply = trainer.send_weights("v1")
    assert reply["updated"] == 12 and ask_now() == reference(models, "w1")
    trainer.source = DictSource({n: W0[n] for n in list(W0)[:5]})  # type: ignore[assignment]
    with pytest.raises(WeightUpdateError, match="never received"):
        trainer.send_weights(manifest=False)
    assert ask_now() == reference(models, "w1")
    trainer.source = DictSource(W0)  # type: ignore[assignment]
    assert trainer.send_weights("v2")["version"] == "v2" and ask_now() == before
    client.start_weight_update()  # type: ignore[union-attr]
    with pytest.raises(MidstreamError, match="can not be read"):
        client.update_weights({"update_info": {"file": "gone.safetensors"}})  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == [] and ask_now() == before
    # a trainer of the built-in kind is told what it talks to
    with pytest.raises(MidstreamError):
        connect(client, W1)
    trainer.shutdown()
    if llm:
        llm.close()


def trainer_process(connection: Any, reached: Any, block_at: int) -> None:
    """A trainer that gets as far as tensor ``block_at`` and then never another one (-1: to the end)."""
    torch.set_num_threads(1)

    class Blocking(DictSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for index, pair in enumerate(super().__iter__()):
                if index == block_at:
                    reached.set()
                    threading.Event().wait()
                yield pair

    trainer = connect(PipeClient(connection), W1)
    trainer.source = Blocking(W1)
    trainer.send_weights("from-a-process", manifest=False)
    reached.set()


def forward(connection: Any, engine: Background) -> None:
    """The engine's end of a trainer process's pipe, until that process is gone."""
    while True:
        try:
            verb, args, kwargs = connection.recv()
            try:
                answer = ("ok", getattr(engine.client, verb)(*args, **kwargs))
            except MidstreamError as error:
                answer = ("error", to_wire(error))
            connection.send(answer)
        except (EOFError, OSError):
            return


def test_a_trainer_killed_in_the_middle_of_an_update_harms_nobody(models: pathlib.Path, background: Any) -> None:
    engine = background("w0", update_lease_s=0.5)
    straight = engine.begin([5, 6], LONG).result(LIMIT_S).outputs[0].token_ids
    before = engine.client.weight_digests()
    context = multiprocessing.get_context("spawn")

    def start(block_at: int) -> Any:
        ours, theirs = context.Pipe()
        reached = context.Event()
        process = context.Process(target=trainer_process, args=(theirs, reached, block_at), daemon=True)
        process.start()
        theirs.close()
        thread = threading.Thread(target=forward, args=(ours, engine), daemon=True)
        thread.start()
        assert reached.wait(LIMIT_S), "the trainer process did not get there"
        return process, thread

    running = [engine.begin([5, 6], LONG) for _ in range(3)]
    process, thread = start(7)
    running += [engine.begin([5, 6], LONG) for _ in range(3)]
    status = engine.client.status()
    session = status["update"]
    assert session is not None and session["state"] == "open"
    process.kill()
    process.join(LIMIT_S)
    thread.join(LIMIT_S)
    with pytest.raises(UpdateConflict) as taken:
        engine.client.start_weight_update()
    assert taken.value.details["session_id"] == session["session_id"]
    for future in running:
        assert future.result(LIMIT_S).outputs[0].token_ids == straight
    pause = threading.Event()
    for _ in range(500):
        if engine.client.status()["update"] is None:
            break
        pause.wait(0.01)
    else:
        raise AssertionError("the session was not dropped at its lease")
    assert engine.client.weight_digests() == before
    with pytest.raises(UpdateConflict, match="its lease of 0.5 s ended"):
        engine.client.finish_weight_update()
    process, thread = start(-1)
    process.join(LIMIT_S)
    thread.join(LIMIT_S)
    assert engine.client.status()["version"] == "from-a-process"
    assert engine.ask() == reference(models, "w1")


def test_the_core_killed_in_the_middle_of_an_update_is_told_to_the_trainer(background: Any) -> None:
    engine = background("w0")

    class Killer(DictSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for index, pair in enumerate(super().__iter__()):
                if index == 6:
                    os.kill(engine.llm._ranks[0].process.pid, 9)
                yield pair

    trainer = connect(engine.client, W1)
    trainer.source = Killer(W1)
    with pytest.raises(EngineDead):
        trainer.send_weights(manifest=False)
    trainer.shutdown()
