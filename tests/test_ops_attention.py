"""Paged attention: the kernel, its plain twin and a dense definition; the same bits whoever shares the batch."""

from __future__ import annotations

import ctypes
import itertools
import platform
from dataclasses import dataclass, replace

import pytest
import torch

from midstream.ops import attention, reference
from midstream.ops.attention import AttentionMetadata, PagedAttention, Placement

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Item:
    """One request: q [n, H, F] are the queries of the last n of its context k, v [L, K, F]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def part(self, start: int, end: int) -> Item:
        """The queries [start, end) as they were when the context ended there (of a request that is all queries)."""
        return Item(self.q[start:end], self.k[:end], self.v[:end])


def item(seed: int, queries: int, context: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Item:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return Item(draw(queries, heads, dim), draw(context, kv_heads, dim), draw(context, kv_heads, dim))


def lay_out(
    items: list[Item], size: int, place_seed: int = 0, write=attention.write_kv
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]:
    """(q, key cache, value cache, metadata), blocks in random places; every slot that is not written holds NaN."""
    _, kv_heads, dim = items[0].k.shape
    counts = [-(-len(i.k) // size) for i in items]
    num_blocks = sum(counts) + 3
    places = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(place_seed)).tolist()
    keys = torch.full((num_blocks, kv_heads, dim, size), torch.nan, dtype=items[0].k.dtype)
    values = torch.full((num_blocks, kv_heads, size, dim), torch.nan, dtype=items[0].k.dtype)
    tables = []
    for one, count in zip(items, counts, strict=True):
        table = [places.pop() for _ in range(count)]
        slots = torch.tensor([table[p // size] * size + p % size for p in range(len(one.k))])
        write(keys, values, one.k, one.v, slots)
        tables.append(table + [0] * (max(counts) - count))
    ends = list(itertools.accumulate((len(i.q) for i in items), initial=0))
    metadata = AttentionMetadata(
        block_tables=torch.tensor(tables, dtype=torch.int32),
        cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
        seq_lens=torch.tensor([len(i.k) for i in items], dtype=torch.int32),
    )
    return torch.cat([i.q for i in items]), keys, values, metadata


def kernel(items: list[Item], size: int, place_seed: int = 0) -> list[torch.Tensor]:
    q, keys, values, meta = lay_out(items, size, place_seed)
    out = attention.paged_attention(q, keys, values, meta, q.shape[2] ** -0.5)
    return list(out.split([len(i.q) for i in items]))


def plain(items: list[Item], size: int, place_seed: int = 0) -> list[torch.Tensor]:
    q, keys, values, m = lay_out(items, size, place_seed, reference.write_kv)
    out = reference.paged_attention(q, keys, values, m.block_tables, m.cu_seqlens_q, m.seq_lens, q.shape[2] ** -0.5)
    return list(out.split([len(i.q) for i in items]))


TWINS = pytest.mark.parametrize("attend", [kernel, plain])


def dense(one: Item) -> torch.Tensor:
    """The textbook definition, in float64."""
    n, heads, dim = one.q.shape
    group = heads // one.k.shape[1]
    q, k, v = one.q.double(), one.k.double(), one.v.double()
    scores = torch.einsum("qhf,khf->hqk", q, k.repeat_interleave(group, 1)) * dim**-0.5
    hidden = torch.arange(len(k)) > (len(k) - n + torch.arange(n))[:, None]
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return torch.einsum("hqk,khf->qhf", p, v.repeat_interleave(group, 1))


def check_values(group: int, dim: int, size: int, dtype: torch.dtype) -> None:
    kv_heads = 2
    items = [
        item(seed, queries, context, group * kv_heads, kv_heads, dim, dtype)
        for seed, (queries, context) in enumerate([(1, 1), (1, size), (1, size + 1), (7, 40), (33, 33), (1, 70)])
    ]
    for one, fast, slow in zip(items, kernel(items, size), plain(items, size), strict=True):
        wanted = dense(one)
        assert fast.dtype == slow.dtype == dtype
        for found in (fast, slow):
            assert (found.double() - wanted).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", range(1, 10))
def test_both_twins_are_the_dense_definition_for_every_group(group: int, dtype: torch.dtype) -> None:
    check_values(group, 32, 16, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "size"), [(16, 16), (48, 32), (64, 16), (64, 64), (80, 32), (128, 16)])
def test_both_twins_are_the_dense_definition_for_every_geometry(dim: int, size: int, dtype: torch.dtype) -> None:
    check_values(3, dim, size, dtype)


@pytest.mark.parametrize(("dim", "size"), [(24, 16), (32, 8), (20, 5)])
def test_other_geometries_take_the_plain_twin(dim: int, size: int) -> None:
    check_values(3, dim, size, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_take_the_plain_twin(dtype: torch.dtype) -> None:
    one = item(0, 3, 20, 4, 2, 32, dtype)
    assert torch.allclose(kernel([one], 16)[0].double(), dense(one), atol=1e-2)


@TWINS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size"), [(9, 3, 64, 16), (2, 2, 32, 32), (9, 1, 16, 16), (1, 1, 16, 16)]
)
def test_case_104_a_request_has_the_same_bits_alone_and_in_any_batch(
    attend, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, size: int
) -> None:
    shapes = [(1, 1), (1, 16), (5, 30), (1, 120), (20, 20), (1, 17), (24, 60), (2, 2), (1, 77)]
    items = [item(seed, q, c, heads, kv_heads, dim, dtype) for seed, (q, c) in enumerate(shapes)]
    alone = [attend([one], size, seed)[0] for seed, one in enumerate(items)]
    for batch in (items, items[::-1], items[3:7], items * 4):
        for one, found in zip(batch, attend(batch, size, 99), strict=True):
            index = next(i for i, known in enumerate(items) if known is one)
            assert torch.equal(found, alone[index])


@TWINS
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_104_prefill_decode_and_chunks_have_the_same_bits(attend, dtype: torch.dtype) -> None:
    whole = item(5, 50, 50, 6, 2, 32, dtype)
    mate = item(6, 1, 90, 6, 2, 32, dtype)
    wanted = attend([whole], 16)[0]
    decoded = torch.cat([attend([whole.part(p, p + 1)], 16, p)[0] for p in range(50)])
    assert torch.equal(decoded, wanted)
    for chunk in (7, 8, 33):
        parts = [attend([mate, whole.part(p, min(p + chunk, 50))], 16, p)[1] for p in range(0, 50, chunk)]
        assert torch.equal(torch.cat(parts), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 32, 512])
def test_long_contexts_are_right_and_have_the_same_bits_in_any_company(size: int, dtype: torch.dtype) -> None:
    """The kernel sums in chunks of some blocks: contexts that end before, at and behind the border of one."""
    whole = item(7, 800, 800, 6, 2, 32, dtype)
    wanted = kernel([whole], size)[0]
    assert (wanted.double() - dense(whole)).abs().max() < TOLERANCE[dtype]
    for p in (0, 15, 16, 255, 256, 257, 510, 511, 512, 513, 767, 799):
        assert torch.equal(kernel([whole.part(p, p + 1)], size, p)[0], wanted[p : p + 1])
    for start, end in ((250, 259), (500, 530), (3, 780)):
        mate = item(1, 1, 300, 6, 2, 32, dtype)
        assert torch.equal(kernel([mate, whole.part(start, end)], size)[1], wanted[start:end])


@TWINS
def test_one_thread_and_two_give_the_same_bits(attend) -> None:
    for dtype in DTYPES:
        items = [item(s, 20, 60, 9, 3, 64, dtype) for s in range(4)]
        for batch in (items, [items[0].part(0, 1)], items[:1]):
            found = []
            for count in (1, 2):
                torch.set_num_threads(count)
                found.append(torch.cat(attend(batch, 16)))
            assert torch.equal(*found)


@TWINS
def test_case_072_whatever_an_unwritten_slot_holds_cannot_reach_the_result(attend, monkeypatch) -> None:
    items = [item(s, 3, c, 4, 2, 32, torch.float32) for s, c in enumerate([3, 16, 17, 40])]
    poisoned = torch.cat(attend(items, 16))
    assert poisoned.isfinite().all()
    full = torch.full
    for filler in (torch.inf, -torch.inf, 3e38):
        monkeypatch.setattr(torch, "full", lambda shape, _, f=filler, **kw: full(shape, f, **kw))
        assert torch.equal(torch.cat(attend(items, 16)), poisoned)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an older machine of this kind")
def test_a_machine_without_the_newest_instructions_computes_the_same_function(monkeypatch) -> None:
    """The plain path of the kernels, built for any x86-64 with AVX2: other bits, the same numbers."""
    if attention.cpu.library() is None:
        pytest.skip("the kernels are switched off, or there is no compiler")
    items = [item(seed, q, c, 6, 2, 64, torch.bfloat16) for seed, (q, c) in enumerate([(1, 1), (9, 61), (1, 600)])]
    here = kernel(items, 16)
    attention.cpu._function.cache_clear()
    older = ctypes.CDLL(str(attention.cpu._build("x86-64-v3")))
    monkeypatch.setattr(attention.cpu, "library", lambda: older)
    for one, found, wanted in zip(items, kernel(items, 16), here, strict=True):
        assert (found.float() - wanted.float()).abs().max() < 2e-2
        assert (found.double() - dense(one)).abs().max() < TOLERANCE[torch.bfloat16]
    for dtype in DTYPES:
        weight, x = torch.randn(130, 96).to(dtype), torch.randn(19, 96).to(dtype)
        packed = attention.cpu.pack(weight)
        found = attention.cpu.linear(x, packed, 130)
        assert torch.allclose(found.double(), x.double() @ weight.double().t(), rtol=1e-2, atol=1e-4)
        for rows in (slice(3, 4), slice(2, 10)):
            assert torch.equal(attention.cpu.linear(x[rows], packed, 130), found[rows])
    attention.cpu._function.cache_clear()


def test_extreme_scores_stay_finite_and_right() -> None:
    one = item(3, 4, 40, 4, 2, 32, torch.float32)
    for factor in (1e-20, 50.0, 1e4):
        hot = replace(one, q=one.q * factor)
        for attend in (kernel, plain):
            assert torch.allclose(attend([hot], 16)[0].double(), dense(hot), atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forced_plain", [False, True])
def test_gradients_are_those_of_the_dense_definition(dtype: torch.dtype, forced_plain: bool, monkeypatch) -> None:
    """Two completions share a prompt's full block and copy its partial one; a third request stands alone."""
    if forced_plain:
        monkeypatch.setattr(attention.cpu, "supports", lambda *_: False)
    heads, kv_heads, dim, size = 6, 2, 16, 16
    spans = {"prompt": (20, 20), "a": (5, 25), "b": (13, 33), "alone": (17, 17)}
    generator = torch.Generator().manual_seed(1)
    leaves = {
        name: [
            torch.randn(n, h, dim, generator=generator).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)
        ]
        for name, (n, _) in spans.items()
    }
    upstream = {name: torch.randn(n, heads, dim, generator=generator) for name, (n, _) in spans.items()}

    def gradients(outs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        loss = sum((outs[name].float() * upstream[name]).sum() for name in spans)
        flat = [leaf for group in leaves.values() for leaf in group]
        return [g.float() for g in torch.autograd.grad(loss, flat)]

    def context(name: str, which: int) -> torch.Tensor:
        own = leaves[name][which]
        return torch.cat((leaves["prompt"][which], own)) if name in "ab" else own

    wanted = gradients({n: dense(Item(leaves[n][0], context(n, 1), context(n, 2))) for n in spans})

    starts = dict(zip(spans, itertools.accumulate((n for n, _ in spans.values()), initial=0), strict=False))
    slots, tokens, at = [], [], 0
    tables: dict[str, list[int]] = {}
    for name, (n, _) in spans.items():
        own = [starts["prompt"] + i for i in range(16, 20)] * (name in "ab") + [starts[name] + i for i in range(n)]
        count = -(-len(own) // size)
        tables[name] = ([0] if name in "ab" else []) + list(range(at, at + count))
        slots += range(at * size, at * size + len(own))
        tokens += own
        at += count
    placement = Placement(torch.tensor(slots), torch.tensor(tokens), at, size)
    width = max(map(len, tables.values()))
    meta = AttentionMetadata(
        block_tables=torch.tensor([tables[n] + [0] * (width - len(tables[n])) for n in spans], dtype=torch.int32),
        cu_seqlens_q=torch.tensor(
            list(itertools.accumulate((n for n, _ in spans.values()), initial=0)), dtype=torch.int32
        ),
        seq_lens=torch.tensor([length for _, length in spans.values()], dtype=torch.int32),
    )
    q, k, v = (torch.cat([leaves[n][which] for n in spans]) for which in range(3))
    out = PagedAttention.apply(q, k, v, placement, meta, dim**-0.5)
    found = gradients(dict(zip(spans, out.split([n for n, _ in spans.values()]), strict=True)))
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() < tolerance * (1 + theirs.abs().max())
