"""Training a tiny model with experts while its weights change under requests: every logprob is exact."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import midstream
from midstream.cli import main
from midstream.models.config import ModelConfig
from midstream.models.weights import parameter_shapes
from midstream.rl.exact import check_run
from midstream.rl.policy import Policy

TOKENIZER = pathlib.Path(midstream.__file__).parent / "rl" / "models" / "reverse"
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
REWARD = "async def reward(problem, completion):\n    return len(set(completion.token_ids)) / 12\n"


def write(directory: pathlib.Path) -> pathlib.Path:
    shutil.copytree(TOKENIZER, directory)
    config = json.loads((directory / "config.json").read_text()) | MOE
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(ModelConfig.from_hf(config))
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = {n: 1 + 0.1 * t if n.endswith("norm.weight") else 0.15 * t for n, t in noise.items()}
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("replay", [True, False])
def test_async_steps_are_exact(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, replay: bool, dtype: str
) -> None:
    model, out = write(tmp_path / "model"), tmp_path / "run"
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "bdce", "e")))
    (tmp_path / "r.py").write_text(REWARD)
    plain, seen = Policy.logprobs, []

    def logprobs(self: Policy, sequences: Any, params: Any, routes: Any = None) -> torch.Tensor:
        seen.append(routes is not None)
        return plain(self, sequences, params, routes)

    monkeypatch.setattr(Policy, "logprobs", logprobs)
    options = {
        "steps": 5, "groups_per_step": 3, "samples_per_group": 4, "eval_problems": 0, "keep_versions": True,
        "max_tokens": 12, "lr": 1e-2, "warmup_steps": 0, "dtype": f'"{dtype}"', "replay_routed_experts": replay,
    }  # fmt: skip
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={str(value).lower()}")]
    task = f"{tmp_path}/p.jsonl:{tmp_path}/r.py:reward"
    assert main(["train", "--model", str(model), "--task", task, "--out", str(out), *settings]) == 0
    assert seen and all(found == replay for found in seen)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["exact_tokens"] == summary["tokens"] > 300
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["fresh_tokens"] for line in lines) > 0
    assert all(line["fresh_tokens_exact"] == line["fresh_tokens"] for line in lines)
    before, after = Policy(model), Policy(out / "checkpoints" / "step-000005")
    moved = [name for name, p in after.state().items() if not torch.equal(p, before.masters[name])]
    assert {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.0.up_proj.weight"} <= set(moved)
    assert check_run(out).is_exact and not check_run(out, flip="weight").is_exact
