"""min-p, repetition penalty, kept ids and priorities: definitions, and the same through the engine."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import random
from typing import Any

import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import TINY, Driver, Teacher
from midstream.errors import InvalidInput
from midstream.models.packed import pack, sequence_logprobs
from midstream.models.weights import assemble
from midstream.ops.sampling import processed_logits, processed_logprobs, sample, token_logprobs
from midstream.serving.llm import LLM
from midstream.serving.varied import prompts_for, sample_varied
from midstream.types import RequestOutput, RequestStatus, SamplingParams, StructuredOutputs
from tests.fakes import FakeEngine, reference_tokens

torch.set_num_threads(1)
VOCAB = 40


def logits_of(seed: int, rows: int, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept(row: torch.Tensor) -> list[int]:
    return row.isfinite().nonzero().flatten().tolist()


def bits(ids: list[int], size: int = 8) -> bytes:
    return sum(1 << i for i in ids).to_bytes(size, "little")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_checkpoint(tmp_path_factory.mktemp("m") / "w0", "llama", 0, **TINY)


# -- definitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_has_that_share_of_the_best_ones_probability(temperature: float, min_p: float) -> None:
    for row in logits_of(1, 30):
        p = torch.softmax(row.double() / temperature, 0)
        wanted = [i for i in range(VOCAB) if float(p[i]) >= min_p * float(p.max()) * (1 - 1e-6)]
        found = processed_logits(row[None], [SamplingParams(temperature=temperature, min_p=min_p)])[0]
        assert kept(found) == wanted
        after = processed_logits(row[None], [SamplingParams(temperature=temperature, min_p=min_p, top_k=3)])[0]
        assert kept(after) == sorted(sorted(wanted, key=lambda i: -float(p[i]))[:3])


def test_min_p_comes_before_top_p() -> None:
    row = torch.log(torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]]))
    assert kept(processed_logits(row, [SamplingParams(top_p=0.75)])[0]) == [0, 1, 2]
    assert kept(processed_logits(row, [SamplingParams(top_p=0.75, min_p=0.5)])[0]) == [0, 1]
    assert kept(processed_logits(row, [SamplingParams(top_p=0.5, min_p=0.5)])[0]) == [0]  # 4/7 of what min-p left


def test_repetition_penalty_divides_what_is_above_zero_and_multiplies_what_is_below() -> None:
    row = torch.tensor([[2.0, -2.0, 0.0, 3.0, -1.0]])
    params = SamplingParams(repetition_penalty=2.0)
    assert processed_logits(row, [params], [[0, 1, 2, 0, 0]])[0].tolist() == [1.0, -4.0, 0.0, 3.0, -1.0]
    assert row.tolist() == [[2.0, -2.0, 0.0, 3.0, -1.0]], "the raw logits are untouched"
    greedy = SamplingParams(repetition_penalty=2.0, temperature=0, logprobs=0)
    (token,) = sample(row, [greedy], [1], [1], [[3]])
    assert (token.token_id, token.processed_logprob) == (0, 0.0)
    assert token.raw_logprob == float(token_logprobs(row, torch.tensor([0]))) and token.rank == 2


def test_a_grammar_masks_first_and_the_processed_logprob_is_of_what_is_left() -> None:
    row = logits_of(2, 1)
    allowed = [3, 5, 8, 39]
    for options in ({}, {"temperature": 0.7}, {"top_k": 2}, {"min_p": 0.2}, {"repetition_penalty": 1.5}):
        params = SamplingParams(logprobs=5, logprobs_mode="processed_logprobs", **options)
        for seed in range(20):
            (token,) = sample(row, [params], [seed], [9], [[3, 8]], [bits(allowed)])
            assert token.token_id in allowed
            shown = [v for _, v in token.top if v > -math.inf]
            assert sum(map(math.exp, shown)) == pytest.approx(1, abs=1e-5)
    (token,) = sample(row, [SamplingParams(temperature=0)], [1], [1], None, [bits(allowed)])
    assert token.token_id == max(allowed, key=lambda i: float(row[0, i]))


def test_rows_are_stable_whatever_their_neighbours_ask_for() -> None:
    logits = logits_of(3, 42)
    kinds = [
        SamplingParams(),
        SamplingParams(min_p=0.1, temperature=0.8),
        SamplingParams(repetition_penalty=1.3, temperature=0.8),
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(top_p=0.9, min_p=0.05, repetition_penalty=0.8, return_sampling_mask=True),
        SamplingParams(top_k=4, return_sampling_mask=True),
        SamplingParams(temperature=1.4, logprobs=3, logprobs_mode="processed_logprobs"),
    ]
    params = [kinds[i % 7] for i in range(42)]
    history = [[(i * j) % VOCAB for j in range(1, 9)] if p.repetition_penalty != 1 else None
               for i, p in enumerate(params)]  # fmt: skip
    allowed = [bits([1, 2, 30 + i % 9]) if i % 5 == 0 else None for i in range(42)]
    seeds, positions = list(range(42)), [3 * i for i in range(42)]
    together = sample(logits, params, seeds, positions, history, allowed)
    for at, rows in [(i, 1) for i in range(42)] + [(3, 17), (20, 22)]:
        s = slice(at, at + rows)
        alone = sample(logits[s].clone(), params[s], seeds[s], positions[s], history[s], allowed[s])
        assert alone == together[s]


def test_kept_ids_are_the_support() -> None:
    logits = logits_of(4, 60)
    for options in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0}):
        params = SamplingParams(return_sampling_mask=True, **options)
        for row, token in zip(logits, sample(logits, [params] * 60, range(60), range(60)), strict=True):
            wanted = kept(processed_logits(row[None], [params])[0]) if params.temperature else [int(row.argmax())]
            assert token.kept == wanted and token.token_id in wanted
    assert sample(logits, [SamplingParams(top_k=5)] * 60, range(60), range(60))[0].kept is None


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": -0.1}, {"min_p": 1.5}, {"min_p": math.nan}, {"min_p": "x"},
        {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": math.inf},
        {"stop": ("",)}, {"stop": (1,)}, {"stop": 5}, {"stop": ("a",), "detokenize": False},
        {"return_sampling_mask": True},
    ],
)  # fmt: skip
def test_values_that_can_not_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        SamplingParams(**options)


def test_stop_takes_one_text_or_several() -> None:
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"json": "{}", "regex": "a"}, {"choice": ()}, {"choice": ("",)}, {"regex": ""}, {"json": 5}]
)
def test_structured_outputs_take_exactly_one(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        StructuredOutputs(**options)


# -- through the engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"min_p": 0.05}, {"repetition_penalty": 1.3}, {"min_p": 0.02, "repetition_penalty": 1.2, "top_p": 0.9}]
)
def test_neither_batch_nor_chunk_preemption_nor_pause_changes_a_bit(model: pathlib.Path, options: dict) -> None:
    params = SamplingParams(max_tokens=12, seed=3, temperature=0.9, n=2, ignore_eos=True, **options)
    seen: dict[str, Any] = {}
    for name, outputs, _ in sample_varied(str(model), prompts_for(160, 4, 20, 1), params, {}):
        seen[name] = [(c.token_ids, c.token_logprobs, c.processed_logprobs) for o in outputs for c in o.outputs]
        if name == "forced preemption":
            assert sum(c.num_preemptions for o in outputs for c in o.outputs) > 0
    first = seen.popitem()[1]
    assert len(seen) > 3 and all(value == first for value in seen.values())


def test_the_penalty_sees_prompt_and_output(model: pathlib.Path) -> None:
    with LLM(str(model)) as llm:
        plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        prompt = [7, 8, 9, 10]
        loops = llm.generate(prompt, plain)[0].outputs[0].token_ids
        assert len(set(loops)) < 40
        made = llm.generate(prompt, dataclasses.replace(plain, repetition_penalty=100.0))[0].outputs[0].token_ids
        assert len(set(prompt + made)) == 44, "while there is another, nothing comes twice"


def masked_logprobs(llm: LLM, weights: Any, output: RequestOutput, params: SamplingParams) -> list[list[float]]:
    """Per token: from the trainer's forward and the kept ids alone, the logprob of each kept id; the sampled one's
    is first. Each kept id is put in the sampled one's place, so this shares nothing with the sampler's truncation."""
    worker = llm.core.worker
    plain = SamplingParams(temperature=params.temperature)
    found = []
    for completion in output.outputs:
        assert completion.sampling_mask is not None and len(completion.sampling_mask) == len(completion.token_ids)
        for i, ids in enumerate(completion.sampling_mask):
            chosen = completion.token_ids[i]
            assert chosen in ids and ids == sorted(set(ids))
            variants = [chosen, *(k for k in ids if k != chosen)]
            sequences = [(output.prompt_token_ids + completion.token_ids[:i], [[k]]) for k in variants]
            with torch.inference_mode():
                rows = sequence_logprobs(worker.runner.model, weights, pack(sequences, 16), plain)
            found.append(torch.log_softmax(rows.double(), 0).tolist())
    return found


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.2}])
def test_case_099_kept_ids_make_the_trainers_distribution_the_samplers(model: pathlib.Path, options: dict) -> None:
    params = SamplingParams(
        n=4, max_tokens=6, seed=11, temperature=0.8, ignore_eos=True, return_sampling_mask=True, logprobs=20,
        logprobs_mode="processed_logprobs", **options,
    )  # fmt: skip
    prompts = [[5, 6, 7] * 4, [9] * 14, [4, 90, 33, 2] * 3]
    with LLM(str(model), num_blocks=9, max_num_seqs=8, enable_prefix_caching=False) as tight, LLM(str(model)) as llm:
        weights = assemble(llm.core.worker.model_config, random_weights("llama", 0, **TINY))
        outputs, again = llm.generate(prompts, params), tight.generate(prompts, params)
        assert sum(c.num_preemptions for o in again for c in o.outputs) > 0
        for one, other in zip(outputs, again, strict=True):
            for a, b in zip(one.outputs, other.outputs, strict=True):
                assert (a.token_ids, a.sampling_mask, a.processed_logprobs) == (
                    b.token_ids, b.sampling_mask, b.processed_logprobs
                )  # fmt: skip
        for output in outputs:
            values = [v for c in output.outputs for v in c.processed_logprobs]
            recomputed = masked_logprobs(llm, weights, output, params)
            for value, row in zip(values, recomputed, strict=True):
                assert value == pytest.approx(row[0], abs=2e-5)
            for c in output.outputs:
                assert c.logprobs is not None and c.sampling_mask is not None
                for shown, ids in zip(c.logprobs, c.sampling_mask, strict=True):
                    live = {i: entry.logprob for i, entry in shown.items() if entry.logprob > -math.inf}
                    if len(ids) <= 20:
                        assert sorted(live) == ids
                        assert sum(map(math.exp, live.values())) == pytest.approx(1, abs=1e-5)


def test_case_099_an_aborted_request_returns_the_kept_ids_of_its_partial_tokens(model: pathlib.Path) -> None:
    driver = Driver(model)
    options = {"top_k": 5, "n": 4, "return_sampling_mask": True, "max_tokens": 30}
    whole = driver.add([5, 6, 7], **options)
    driver.run()
    part = driver.add([5, 6, 7], **options)
    driver.steps(9)
    driver.core.abort([part])
    driver.take()
    for a, b in zip(driver.output(part).outputs, driver.output(whole).outputs, strict=True):
        assert a.finish_reason == "abort" and 0 < len(a.token_ids) < 30
        assert a.sampling_mask == b.sampling_mask[: len(a.token_ids)]  # type: ignore[index]
    driver.run()
    driver.close()


def test_the_trainer_computes_min_p_bit_for_bit_and_refuses_what_it_can_not_know(model: pathlib.Path) -> None:
    driver = Driver(model)
    teacher = Teacher(driver, {0: random_weights("llama", 0, **TINY)})
    params = SamplingParams(temperature=0.9, min_p=0.1, max_tokens=12, seed=5, ignore_eos=True)
    names = [driver.add([5, 6, k], temperature=0.9, min_p=0.1) for k in range(4)]
    driver.run()
    outputs = [driver.output(name) for name in names]
    assert teacher.check(outputs, params) == 48
    for wrong in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(structured_outputs=StructuredOutputs(regex="a")),
    ):
        with pytest.raises(InvalidInput, match="repetition_penalty"):
            teacher.check(outputs, wrong)
    driver.close()


def test_min_p_has_a_gradient_over_what_is_kept_only() -> None:
    row = logits_of(6, 1, scale=1.0).requires_grad_()
    params = SamplingParams(min_p=0.3, temperature=0.7)
    keep = kept(processed_logits(row.detach(), [params])[0])
    processed_logprobs(row, torch.tensor([keep[0]]), [params]).sum().backward()
    assert row.grad is not None and bool(row.grad.isfinite().all())
    assert row.grad[0].nonzero().flatten().tolist() == keep


# -- priorities --------------------------------------------------------------------------------------------------------


def test_the_more_urgent_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    engine = FakeEngine(max_num_seqs=1)
    names = {}
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0), ("f", -1)):
        names[name] = engine.add([1, 2, 3], max_tokens=2, parent_id=name, priority=priority)
        if name == "a":
            engine.step()  # it runs, and nobody takes its place
    engine.run()
    assert [r.request_id for r in engine.ended] == ["a", "c", "f", "e", "b", "d"]


def test_the_less_urgent_gives_way_when_blocks_run_out() -> None:
    engine = FakeEngine(num_blocks=8, block_size=4)
    (late,) = engine.add([1] * 8, max_tokens=20, priority=3)
    engine.step()
    (urgent,) = engine.add([2] * 8, max_tokens=20, priority=-3)
    engine.run()
    assert late.num_preemptions > 0 and urgent.num_preemptions == 0
    assert engine.ended == [urgent, late]
    assert late.output_token_ids == reference_tokens([1] * 8, 7, 20)


def test_a_commit_waits_for_the_first_that_runs_not_for_one_that_starves() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add([1, 2], max_tokens=50, priority=0)
    engine.step()
    engine.add([3], max_tokens=2, priority=9)
    engine.commit("recompute")
    assert not engine.scheduler.oldest_has_progressed()
    engine.step()
    assert engine.scheduler.oldest_has_progressed()
    engine.run()


@pytest.mark.parametrize("seed", range(6))
def test_random_priorities_commits_and_preemptions_change_no_token(seed: int) -> None:
    """check_record compares every token with the model's; here also: the queues stay in order, all come to an end."""
    rng = random.Random(seed)
    engine = FakeEngine(num_blocks=12, max_num_seqs=5, max_num_batched_tokens=9)
    requests = []
    for turn in range(400):
        if rng.random() < 0.15:
            prompt = [rng.randrange(97) for _ in range(rng.randint(1, 14))]
            n = rng.choice((1, 1, 2, 4))
            requests += engine.add(prompt, n, max_tokens=rng.randint(1, 16), seed=turn, priority=rng.randint(-2, 2))
        if rng.random() < 0.05 and engine.scheduler.oldest_has_progressed():
            engine.commit(rng.choice(("recompute", "keep")))  # type: ignore[arg-type]
        if rng.random() < 0.02 and engine.scheduler.live:
            engine.abort([rng.choice(list(engine.scheduler.live))])
        if engine.scheduler.has_unfinished:
            first = min(engine.scheduler.running, key=lambda r: r.place, default=None)
            before = first.num_preemptions if first else 0
            engine.step()
            assert first is None or first.num_preemptions == before, "the first of those that run gives way to nobody"
        engine.scheduler.check_integrity()
    engine.run()
    assert all(r.status.is_finished for r in requests) and len(engine.ended) == len(requests)
    assert sum(r.num_preemptions for r in requests) > 5
    assert {r.status for r in requests} >= {RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_ABORTED}


def test_priorities_through_the_engine_change_the_order_and_no_bit(model: pathlib.Path) -> None:
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    prompts: list[Any] = [[5], [6, 7], [8], [9]]
    with LLM(str(model), max_num_seqs=1) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        order: list[str] = []

        def watch(_: int) -> None:
            running = [r.request_id for r in llm.core.scheduler.running]
            order.extend(name for name in running if name not in order)

        found = llm.generate(prompts, params, watch, priority=[3, 2, 1, 0])
        assert [o.outputs[0].token_ids for o in found] == plain
        assert order == sorted(order, reverse=True)
        with pytest.raises(InvalidInput, match="priorities"):
            llm.generate(prompts, params, priority=[1])
        with pytest.raises(InvalidInput, match="priority"):
            llm.generate(prompts, params, priority=[1, 2, 3, "x"])  # type: ignore[list-item]
