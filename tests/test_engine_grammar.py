"""Structured output: the grammar's state goes with the tokens, through pauses, preemption and n samples."""

from __future__ import annotations

import asyncio
import json
import math
import pathlib
import queue
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from checkpoints import write_text_checkpoint
from cores import TINY, Driver
from midstream.engine.grammar import Grammar, GrammarCompiler
from midstream.errors import InvalidInput
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.llm import LLM
from midstream.serving.text import Text
from midstream.types import SamplingParams, StructuredOutputs

torch.set_num_threads(1)

EOS = 1
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green"]},
            "size": {"type": "integer", "minimum": 10, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        },
        "required": ["colour", "size", "tags"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
JSON = StructuredOutputs(json=SCHEMA)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 80, "ignore_eos": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("m") / "w0", **TINY)


@pytest.fixture(scope="module")
def text(model: pathlib.Path) -> Text:
    return Text(model)


@pytest.fixture
def compiler(text: Text) -> GrammarCompiler:
    made = GrammarCompiler(261, [EOS])
    made.load_tokenizer(text.to_json())
    return made


def allowed(grammar: Grammar) -> set[int]:
    return {i for i in range(8 * len(grammar.allowed)) if grammar.allowed[i // 8] >> (i % 8) & 1}


def check_json(ids: list[int], text: Text) -> None:
    assert ids[-1] == EOS
    value = json.loads(text.decode(ids))
    assert set(value) == {"colour", "size", "tags"} and value["colour"] in ("red", "green")
    assert 10 <= value["size"] <= 99 and [type(t) for t in value["tags"]] == [bool, bool]


# -- the grammar alone -------------------------------------------------------------------------------------------------


def test_what_is_allowed_is_what_may_come_next(compiler: GrammarCompiler, text: Text) -> None:
    a, b, ab, x = (text.encode(piece)[0] for piece in ("a", "b", "ab", "x"))
    grammar = compiler.compile(StructuredOutputs(regex="a|abx"))
    assert allowed(grammar) == {a, ab}
    other = grammar.copy()  # goes its own way
    assert grammar.advance(a) and allowed(grammar) == {b, EOS} and not grammar.is_over
    assert other.advance(ab) and allowed(other) == {x}
    assert other.advance(x) and allowed(other) == {EOS} and not other.is_over
    assert other.copy().advance(EOS) and not other.copy().advance(x)
    assert other.advance(EOS) and other.is_over
    assert grammar.advance(EOS) and grammar.is_over


@pytest.mark.parametrize("choice", [("yes", "no"), ('say "x"\n', "\\d/é"), ("😀 a", "b|c", "start: x")])
def test_a_choice_is_taken_by_the_letter(compiler: GrammarCompiler, text: Text, choice: tuple[str, ...]) -> None:
    for wanted in choice:
        grammar = compiler.compile(StructuredOutputs(choice=choice))
        for token in text.encode(wanted):
            assert token in allowed(grammar) and grammar.advance(token)
        assert allowed(grammar) == {EOS}


def test_a_token_that_does_not_fit_is_an_error_that_stays(compiler: GrammarCompiler, text: Text) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="ab"))
    assert not grammar.advance(text.encode("x")[0])
    assert "does" in grammar.error and "\n" not in grammar.error and not grammar.advance(text.encode("a")[0])


@pytest.mark.parametrize(
    "wanted",
    [{"regex": "a("}, {"json": "{"}, {"json": "[1]"}, {"json": '{"type": "colour"}'}, {"json": "[" * 5000}],
)
def test_what_does_not_compile_is_refused(compiler: GrammarCompiler, wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="structured_outputs"):
        compiler.compile(StructuredOutputs(**wanted))


def test_without_tokenizer_or_end_token_it_is_refused(text: Text) -> None:
    with pytest.raises(InvalidInput, match="tokenizer"):
        GrammarCompiler(261, [EOS]).require_tokenizer()
    with pytest.raises(InvalidInput, match="eos_token_id"):
        GrammarCompiler(261, []).load_tokenizer(text.to_json())
    for strange in ("", "{", "[]", "{}"):
        with pytest.raises(InvalidInput, match="tokenizer"):
            GrammarCompiler(261, [EOS]).load_tokenizer(strange)


def test_the_shipped_tiny_models_tokenizer_is_understood() -> None:
    import midstream.rl

    directory = pathlib.Path(midstream.rl.__file__).parent / "models" / "reverse"
    with LLM(str(directory)) as llm:
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="(ab|xy){3}"), max_tokens=20, seed=1)
        out = llm.generate("abc", params)[0].outputs[0]
        assert re.fullmatch("(ab|xy){3}", out.text) and out.finish_reason == "stop"


