"""Stop texts, special tokens and chat: what ends an output, and what of it is shown."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from checkpoints import write_text_checkpoint
from cores import TINY
from midstream.errors import InvalidInput
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.llm import LLM
from midstream.serving.outputs import OutputBuilder, StopTexts
from midstream.serving.text import Text
from midstream.types import (
    CompletionOutput,
    FinishReason,
    RequestIncrement,
    SampledToken,
    SamplingParams,
    WeightVersionSpan,
)

torch.set_num_threads(1)

LONG = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)


class Pieces:
    """A tokenizer in which token i is the i-th of the given pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids)

    def token(self, token_id: int, skip_special_tokens: bool = False) -> str:
        return self.pieces[token_id]


def increment(ids: list[int], start: int, finish: FinishReason | None = None, **changes: Any) -> RequestIncrement:
    spans = [WeightVersionSpan("v0", 0, 0, min(2, start + len(ids)))]
    if start + len(ids) > 2:
        spans.append(WeightVersionSpan("v1", 1, 2, start + len(ids)))
    values: dict[str, Any] = {
        "parent_id": "r", "index": 0, "tokens": [SampledToken(i, -1.0 * i, -2.0 * i, 1, [], [i, i + 1]) for i in ids],
        "weight_versions": spans, "seed": 1, "finish_reason": finish,
    }  # fmt: skip
    return RequestIncrement(**{**values, **changes})


def feed(
    pieces: list[str], sizes: list[int], end: FinishReason = "length", **options: Any
) -> tuple[CompletionOutput, list[str], str | None]:
    """Tokens 0, 1, 2, … in increments of ``sizes``: (output, every text shown on the way, what to abort)."""
    params = SamplingParams(logprobs=0, return_sampling_mask=True, top_k=2, **options)
    builder = OutputBuilder("r", None, [9, 9], params, Pieces(pieces))  # type: ignore[arg-type]
    out, shown, start, aborted = builder.output.outputs[0], [], 0, None
    for k, size in enumerate(sizes):
        last = k == len(sizes) - 1
        found = builder.add(increment(list(range(start, start + size)), start, end if last else None))
        aborted = aborted or found
        shown.append(out.text)
        start += size
    assert builder.output.finished and builder.is_over
    return out, shown, aborted


