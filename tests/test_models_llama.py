"""The engine's forward: one call of the kernels is the composed forward, bit for bit, and leaves the same caches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from checkpoints import VARIANTS, config_of, random_weights
from midstream.models.config import ModelConfig
from midstream.models.llama import Llama
from midstream.models.weights import assemble
from midstream.ops import cpu
from midstream.ops.attention import AttentionMetadata

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there are no kernels, or they are switched off")
SIZE, BLOCKS = 32, 6


@pytest.fixture(autouse=True, params=[1, 2], ids=["one thread", "two"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def steps() -> list[tuple[list[int], list[int], AttentionMetadata]]:
    """(ids, positions, metadata) of three steps of two requests: a prompt and half of one; the rest; a token each."""
    tables, found = [[3, 1, 4], [0, 2, 0]], []
    for chunks in ([(0, 45), (0, 20)], [(45, 46), (20, 50)], [(46, 47), (50, 51)]):
        positions = [p for start, end in chunks for p in range(start, end)]
        slots = [tables[r][p // SIZE] * SIZE + p % SIZE for r, chunk in enumerate(chunks) for p in range(*chunk)]
        ends = [0, chunks[0][1] - chunks[0][0], len(positions)]
        meta = AttentionMetadata(
            block_tables=torch.tensor(tables, dtype=torch.int32),
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
            seq_lens=torch.tensor([end for _, end in chunks], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        )
        found.append(([(7 * p + 3) % 160 for p in positions], positions, meta))
    return found


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"qwen3-moe"}))
def test_one_call_is_the_composed_forward(variant: str, dtype: torch.dtype) -> None:
    config = ModelConfig.from_hf(config_of(variant, head_dim=32))
    model = Llama(config)
    tensors = random_weights(variant, dtype=dtype, head_dim=32)
    weights, composed = (assemble(config, tensors) for _ in range(2))
    assert weights.table is not None
    composed.table = None
    shapes = ((config.head_dim, SIZE), (SIZE, config.head_dim))
    empty = [torch.randn(config.num_layers, BLOCKS, config.num_kv_heads, *shape).to(dtype) for shape in shapes]
    caches = [[cache.clone() for cache in empty] for _ in range(2)]
    for ids, positions, metadata in steps():
        found, wanted = (
            model.serve(of, torch.tensor(ids), torch.tensor(positions), *held, metadata)
            for of, held in zip((weights, composed), caches, strict=True)
        )
        assert torch.equal(found, wanted) and found.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))
    assert not torch.equal(caches[0][0], empty[0])
