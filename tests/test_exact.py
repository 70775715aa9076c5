"""Exact: a request has the same tokens and the same bits of every logprob whatever happens around it.

Alone, in a batch, chunked, after a prefix hit, preempted, paused at any step, as one of n, aborted and sent again; and
the trainer's forward gives those bits too. For every architecture, both dtypes, and every twin of the operations.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from checkpoints import VARIANTS, write_checkpoint
from midstream.config import EngineConfig
from midstream.engine.core import EngineCore
from midstream.engine.protocol import Reply
from midstream.errors import InvalidInput
from midstream.ops import cpu
from midstream.rl.policy import Policy
from midstream.types import RequestIncrement, SamplingParams, child_seed

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(7 * i * i + 3 * i) % 158 + 2 for i in range(37)]
LENGTH = 24
BASE = SamplingParams(max_tokens=LENGTH, seed=11, ignore_eos=True, logprobs=3, detokenize=False)
KINDS = [
    BASE,
    replace(BASE, temperature=0.0),
    replace(BASE, temperature=0.7, top_k=20, seed=12),
    replace(BASE, temperature=1.4, top_p=0.9, seed=13),
    replace(BASE, temperature=0.8, top_k=40, top_p=0.8, seed=14, logprobs_mode="processed_logprobs"),
]


@dataclass(frozen=True)
class Model:
    variant: str
    dtype: str
    twins: str = "fast"

    def __str__(self) -> str:
        return f"{self.variant}-{self.dtype}-{self.twins}"


MODELS = [Model(v, d) for v in VARIANTS for d in ("float32", "bfloat16")]
MODELS += [
    Model("qwen3-moe", "bfloat16", "reference"),
    Model("qwen3", "bfloat16", "reference"),
    Model("llama-bias", "float32", "reference"),
]
MODELS += [Model("qwen3", "float32", "reference"), Model("llama", "bfloat16", "reference")]


CORE = [Model("llama", "float32"), Model("qwen3", "bfloat16"), Model("qwen2", "bfloat16"), *MODELS[-5:]]
CORE += [Model("qwen3-moe", "float32")]
"""What `make test` runs through everything; the others take part in three tests, and in all when slow ones run."""
EVERY = pytest.mark.parametrize("model", MODELS, indirect=True, ids=str)


@pytest.fixture(params=[pytest.param(m, marks=() if m in CORE else pytest.mark.slow) for m in MODELS], ids=str)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    if request.param.twins == "reference":
        monkeypatch.setattr(cpu, "library", lambda: None)
    return request.param


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model], pathlib.Path]:
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda m: write_checkpoint(root / str(m), m.variant, dtype=getattr(torch, m.dtype)))


@dataclass
class Result:
    """What a client has of one sample: ids, (raw, processed) logprobs, ranks, top entries; and the last increment."""

    token_ids: list[int]
    logprobs: list[tuple[float, float]]
    ranks: list[int]
    top: list[list[tuple[int, float]]]
    last: RequestIncrement | None = None

    @property
    def bits(self) -> tuple:
        return (self.token_ids, self.logprobs, self.ranks, self.top)

    def after(self, k: int) -> tuple:
        return tuple(part[k:] for part in self.bits)


Asked = tuple[str, Sequence[int], SamplingParams]


class Engine:
    """A core driven step by step."""

    def __init__(self, directory: pathlib.Path, **options) -> None:
        options = {"num_blocks": 400, "max_num_seqs": 32, **options}
        self.core = EngineCore(EngineConfig.from_options({"model": str(directory), **options}))
        self.core.worker.runner.key_cache.fill_(torch.nan)  # case 72: whatever memory holds at first
        self.core.worker.runner.value_cache.fill_(torch.nan)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.close()

    def call(self, verb: str, **arguments) -> None:
        """A verb that is answered by the next boundary, with no step in between."""
        self.core.call(1, verb, arguments)
        for _ in range(2):
            replies = [r for r in self.core.outputs.replies if r.op == 1]
            if replies:
                assert isinstance(replies[0], Reply)
                self.core.outputs.replies.clear()
                return
            assert not self.core.step(), "a step ran while a pause was due"
        raise AssertionError(f"{verb} was not answered")

    def run(
        self, asked: Sequence[Asked], before_step: Callable[[int], None] = lambda _: None
    ) -> dict[tuple[str, int], Result]:
        results = {(name, k): Result([], [], [], []) for name, _, params in asked for k in range(params.n)}
        for name, prompt, params in asked:
            self.core.add(name, prompt, params)
        for k in range(2000):
            before_step(k)
            self.core.step()
            for i in self.core.take_outputs().increments:
                r = results[i.parent_id, i.index]
                r.token_ids += i.token_ids
                r.logprobs += [(token.raw_logprob, token.processed_logprob) for token in i.tokens]
                r.ranks += [token.rank for token in i.tokens]
                r.top += [token.top for token in i.tokens]
                r.last = i
            if not self.core.scheduler.has_unfinished:
                self.core.step()  # idle: checks its own integrity
                return results
        raise AssertionError("requests did not end")

    def one(self, params: SamplingParams, prompt: Sequence[int] = PROMPT, **kwargs) -> Result:
        return self.run([("r", prompt, params)], **kwargs)["r", 0]


@pytest.fixture(scope="module")
def _known() -> dict[Model, list[Result]]:
    return {}


@pytest.fixture
def path(model: Model, directory) -> pathlib.Path:
    return directory(model)


@pytest.fixture
def alone(model: Model, path: pathlib.Path, _known) -> list[Result]:
    """Every kind of request, alone in an engine without a prefix cache."""
    if model not in _known:
        with Engine(path, enable_prefix_caching=False) as engine:
            _known[model] = [engine.one(params) for params in KINDS]
        for result in _known[model]:
            assert len(result.token_ids) == len(result.logprobs) == len(result.ranks) == len(result.top) == LENGTH
            assert torch.tensor(result.logprobs).isfinite().all()  # case 72
    return _known[model]


def neighbours(count: int) -> list[Asked]:
    out: list[Asked] = []
    for i in range(count):
        prompt = PROMPT[i % 7 : 8 + 2 * i] + [2 + i]
        out.append((f"other{i}", prompt, replace(KINDS[i % 5], seed=100 + i, max_tokens=5 + 3 * i)))
    return out


def asked_all() -> list[Asked]:
    return [(f"k{i}", PROMPT, params) for i, params in enumerate(KINDS)]


def check_all(results: dict[tuple[str, int], Result], alone: list[Result]) -> None:
    for i, wanted in enumerate(alone):
        assert results[f"k{i}", 0].bits == wanted.bits


@EVERY
@pytest.mark.parametrize("budget", [8, 1024])
def test_case_104_in_a_batch_of_16_and_chunked(path, alone, budget: int) -> None:
    others = neighbours(11)
    with Engine(path, max_num_batched_tokens=budget, enable_prefix_caching=False) as engine:
        check_all(engine.run([*others[:6], *asked_all(), *others[6:]]), alone)


def test_case_104_chunked_prefill_alone(path, alone) -> None:
    with Engine(path, max_num_batched_tokens=8, enable_prefix_caching=False) as engine:
        for params, wanted in zip(KINDS, alone, strict=True):
            assert engine.one(params).bits == wanted.bits


def test_case_104_prefix_hit(path, alone) -> None:
    with Engine(path) as engine:
        engine.one(BASE, PROMPT[:20])
        for i, (params, wanted) in enumerate(zip(KINDS, alone, strict=True)):
            found = engine.one(params)
            assert found.bits == wanted.bits
            assert found.last.num_cached_tokens == (16 if i == 0 else 32)
        again = engine.one(replace(KINDS[0], max_tokens=4), PROMPT + alone[0].token_ids[:20])  # hits generated blocks
        assert again.last.num_cached_tokens == 48
        assert again.bits == tuple(part[20:24] for part in alone[0].bits)


@EVERY
def test_case_106_and_108_forced_preemption(path, alone) -> None:
    num_preemptions = 0
    for budget, caching in ((8, False), (1024, False), (1024, True)):
        with Engine(path, num_blocks=7, max_num_batched_tokens=budget, enable_prefix_caching=caching) as engine:
            results = engine.run([*asked_all(), *neighbours(3)])  # three blocks to begin with, four at the end
            num_preemptions += sum(r.last.num_preemptions for r in results.values())
            assert all(len(results[f"k{i}", 0].logprobs) == LENGTH for i in range(5))
            check_all(results, alone)
    assert num_preemptions >= 3


@pytest.mark.parametrize("clear_cache", [True, False])
def test_case_108_a_keep_pause_before_every_step(path, alone, clear_cache: bool) -> None:
    with Engine(path, max_num_batched_tokens=64) as engine:

        def pause(_: int) -> None:
            engine.call("pause_generation", mode="keep", clear_cache=clear_cache)
            assert not engine.core.step()
            engine.call("resume_generation")

        check_all(engine.run(asked_all(), before_step=pause), alone)


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("model", CORE[:2], indirect=True, ids=str)
def test_case_108_a_keep_pause_at_each_step_k(path, alone, clear_cache: bool) -> None:
    with Engine(path, max_num_batched_tokens=16) as engine:
        for at in range(LENGTH + 4):

            def pause(k: int, at: int = at) -> None:
                if k == at:
                    engine.call("pause_generation", mode="keep", clear_cache=clear_cache)
                    engine.call("resume_generation")

            results = engine.run([asked_all()[2], asked_all()[0]], before_step=pause)
            assert results["k2", 0].bits == alone[2].bits and results["k0", 0].bits == alone[0].bits
            engine.call("reset_prefix_cache")


def test_case_108_each_of_n_is_the_request_with_the_childs_seed(path, alone) -> None:
    with Engine(path, max_num_batched_tokens=40) as forked, Engine(path, enable_prefix_caching=False) as single:
        for params, wanted in list(zip(KINDS, alone, strict=True))[:3]:
            results = forked.run([("r", PROMPT, replace(params, n=8)), *neighbours(3)])
            assert results["r", 0].bits == wanted.bits
            seeds = [child_seed(params.seed, k) for k in range(8)]
            apart = single.run([(str(k), PROMPT, replace(params, seed=seed)) for k, seed in enumerate(seeds)])
            for k, seed in enumerate(seeds):
                assert results["r", k].last.seed == seed
                assert results["r", k].bits == apart[str(k), 0].bits
            if params.temperature:
                assert len({tuple(results["r", k].token_ids) for k in range(8)}) > 4


def test_case_059_and_108_abort_and_resubmission(path, alone) -> None:
    with Engine(path) as engine:
        for params, wanted in zip(KINDS, alone, strict=True):
            for at in (1, 7, LENGTH - 1):
                engine.core.add("first", PROMPT, params)
                while len(engine.core.scheduler.live["first"].token_ids) < len(PROMPT) + at:
                    engine.core.step()
                engine.core.abort(["first"])
                made = engine.core.take_outputs().increments
                assert made[-1].finish_reason == "abort"
                ids = [t for i in made for t in i.token_ids]
                assert ids == wanted.token_ids[:at]
                rest = engine.one(replace(params, max_tokens=LENGTH - at), PROMPT + ids)
                assert rest.bits == wanted.after(at)
                assert rest.last.finish_reason == "length"


def test_case_106_prompt_logprobs_are_the_same_and_survive_preemption(path, alone) -> None:
    params = [replace(p, prompt_logprobs=2) for p in KINDS]
    with Engine(path) as engine:
        first = engine.one(params[0])
        wanted = first.last.prompt_logprobs
        assert first.bits == alone[0].bits and len(wanted) == len(PROMPT) - 1
        longer = engine.one(replace(params[0], max_tokens=1), PROMPT + alone[0].token_ids)
        assert longer.last.prompt_logprobs[: len(wanted)] == wanted
        scored = [entry[0] for entry in longer.last.prompt_logprobs[len(wanted) :]]
        assert scored == [raw for raw, _ in alone[0].logprobs]  # the teacher-forced score of each output token
    with Engine(path, num_blocks=7, max_num_batched_tokens=8) as engine:
        results = engine.run([(f"k{i}", PROMPT, p) for i, p in enumerate(params)])
        check_all(results, alone)
        assert sum(r.last.num_preemptions for r in results.values()) >= 1
        assert all(r.last.prompt_logprobs == wanted for r in results.values())


@EVERY
def test_case_104_the_trainers_forward_gives_the_engines_bits(path, alone) -> None:
    policy = Policy(path)
    groups = [PROMPT, PROMPT[:1], PROMPT[:16], PROMPT[3:36], PROMPT[5:20]]
    with Engine(path, max_num_batched_tokens=48) as engine:
        for params in KINDS:
            asked = [(str(i), p, replace(params, n=3, max_tokens=[24, 19, 14, 9, 1][i])) for i, p in enumerate(groups)]
            results = engine.run(asked)
            sequences = [(p, [results[name, k].token_ids for k in range(3)]) for name, p, _ in asked]
            served = torch.tensor([v for name, _, _ in asked for k in range(3) for _, v in results[name, k].logprobs])
            with torch.no_grad():
                assert torch.equal(policy.logprobs(sequences, params), served)
            trained = policy.logprobs(sequences, params)
            assert trained.requires_grad
            assert torch.equal(trained.detach(), served)
            raw = torch.tensor([v for name, _, _ in asked for k in range(3) for v, _ in results[name, k].logprobs])
            assert torch.equal(policy.logprobs(sequences, BASE).detach(), raw)
            one = policy.logprobs([(groups[1], [results["1", 2].token_ids])], params).detach()
            assert one.tolist() == [v for _, v in results["1", 2].logprobs]  # alone in the trainer's batch


def test_an_empty_completion_takes_no_place_among_the_logprobs(tmp_path: pathlib.Path) -> None:
    policy = Policy(write_checkpoint(tmp_path / "m", "llama"))
    wanted = policy.logprobs([(PROMPT, [[8, 9]]), ([5, 6], [[4, 3]])], BASE)
    assert torch.equal(policy.logprobs([(PROMPT, [[], [8, 9]]), ([5, 6], [[4, 3], []])], BASE), wanted)


@pytest.mark.parametrize(
    ("sequences", "says"),
    [
        ([], "each needs a prompt"),
        ([([], [[1]])], "each needs a prompt"),
        ([(PROMPT, [[]]), ([1], [])], "at least one completion token"),
        ([(PROMPT, [[3, 160]])], r"token ids \[160\] are not in \[0, 160\)"),
        ([([-1], [[3, 4]])], r"token ids \[-1\] are not in \[0, 160\)"),
        ([(PROMPT, [[3, 1.5]])], "must be int, got float"),
        ([(["a"], [[3]])], "must be int, got str"),
        ([(PROMPT, [[3] * 1000])], "1037 tokens; the model has"),
    ],
    ids=range(8),
)
def test_sequences_that_the_model_cannot_compute_are_refused(tmp_path, sequences, says: str) -> None:
    policy = Policy(write_checkpoint(tmp_path / "m", "llama"))
    with pytest.raises(InvalidInput, match=says):
        policy.logprobs(sequences, BASE)


def test_tokens_on_kept_kv_are_told_apart_by_the_context_they_saw() -> None:
    from midstream.rl.exact import is_checkable
    from test_rl_types import rollout

    one = replace(rollout(), prompt_token_ids=[1] * 100, kv_versions=[(0, 0, 96), (1, 96, 103)])
    assert not any(is_checkable(one, i, 1) for i in range(3))  # the prompt's KV is of another version
    one = replace(rollout(), prompt_token_ids=[1] * 10, kv_versions=[(0, 0, 11), (1, 11, 12)])
    assert [is_checkable(one, i, n) for i, n in ((0, 0), (1, 0), (2, 1))] == [True, True, False]
    assert is_checkable(rollout(), 0, 4)