def splits(text: str) -> list[list[str]]:
    """Every way to cut ``text`` into pieces."""
    ways = []
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        pieces = [text[0]]
        for character, cut in zip(text[1:], cuts, strict=True):
            if cut:
                pieces.append(character)
            else:
                pieces[-1] += character
        ways.append(pieces)
    return ways


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "found"),
    [
        ("abXYZcd", ("XYZ",), "XYZ"),
        ("aaaabab", ("aab",), "aab"),  # what was held back turns out to be text, and its end begins anew
        ("abcXbcd", ("Xb", "bcd", "bcX"), "bcX"),  # the one that is complete first
        ("abcdefg", ("cd", "bcd", "d"), "bcd"),  # of those that end together, the longest
        ("XYZabcd", ("XYZ",), "XYZ"),
        ("abcdXYZ", ("XYZ", "nowhere"), "XYZ"),
        ("abcdXYQ", ("XYZ",), None),
    ],
)
def test_a_stop_text_is_found_across_every_border(text: str, stop: tuple[str, ...], found: str, include: bool) -> None:
    ends = [text.index(found) + len(found)] if found else [len(text)]
    wanted = text[: ends[0]] if include or not found else text[: text.index(found)]
    for pieces in splits(text):
        count = len(pieces)
        lengths = list(itertools.accumulate(map(len, pieces)))
        num_tokens = next(i for i, n in enumerate(lengths, 1) if n >= ends[0])  # the token that completed it is kept
        for sizes in ([1] * count, [count], [2] * (count // 2) + [count % 2]):
            out, shown, aborted = feed(pieces, sizes, stop=stop, include_stop_str_in_output=include)
            assert out.text == wanted
            assert out.token_ids == list(range(num_tokens))
            assert (out.finish_reason, out.stop_reason) == (("stop", found) if found else ("length", None))
            assert all(wanted.startswith(part) for part in shown), "text was shown that is not there at the end"
            assert [len(a) <= len(b) for a, b in itertools.pairwise(shown)] == [True] * (len(shown) - 1)
            made = len(out.token_ids)
            assert made == len(out.token_logprobs) == len(out.processed_logprobs) == len(out.logprobs or [])
            assert out.sampling_mask == [[i, i + 1] for i in range(made)]
            assert out.weight_versions[-1].end == made and all(s.end > s.start for s in out.weight_versions)
            before_the_end = sum(sizes[:-1])
            assert aborted == ("r" if found and num_tokens <= before_the_end else None)


def test_no_more_is_held_back_than_may_become_a_stop_text() -> None:
    stops = StopTexts(("END", "EXIT!"))
    assert [stops.num_held(t) for t in ("abc", "abE", "abEN", "abEX", "abEXIT", "NE", "")] == [0, 1, 2, 2, 4, 1, 0]
    _, shown, _ = feed(list("abEcENd"), [1] * 7, stop=("END",))
    assert shown == ["a", "ab", "ab", "abEc", "abEc", "abEc", "abEcENd"]


def test_kv_versions_end_with_the_output() -> None:
    params = SamplingParams(stop=("c",))
    builder = OutputBuilder("r", None, [9, 9], params, Pieces(list("abcd")))  # type: ignore[arg-type]
    builder.add(increment([0, 1, 2, 3], 0, "length", kv_versions=[(0, 0, 3), (1, 3, 5), (2, 5, 6), (2, 1, 6)]))
    assert builder.output.outputs[0].kv_versions == [(0, 0, 3), (1, 3, 5), (2, 1, 5)]


def test_one_of_n_stops_and_the_others_go_on() -> None:
    params = SamplingParams(n=2, stop=("c",))
    builder = OutputBuilder("r", None, [9], params, Pieces(list("abcd")))  # type: ignore[arg-type]
    assert builder.add(increment([0, 2], 0, index=1)) == "1_r"
    assert builder.add(increment([3], 2, index=1)) is None
    assert builder.add(increment([1, 1], 0, "length")) is None
    assert builder.output.finished and not builder.is_over
    assert builder.add(increment([3], 3, "abort", index=1)) is None
    first, second = builder.output.outputs
    assert builder.is_over and (first.text, second.text) == ("bb", "a")
    assert (second.finish_reason, second.token_ids) == ("stop", [0, 2])


def test_a_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    for include, text in ((False, "ab"), (True, "abc")):
        out, shown, _ = feed(list("abc"), [1] * 3, "stop", include_stop_str_in_output=include)
        assert (out.text, out.token_ids) == (text, [0, 1, 2]) and shown[1] == "ab"


# -- a tokenizer over bytes, through both engines ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("m") / "w0", **TINY)


@pytest.fixture(scope="module")
def llm(model: pathlib.Path) -> Any:
    with LLM(str(model), num_blocks=64) as engine:
        yield engine


def test_characters_of_several_bytes_are_found_and_never_shown_in_halves(model: pathlib.Path) -> None:
    text = Text(model)
    ids = text.encode("naïve 😀→ end")
    assert len(ids) > len("naïve 😀→ end")
    for stop, wanted in (("😀→", "naïve "), ("→", "naïve 😀"), ("ïve", "na"), ("x", "naïve 😀→ end")):
        builder = OutputBuilder("r", None, [5], SamplingParams(stop=(stop,)), text)
        shown = []
        for k, token in enumerate(ids):
            builder.add(increment([token], k, "length" if k == len(ids) - 1 else None))
            shown.append(builder.output.outputs[0].text)
        assert shown[-1] == wanted and all(wanted.startswith(part) for part in shown)


def seen_in_the_middle(text: str) -> str:
    """Two whole characters of ``text`` that are not there before."""
    pairs = ((k, text[k : k + 2]) for k in range(8, len(text)))
    return next(pair for k, pair in pairs if text.find(pair) == k and "\ufffd" not in pair)


def test_a_stop_text_cuts_the_plain_output(llm: LLM) -> None:
    plain = llm.generate([[5, 6, 7]], LONG)[0].outputs[0]
    stop = seen_in_the_middle(plain.text)
    for final_only in (False, True):
        params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, stop=("nowhere", stop), final_only=final_only)
        steps: list[int] = []
        out = llm.generate([[5, 6, 7]], params, steps.append)[0].outputs[0]
        assert out.text == plain.text[: plain.text.index(stop)]
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        made = len(out.token_ids)
        assert 0 < made < 40 and out.token_ids == plain.token_ids[:made]
        assert out.processed_logprobs == plain.processed_logprobs[:made]
        assert len(steps) == made, "the core made no more than was needed"
        shorter = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=made - 1, seed=3, ignore_eos=True))[0].outputs[0]
        assert stop not in shorter.text
    assert llm.core.scheduler.pool.num_used == 0 and not llm._open