def test_how_much_may_be_asked_is_limited() -> None:
    assert StructuredOutputs(regex="a" * 1000)
    for much in ({"regex": "a" * (1 << 18)}, {"choice": ("ab",) * (1 << 17)}):
        with pytest.raises(InvalidInput, match="characters are over the limit of 262144"):
            StructuredOutputs(**much)  # type: ignore[arg-type]


# -- in the engine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(model: pathlib.Path, text: Text) -> Iterator[Driver]:
    made = driver_of(model, text)
    yield made
    made.close()


def driver_of(model: pathlib.Path, text: Text, **options: Any) -> Driver:
    made = Driver(model, **options)
    assert not made.core.grammars.is_loaded, "nobody asked yet"
    made.now("load_grammar_tokenizer", text=text.to_json())
    return made


def plain_run(driver: Driver, **options: Any) -> list[Any]:
    name = driver.add([5, 6, 7], structured_outputs=JSON, **{**GREEDY, **options})
    driver.run()
    return driver.output(name).outputs


def record(outputs: list[Any]) -> list[Any]:
    return [(c.token_ids, c.processed_logprobs, c.token_logprobs, c.finish_reason, c.stop_reason) for c in outputs]


def test_case_111_the_grammar_goes_through_a_pause_at_every_step(driver: Driver, text: Text) -> None:
    plain = plain_run(driver)
    check_json(plain[0].token_ids, text)
    assert plain[0].finish_reason == "stop" and len(plain[0].token_ids) > 20
    for at in range(len(plain[0].token_ids)):
        name = driver.add([5, 6, 7], structured_outputs=JSON, **GREEDY)
        driver.steps(at)
        driver.pause("keep", clear_cache=at % 2 == 0)
        driver.steps(3)
        driver.resume()
        driver.run()
        assert record(driver.output(name).outputs) == record(plain), at


def test_case_111_a_pause_at_10_and_a_preemption_at_15(model: pathlib.Path, text: Text) -> None:
    roomy, tight = driver_of(model, text), driver_of(model, text, num_blocks=6, enable_prefix_caching=False)
    plain = plain_run(roomy)
    older = tight.add([9] * 40, max_tokens=40)  # grows into what the other one holds
    name = tight.add([5, 6, 7], structured_outputs=JSON, **GREEDY)
    tight.until(lambda: len(tight.tokens(name)) == 10)
    tight.pause("keep", clear_cache=False)
    tight.resume()
    tight.run()
    output = tight.output(name).outputs
    assert output[0].num_preemptions > 0 and len(tight.tokens(older)) == 40
    assert record(output) == record(plain)
    for driver in (roomy, tight):
        driver.close()


def test_case_111_n_samples_have_a_grammar_each(model: pathlib.Path, text: Text) -> None:
    options: dict[str, Any] = {"n": 4, "temperature": 1.3, "seed": 8}
    roomy, tight = driver_of(model, text), driver_of(model, text, num_blocks=9, enable_prefix_caching=False)
    plain = plain_run(roomy, **options)
    for completion in plain:
        check_json(completion.token_ids, text)
    assert len({tuple(c.token_ids) for c in plain}) == 4
    again = plain_run(tight, **options)
    assert sum(c.num_preemptions for c in again) > 0 and record(again) == record(plain)
    for k, completion in enumerate(plain):  # each as if alone
        alone = plain_run(roomy, **{**options, "n": 1, "seed": completion.seed})
        assert alone[0].token_ids == completion.token_ids, k
    for driver in (roomy, tight):
        driver.close()


