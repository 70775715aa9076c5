"""midstream: an LLM inference engine for online reinforcement learning.

The public names, sorted, nothing else. Each is imported from its home on first use (PEP 562), so that
``import midstream`` costs nothing and the torch-free modules stay free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream import errors
    from midstream.config import EngineConfig
    from midstream.serving.async_llm import AsyncLLM
    from midstream.serving.llm import LLM
    from midstream.types import (
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        StructuredOutputs,
        WeightVersion,
        WeightVersionSpan,
    )
    from midstream.weights.base import ModuleSource, TrainerWeightTransferEngine, WeightSource, WeightTransferEngine

__all__ = [
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LLM",
    "ModuleSource",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TrainerWeightTransferEngine",
    "WeightSource",
    "WeightTransferEngine",
    "WeightVersion",
    "WeightVersionSpan",
    "errors",
]

_HOMES = {
    "AsyncLLM": "midstream.serving.async_llm",
    "CompletionOutput": "midstream.types",
    "EngineConfig": "midstream.config",
    "LLM": "midstream.serving.llm",
    "ModuleSource": "midstream.weights.base",
    "RequestOutput": "midstream.types",
    "SamplingParams": "midstream.types",
    "StructuredOutputs": "midstream.types",
    "TrainerWeightTransferEngine": "midstream.weights.base",
    "WeightSource": "midstream.weights.base",
    "WeightTransferEngine": "midstream.weights.base",
    "WeightVersion": "midstream.types",
    "WeightVersionSpan": "midstream.types",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("midstream.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'midstream' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
