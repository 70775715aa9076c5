"""The numerics fingerprint: everything that decides the bits of a log-probability beside weights and tokens.

Two processes with equal fingerprints give equal bits. They exchange it when a weight channel is opened.
"""

from __future__ import annotations

from typing import Any

import torch

from midstream.ops import cpu, moe


def fingerprint(dtype: torch.dtype, block_size: int, combine_order: str = moe.COMBINE_ORDER) -> dict[str, Any]:
    """Plain data, compared for equality. Over how many ranks experts are spread is no part of it: it changes no bit."""
    library = cpu.library()
    return {
        "kernels": "reference" if library is None else str(library._name).rsplit("/", 1)[-1],
        "torch": str(torch.__version__),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": block_size,
        "tp_size": 1,
        "combine_order": combine_order,
    }


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Empty where they agree; else what differs, for ``exact: no (...)``."""
    keys = sorted(set(ours) | set(theirs))
    return ", ".join(f"{k}: {ours.get(k)} / {theirs.get(k)}" for k in keys if ours.get(k) != theirs.get(k))