def test_case_111_a_grammar_that_can_not_go_on_ends_its_request_and_no_other(
    driver: Driver, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_run(driver)[0]
    other_alone = driver.add([8, 9])
    driver.run()
    advance = Grammar.advance
    count = 0

    def fails_at_7(self: Grammar, token_id: int) -> bool:
        nonlocal count
        count += 1
        return advance(self, token_id if count < 7 else EOS + 1)

    monkeypatch.setattr(Grammar, "advance", fails_at_7)
    name = driver.add([5, 6, 7], structured_outputs=JSON, **GREEDY)
    other = driver.add([8, 9])
    driver.run()
    out = driver.output(name).outputs[0]
    assert driver.output(name).finished and out.finish_reason == "error"
    assert isinstance(out.stop_reason, str) and out.stop_reason.startswith("structured_outputs")
    assert out.token_ids == plain.token_ids[:7] and len(out.processed_logprobs) == 7
    assert driver.tokens(other) == driver.tokens(other_alone)


# -- compiling, beside the steps ---------------------------------------------------------------------------------------


class Gates:
    """Holds each compilation until the test lets it go."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        self.begun = queue.SimpleQueue[threading.Event]()
        real = GrammarCompiler.compile

        def held(compiler: GrammarCompiler, wanted: StructuredOutputs) -> Grammar:
            gate = threading.Event()
            self.begun.put(gate)
            assert gate.wait(20)
            return real(compiler, wanted)

        monkeypatch.setattr(GrammarCompiler, "compile", held)
        self.compiled = driver.compiled
        driver.compiled = lambda: None  # type: ignore[method-assign]

    def next(self) -> threading.Event:
        return self.begun.get(timeout=20)

    def open(self, gate: threading.Event) -> None:
        """Let it go, and wait until the core can take the grammar."""
        gate.set()
        self.compiled()


@pytest.fixture
def gates(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Gates:
    return Gates(driver, monkeypatch)


def test_others_get_tokens_while_a_grammar_is_compiled(gates: Gates, text: Text) -> None:
    driver = gates.driver
    name = driver.add([5, 6, 7], structured_outputs=JSON, n=2, **GREEDY)
    gate = gates.next()
    other = driver.add([8, 9], max_tokens=12)
    status = driver.core.status()
    assert (status["running"], status["waiting"]) == (0, 2 + 1)
    driver.until(lambda: driver.output(other).finished)
    assert len(driver.tokens(other)) == 12 and not driver.tokens(name)
    assert not driver.core.has_work and driver.core.status()["device_idle"], "nothing to spin for"
    gates.open(gate)
    driver.run()
    for out in driver.output(name).outputs:
        check_json(out.token_ids, text)


def test_a_request_that_ends_while_its_grammar_is_compiled(gates: Gates, text: Text) -> None:
    driver = gates.driver
    name = driver.add([5, 6, 7], structured_outputs=JSON, n=2, **GREEDY)
    gate = gates.next()
    driver.core.abort([name + "-1"])  # one of the two samples
    driver.core.abort([name])
    driver.step()
    assert [c.finish_reason for c in driver.output(name).outputs] == ["abort"] * 2
    # the same id again, with another grammar: the first one's result is not for it
    choice = SamplingParams(structured_outputs=StructuredOutputs(choice=("ab",)), temperature=0)
    driver.core.add(name, [5], choice)
    first, second = (future for _, future, _ in driver.core.grammars._pending)
    other_gate = gates.next()
    gate.set()
    first.result(20)
    assert not driver.core.step() and driver.core.scheduler.num_waiting == 1
    other_gate.set()
    second.result(20)
    while driver.core.scheduler.has_unfinished:
        assert driver.core.step()
    ids = [token for increment in driver.core.take_outputs().increments for token in increment.token_ids]
    assert text.decode(ids) == "ab"


def test_a_request_nobody_waits_for_is_not_compiled(gates: Gates) -> None:
    driver = gates.driver
    names = [driver.add([5], structured_outputs=JSON, **GREEDY) for _ in range(4)]
    begun = [gates.next(), gates.next()]  # both threads
    driver.core.abort(names)
    for gate in begun:
        gate.set()
    gates.compiled()
    driver.step()
    assert gates.begun.empty() and not driver.core.grammars._pending


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_pause_while_a_grammar_is_compiled(gates: Gates, text: Text, mode: str) -> None:
    driver = gates.driver
    name = driver.add([5, 6, 7], structured_outputs=JSON, **GREEDY)
    gate = gates.next()
    if mode == "wait":
        op = driver.call("pause_generation", mode="wait", timeout_s=None)
        driver.steps(3)
        assert op not in driver.replies, "an accepted request is waited for"
    else:
        driver.pause(mode)
    gates.open(gate)
    driver.steps(3)
    assert not driver.tokens(name)[1:] or mode == "wait"
    if mode == "abort":
        assert driver.output(name).outputs[0].finish_reason == "abort"
        return
    if mode == "wait":
        driver.until(lambda: op in driver.replies)
    driver.resume()
    driver.run()
    check_json(driver.tokens(name), text)


def test_a_commit_does_not_wait_for_a_grammar(gates: Gates, model: pathlib.Path, text: Text) -> None:
    from safetensors.torch import load_file

    driver = gates.driver
    tensors = load_file(model / "model.safetensors")
    name = driver.add([5, 6, 7], structured_outputs=JSON, **GREEDY)
    gate = gates.next()
    for label in ("a", "b", "c"):  # without a pause, and without a token between them
        driver.update(tensors, label=label)
    gates.open(gate)
    driver.run()
    check_json(driver.tokens(name), text)
    assert [span.number for span in driver.output(name).outputs[0].weight_versions] == [3]


def test_what_does_not_compile_or_takes_too_long_fails_its_request_alone(
    gates: Gates, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = gates.driver
    bad = driver.add([5], structured_outputs=StructuredOutputs(regex="("), n=2, **GREEDY)
    gate = gates.next()
    gates.open(gate)
    assert driver.core.step() is False
    ((failed, error),) = driver.core.take_outputs().failed
    assert failed == bad and isinstance(error, InvalidInput) and "regex" in str(error)
    slow = driver.add([5], structured_outputs=JSON, **GREEDY)
    gate = gates.next()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 9)
    driver.step()
    assert driver.core.scheduler.has_unfinished
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    driver.core.step()
    ((failed, error),) = driver.core.take_outputs().failed
    assert failed == slow and isinstance(error, InvalidInput) and "within 10 s" in str(error)
    assert not driver.core.scheduler.has_unfinished
    gate.set()
    monkeypatch.undo()
    name = driver.add([5, 6, 7], structured_outputs=JSON, **GREEDY)
    driver.compiled()
    driver.run()
    check_json(driver.tokens(name), text)


def test_closing_does_not_wait_for_a_grammar(model: pathlib.Path, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of(model, text)
    gates = Gates(driver, monkeypatch)
    name = driver.add([5, 6, 7], structured_outputs=JSON, **GREEDY)
    gate = gates.next()
    driver.close()
    gate.set()
    driver.take()
    assert driver.output(name).outputs[0].finish_reason == "abort"


def test_a_commit_leaves_the_grammar_where_it_was(driver: Driver, model: pathlib.Path, text: Text) -> None:
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors")
    plain = plain_run(driver)
    for policy in ("recompute", "keep"):
        name = driver.add([5, 6, 7], structured_outputs=JSON, **GREEDY)
        driver.steps(12)
        driver.update(tensors, label=policy, kv_policy=policy)
        driver.run()
        output = driver.output(name).outputs
        assert output[0].token_ids == plain[0].token_ids and len(output[0].weight_versions) == 2


def test_the_processed_logprob_is_of_the_masked_distribution(driver: Driver, text: Text) -> None:
    options = {"temperature": 0.8, "seed": 4, "logprobs": 20, "logprobs_mode": "processed_logprobs"}
    (out,) = plain_run(driver, return_sampling_mask=True, **options)
    assert out.sampling_mask and len(out.sampling_mask) == len(out.token_ids)
    forced = 0
    for token, value, ids, shown in zip(
        out.token_ids, out.processed_logprobs, out.sampling_mask, out.logprobs, strict=True
    ):
        assert token in ids
        forced += len(ids) == 1
        assert len(ids) > 1 or value == 0
        assert sum(math.exp(shown[i].logprob) for i in ids) == pytest.approx(1, abs=1e-5)
    assert forced > 5


def test_max_tokens_and_ignore_eos_end_it_as_they_do_without(driver: Driver, text: Text) -> None:
    whole = plain_run(driver)[0].token_ids
    (short,) = plain_run(driver, max_tokens=9)
    assert (short.token_ids, short.finish_reason) == (whole[:9], "length")
    (forced,) = plain_run(driver, ignore_eos=True)
    assert (forced.token_ids, forced.finish_reason) == (whole, "stop"), "after its end a grammar has no next token"


def test_both_engines_send_the_tokenizer_with_the_first_request_that_asks(model: pathlib.Path, text: Text) -> None:
    params = SamplingParams(structured_outputs=JSON, temperature=0, max_tokens=80)
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
    with LLM(str(model), num_blocks=64) as llm:
        llm.generate([[5]], SamplingParams(max_tokens=2))
        assert not llm.core.grammars.is_loaded
        wanted = llm.generate([[5, 6, 7]], params)[0].outputs[0]
        with pytest.raises(InvalidInput, match="regex"):
            llm.generate([[5]], bad)
    check_json(wanted.token_ids, text)
    assert json.loads(wanted.text)

    async def main() -> None:
        async with AsyncLLM(str(model), num_blocks=64, num_threads=1) as engine:

            async def one(params: SamplingParams) -> Any:
                return [output async for output in engine.generate([5, 6, 7], params)][-1].outputs[0]

            found = await asyncio.gather(*(one(params) for _ in range(3)), one(bad), return_exceptions=True)
            assert [out.token_ids for out in found[:3]] == [wanted.token_ids] * 3  # type: ignore[union-attr]
            assert isinstance(found[3], InvalidInput) and "regex" in str(found[3])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_without_a_tokenizer_it_is_refused(tmp_path: pathlib.Path) -> None:
    directory = write_text_checkpoint(tmp_path / "m", **TINY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with LLM(str(directory)) as llm, pytest.raises(InvalidInput, match="tokenizer"):
        llm.generate([[5]], SamplingParams(structured_outputs=JSON))