def test_n_samples_stop_each_at_its_own_place(llm: LLM) -> None:
    many = SamplingParams(n=4, max_tokens=40, seed=3, ignore_eos=True)
    plain = [c.text for c in llm.generate([[5, 6, 7]], many)[0].outputs]
    stop = tuple(sorted({text[7 + 3 * k] for k, text in enumerate(plain)}))
    found = llm.generate([[5, 6, 7]], SamplingParams(n=4, max_tokens=40, seed=3, ignore_eos=True, stop=stop))[0].outputs
    for text, out in zip(plain, found, strict=True):
        assert out.text == text[: min(text.index(s) for s in stop if s in text)]
    assert llm.core.scheduler.pool.num_used == 0


def test_without_a_tokenizer_stop_texts_are_refused(tmp_path: pathlib.Path) -> None:
    directory = write_text_checkpoint(tmp_path / "m", **TINY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with LLM(str(directory)) as engine:
        with pytest.raises(InvalidInput, match="tokenizer"):
            engine.generate([[5]], SamplingParams(stop=("a",)))
        assert not engine.core.scheduler.has_unfinished


def test_special_tokens_are_shown_on_request_and_may_be_stop_texts(llm: LLM) -> None:
    text = llm.text
    a, b = text.encode("ab c")[:1], text.encode("d")
    ids = [*a, 1, *b, 0]

    def shown(**options: Any) -> CompletionOutput:
        builder = OutputBuilder("r", None, [5], SamplingParams(**options), text)
        for k, token in enumerate(ids):
            builder.add(increment([token], k, "length" if k == 3 else None))
        return builder.output.outputs[0]

    assert shown().text == "abd"
    assert shown(skip_special_tokens=False).text == "ab<eos>d<bos>"
    cut = shown(skip_special_tokens=False, stop=("<eos>",))
    assert (cut.text, cut.token_ids, cut.stop_reason) == ("ab", ids[:2], "<eos>")
    assert shown(stop=("<eos>",)).finish_reason == "length"


def test_chat_goes_through_the_template(llm: LLM) -> None:
    one = [{"role": "user", "content": "abc"}]
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    (answer,) = llm.chat(one, params)
    assert answer.prompt_token_ids == llm.text.encode("<user>abc<assistant>")
    assert answer.outputs[0].token_ids == llm.generate("<user>abc<assistant>", params)[0].outputs[0].token_ids
    two = llm.chat([one, [*one, {"role": "assistant", "content": "x"}]], params, mood="calm")
    assert [o.prompt_token_ids for o in two] == [
        llm.text.encode("<user>abc(calm)<assistant>"), llm.text.encode("<user>abc<assistant>x(calm)<assistant>")
    ]  # fmt: skip
    (bare,) = llm.chat(one, params, add_generation_prompt=False)
    assert bare.prompt_token_ids == llm.text.encode("<user>abc")
    for broken in ([5], [{"role": "user"}, None], "text"):
        with pytest.raises(InvalidInput, match="template"):
            llm.chat(broken, params)  # type: ignore[arg-type]


# -- streamed, from the core's process ---------------------------------------------------------------------------------


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_streams_show_a_prefix_and_the_core_is_told_to_stop(model: pathlib.Path, llm: LLM) -> None:
    plain = llm.generate([[5, 6, 7]], LONG)[0].outputs[0]
    stop = seen_in_the_middle(plain.text)
    wanted = plain.text[: plain.text.index(stop)]
    params = SamplingParams(max_tokens=480, seed=3, ignore_eos=True, stop=(stop,))

    async def main() -> None:
        async with AsyncLLM(str(model), num_blocks=64, num_threads=1, max_num_seqs=8) as engine:
            for again in range(3):  # the same id at once: the last words of the one before are not taken for its own
                shown, output = [], None
                async for output in engine.generate([5, 6, 7], params, request_id="same"):
                    shown.append(output.outputs[0].text)
                assert output is not None and output.finished
                out = output.outputs[0]
                assert shown[-1] == wanted and all(wanted.startswith(part) for part in shown)
                assert out.stop_reason == stop and out.token_ids == plain.token_ids[: len(out.token_ids)]
                assert len(shown) > 2 or again
            whole = await engine.generate_one([5, 6, 7], params)
            assert whole.outputs[0].text == wanted and whole.outputs[0].token_ids == out.token_ids
            many = SamplingParams(n=4, max_tokens=480, seed=3, ignore_eos=True, stop=tuple("abcdefgh"), final_only=True)
            outputs = [o async for o in engine.generate([5, 6, 7], many)]
            assert len(outputs) == 1 and all(c.stop_reason in "abcdefgh" for c in outputs[0].outputs)
            while (status := await engine.status())["running"] + status["waiting"]:
                pass
            assert status["num_free_blocks"] == status["num_blocks"] and status["num_sampled_tokens"] < 1200
            assert not engine._streams
            while engine._leaving:
                await engine.status()

    run(main())
