"""The decoder against transformers, for every architecture, in fp32."""

from __future__ import annotations

import math
import pathlib

import pytest
import torch

from checkpoints import VARIANTS, write_checkpoint
from midstream.models.llama import Llama
from midstream.models.loader import load_weights, open_checkpoint
from midstream.models.weights import assemble, fused_experts
from midstream.ops.attention import AttentionMetadata
from midstream.rl.policy import Policy
from midstream.serving.llm import LLM
from midstream.types import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[(5 * i * i + 11 * i + s) % 158 + 2 for i in range(3 + 14 * s)] for s in range(6)]
EXTRA = {
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3-moe-plain": ("qwen3-moe", {"norm_topk_prob": False, "num_experts_per_tok": 3, "attention_bias": True}),
    "qwen3-moe-some-layers": ("qwen3-moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-odd-heads": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24},
    ),
    "llama-rope-parameters": (
        "llama",
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ),
}
ALL = {**{name: (name, {}) for name in VARIANTS}, **EXTRA}


@pytest.fixture(params=ALL)
def path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    variant, changes = ALL[request.param]
    return write_checkpoint(tmp_path / request.param, variant, **changes)


def theirs(path: pathlib.Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()


@torch.inference_mode()
def their_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@torch.inference_mode()
def our_logits(path: pathlib.Path, ids: list[int]) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    c, size = checkpoint.config, 16
    model = Llama(c)
    weights = assemble(c, dict(load_weights(checkpoint, torch.float32)))
    blocks = -(-len(ids) // size)
    keys, values = (
        torch.zeros(c.num_layers, blocks, c.num_kv_heads, *shape) for shape in ((c.head_dim, size), (size, c.head_dim))
    )
    meta = AttentionMetadata(
        torch.arange(blocks, dtype=torch.int32)[None], torch.tensor([0, len(ids)], dtype=torch.int32),
        torch.tensor([len(ids)], dtype=torch.int32), torch.arange(len(ids)),
    )  # fmt: skip

    hidden = model.serve(weights, torch.tensor(ids), torch.arange(len(ids)), keys, values, meta)
    return model.logits(weights, hidden)


def test_logits_are_close(path: pathlib.Path) -> None:
    model = theirs(path)
    for ids in (PROMPTS[5], PROMPTS[0], [7] * 200):
        wanted = their_logits(model, ids)
        assert (our_logits(path, ids) - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.abs().max()))


def test_greedy_ids_are_equal_and_logprobs_close_over_24_tokens(path: pathlib.Path) -> None:
    model = theirs(path)
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    with LLM(str(path), num_blocks=100, max_num_batched_tokens=50) as llm:
        outputs = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        out = output.outputs[0]
        assert output.prompt_token_ids == prompt and len(out.token_ids) == 24
        logits = their_logits(model, prompt + out.token_ids)
        assert out.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        logprobs = torch.log_softmax(logits.double(), -1)
        wanted = logprobs[:-1].gather(-1, torch.tensor(prompt + out.token_ids)[1:, None]).squeeze(-1).tolist()
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        found += [entry[token].logprob for entry, token in zip(out.logprobs, out.token_ids, strict=True)]
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-4


def test_transformers_opens_what_the_policy_saves(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    policy = Policy(path)
    with torch.no_grad():
        for i, p in enumerate(policy.parameters()):
            p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    policy.save(tmp_path / "saved")
    wanted = their_logits(theirs(tmp_path / "saved"), PROMPTS[4])
    assert (our_logits(tmp_path / "saved", PROMPTS[4]) - wanted).abs().max() < 1e-4 * float(wanted.abs().max())
    assert (our_logits(path, PROMPTS[4]) - wanted).abs().max() > 1e-2  # other weights, indeed
    again = Policy(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), policy.parameters(), strict=True))
    (tmp_path / "fresh").mkdir()
    config = open_checkpoint(tmp_path / "saved").config
    assert type(config).from_hf(config.to_hf()) == config


def test_the_gradient_is_transformers_gradient(path: pathlib.Path) -> None:
    policy, model = Policy(path), theirs(path)
    prompt, completion = PROMPTS[2], PROMPTS[1]
    loss = -policy.logprobs([(prompt, [completion])], SamplingParams()).mean()
    loss.backward()
    logits = model(torch.tensor([prompt + completion])).logits[0]
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    wanted = -logprobs.gather(-1, torch.tensor(completion)[:, None]).mean()
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
    fused = fused_experts(policy.config)
    for whole, p in model.named_parameters():
        for name, part in fused[whole].split(p.grad) if whole in fused else [(whole, p.grad)]:
            found = policy.masters[name].grad
            found = torch.zeros_like(part) if found is None else found  # an expert that no token went to
            assert (found - part).norm() < 1e-3 * part.norm() + 1e-7, name


def test_case_102_ids_are_echoed_and_never_encoded_again(tmp_path: pathlib.Path) -> None:
    """No tokenizer is there at all: ids in, ids out, and the second turn is the first one's ids with a suffix."""
    path = write_checkpoint(tmp_path / "m", "llama")
    params = SamplingParams(max_tokens=6, seed=3, detokenize=False, ignore_eos=True)
    with LLM(str(path), num_blocks=50) as llm:
        prompt = [0, 0, 1, 1, 159, 2, 2]
        first = llm.generate({"prompt_token_ids": prompt}, params)[0]
        assert first.prompt_token_ids == prompt and first.prompt is None
        second = llm.generate([prompt + first.outputs[0].token_ids + [9, 1]], params)[0]
        assert second.prompt_token_ids == prompt + first.outputs[0].token_ids + [9, 1]
        assert len(second.outputs[0].token_ids) == 6 and not math.isnan(second.outputs[0].processed_logprobs[0])
