"""Fixtures that many files use."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch

from checkpoints import write_checkpoint
from cores import TINY


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """Checkpoints of one dense model, each with other weights."""
    at = tmp_path_factory.mktemp("dense")
    return [write_checkpoint(at / f"w{seed}", "llama", seed, **TINY) for seed in range(3)]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """And of one with experts."""
    at = tmp_path_factory.mktemp("moe")
    return [write_checkpoint(at / f"w{seed}", "qwen3-moe", seed) for seed in range(3)]
