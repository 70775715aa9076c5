"""Row operations: a row's bits depend on that row alone, for every number of neighbours and every place among them."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from midstream.ops import cpu, layers, reference
from midstream.ops.layers import LinearWeight, Rope, add_rms_norm, linear, silu_and_mul, split_rope

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(cpu, "library", lambda: None)
    elif cpu.library() is None:
        pytest.skip("there are no kernels, or they are switched off")
    return bool(request.param)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows_out"), [(64, 128), (96, 64), (128, 48), (45, 33), (576, 192), (1536, 64)])
def test_case_104_a_products_row_has_the_same_bits_for_every_number_of_rows(
    width: int, rows_out: int, dtype: torch.dtype, packed: bool
) -> None:
    weight = LinearWeight(random(1, rows_out, width, dtype=dtype))
    assert (weight.packed is not None) == (packed and width % 16 == 0)
    x = random(2, 140, width, dtype=dtype)
    whole = linear(x, weight)
    assert torch.allclose(whole.double(), x.double() @ weight.dense().double().t(), rtol=2e-2, atol=0.5)
    for rows in range(1, 131):
        for at in (0, 3, 140 - rows):
            found = linear(x[at : at + rows], weight)
            assert torch.equal(found, whole[at : at + rows]), (rows, at)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_batches_and_two_threads_keep_the_bits(dtype: torch.dtype, packed: bool, monkeypatch) -> None:
    weight = LinearWeight(random(1, 48, 64, dtype=dtype))
    x = random(2, 8193, 64, dtype=dtype)
    wanted = torch.cat([linear(part, weight) for part in x.split(100)])
    assert torch.equal(linear(x, weight), wanted)  # more than one slice, the last of a single row
    assert torch.equal(linear(x[:1000], weight), wanted[:1000])
    torch.set_num_threads(2)
    again = LinearWeight(weight.dense())
    assert again.tile == weight.tile
    assert torch.equal(linear(x[:700], again), wanted[:700])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_as_good_as_copies(dtype: torch.dtype, packed: bool) -> None:
    weight = LinearWeight(random(1, 32, 64, dtype=dtype))
    x = random(2, 20, 128, dtype=dtype)
    assert torch.equal(linear(x[:, :64], weight), linear(x[:, :64].contiguous(), weight))
    assert torch.equal(linear(x[::2, 64:], weight), linear(x[::2, 64:].contiguous(), weight))
    assert torch.equal(linear(x[0:1, :64], weight), linear(x[:, :64].contiguous(), weight)[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 45), (160, 64), (257, 96)])
def test_dense_gives_the_weight_back_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype, packed: bool) -> None:
    plain = random(3, *shape, dtype=dtype)
    plain[0, 0] = -0.0
    kept = plain.clone()
    for keep in (False, True):
        assert LinearWeight(plain, keep).dense().view(torch.uint8).equal(kept.view(torch.uint8))


def test_a_packed_weight_does_not_alias_what_it_was_made_of(packed: bool) -> None:
    if not packed:
        pytest.skip("the plain form holds the tensor given, by contract")
    plain = random(3, 32, 64)
    weight = LinearWeight(plain)
    before = weight.dense().clone()
    plain.zero_()
    assert torch.equal(weight.dense(), before)


@pytest.mark.parametrize(
    ("unstable", "wanted"),
    [
        (lambda rows: torch.zeros(rows), 0),
        (lambda rows: torch.full((rows,), float(rows == 1)), -1),  # only a row alone is different
        (lambda rows: torch.full((rows,), float(rows)), 32),  # depends on the number of rows in the call
        (lambda rows: torch.arange(rows) // 8, 8),  # depends on the place, in steps of eight
        (lambda rows: torch.arange(rows) // 2, 1),  # on the place, in steps of two: only a row at a time is left
    ],
)
def test_the_largest_tile_that_is_row_stable_is_chosen(unstable, wanted: int, monkeypatch) -> None:
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: linear(x, w) * 0 + unstable(len(x))[:, None] * 1e-3)
    assert layers._choose_tile.__wrapped__(16, 32, torch.float32, 1) == wanted


@pytest.mark.parametrize("width", [63, 96])
def test_another_order_of_additions_is_found_though_bf16_hides_it(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that sums a single row from the other end: nearly always the same bf16, and not always."""

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        terms = (x.float().unsqueeze(1) * w.float()).unbind(-1)
        return functools.reduce(torch.add, terms[::-1] if len(x) == 1 else terms).to(x.dtype)

    monkeypatch.setattr(F, "linear", product)
    assert layers._choose_tile.__wrapped__(8, width, torch.bfloat16, 1) == layers.PAIRED


@pytest.mark.parametrize("tile", [0, -1, 32, 8, 1])
def test_every_tile_gives_the_product(tile: int) -> None:
    x, weight = random(1, 77, 32), random(2, 16, 32)
    for rows in (1, 2, 31, 32, 33, 77):
        found = reference.linear(x[:rows], weight, tile)
        assert found.shape == (rows, 16)
        assert torch.allclose(found, F.linear(x[:rows], weight), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_a_plain_product(dtype: torch.dtype, packed: bool) -> None:
    for with_bias in (False, True):
        grads = []
        for ours in (True, False):
            x = random(1, 7, 64, dtype=dtype).requires_grad_()
            w = random(2, 48, 64, dtype=dtype).requires_grad_()
            b = random(3, 48, dtype=dtype).requires_grad_() if with_bias else None
            y = linear(x, LinearWeight(w, keep_plain=True), b) if ours else F.linear(x, w, b)
            (y.float() * random(4, 7, 48)).sum().backward()
            grads.append([t.grad.float() for t in (x, w, b) if t is not None])
        for found, wanted in zip(*grads, strict=True):
            assert torch.allclose(
                found,
                wanted,
                rtol=2e-2 if dtype is torch.bfloat16 else 1e-5,
                atol=1e-4 if dtype is torch.float32 else 0.2,
            )


def test_the_forward_has_the_same_bits_with_and_without_gradients(packed: bool) -> None:
    w = random(2, 48, 64)
    with torch.inference_mode():
        served = linear(random(1, 7, 64), LinearWeight(w))
    trained = linear(random(1, 7, 64), LinearWeight(w.clone().requires_grad_(), keep_plain=True))
    assert trained.requires_grad and torch.equal(trained.detach(), served)


# -- row operations: the kernels, the plain twins, a float64 definition -----------------------------------------------


@pytest.fixture(params=["kernels", "reference"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(cpu, "supports", lambda *_: False)
    elif cpu.library() is None:
        pytest.skip("the kernels are switched off, or there is no compiler")
    return str(request.param)


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype is torch.float32 else 1e-2


def rope_of(heads: int, kv_heads: int, dim: int) -> Rope:
    angles = torch.outer(torch.arange(200.0), 1 / 100.0 ** (torch.arange(0, dim, 2) / dim))
    return Rope(heads, kv_heads, angles.cos(), angles.sin(), 1e-5)


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()


def rope64(x: torch.Tensor, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = torch.complex(rope.cos[positions], rope.sin[positions]).to(torch.complex128)[:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * angle
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 45, 576])
def test_add_rms_norm_is_its_definition(width: int, dtype: torch.dtype, twin: str) -> None:
    x, y, weight = (random(i, 37, width, dtype=dtype) for i in range(3))
    total, out = add_rms_norm(x, y, weight[0], 1e-5)
    assert torch.equal(total, x + y) and out.dtype == dtype
    assert torch.allclose(out.double(), norm64(x + y, weight[0]), atol=tolerance(dtype), rtol=tolerance(dtype))
    same, alone = add_rms_norm(x + y, None, weight[0], 1e-5)
    assert torch.equal(same, total) and torch.equal(alone, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 40, 1536])
def test_silu_and_mul_is_its_definition(width: int, dtype: torch.dtype, twin: str) -> None:
    x = random(1, 29, 2 * width, dtype=dtype) * 8
    x[0, :4] = torch.tensor([0.0, -200.0, 200.0, -0.0])
    gate, up = x.double().chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up
    assert torch.allclose(silu_and_mul(x).double(), wanted, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (2, 2, 32), (4, 1, 128), (2, 1, 16), (3, 1, 24)])
def test_split_rope_is_its_definition(
    heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype, twin: str
) -> None:
    """Each pair of a head is a complex number, turned by its angle; the norms of Qwen3 come first."""
    rope, positions = rope_of(heads, kv_heads, dim), torch.arange(31) * 5
    qkv = random(1, 31, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = [random(2, dim, dtype=dtype), random(3, dim, dtype=dtype)] if normed else [None, None]
    found = split_rope(qkv, rope, positions, *norms)
    q, k, v = qkv.view(31, -1, dim).split((heads, kv_heads, kv_heads), 1)
    assert torch.equal(found[2], v)
    for ours, x, weight in zip(found, (q, k), norms, strict=False):
        wanted = rope64(x if weight is None else norm64(x, weight), rope, positions)
        assert torch.allclose(ours.double(), wanted, atol=4 * tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_104_row_operations_keep_a_rows_bits(dtype: torch.dtype, twin: str) -> None:
    """Whatever the neighbours, and with one thread or two."""
    x, y = random(1, 300, 576, dtype=dtype), random(2, 300, 576, dtype=dtype)
    gain, head_gain = random(3, 576, dtype=dtype), random(4, 64, dtype=dtype)
    wide, qkv = random(5, 300, 384, dtype=dtype), random(6, 300, 15 * 64, dtype=dtype)
    positions = torch.arange(300) % 200
    rope = rope_of(9, 3, 64)
    operations = [
        lambda s: torch.cat(add_rms_norm(x[s], y[s], gain, 1e-5), 1),
        lambda s: silu_and_mul(wide[s]),
        lambda s: torch.cat([t.flatten(1) for t in split_rope(qkv[s], rope, positions[s])], 1),
        lambda s: torch.cat(
            [t.flatten(1) for t in split_rope(qkv[s], rope, positions[s], head_gain, head_gain)], 1
        ),
    ]
    for operation in operations:
        whole = operation(slice(0, 300))
        for rows in (*range(1, 131, 7), 299):
            for at in (0, 1):
                assert torch.equal(operation(slice(at, at + rows)), whole[at : at + rows])
        torch.set_num_threads(2)
        assert torch.equal(operation(slice(0, 300)), whole)
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_gradients_of_row_operations_are_those_of_their_definitions(
    normed: bool, dtype: torch.dtype, twin: str
) -> None:
    """A residual stream through every operation, against the same in float64; and the forward's bits stay."""
    rope, positions = rope_of(2, 1, 32), torch.arange(7) * 3
    leaves = {
        "x": random(1, 7, 128, dtype=dtype),
        "y": random(2, 7, 128, dtype=dtype),
        "first": random(3, 128, dtype=dtype),
        "second": random(4, 128, dtype=dtype),
        "q_norm": random(5, 32, dtype=dtype),
        "k_norm": random(6, 32, dtype=dtype),
    }
    up = [random(7 + i, *shape) for i, shape in enumerate([(7, 2, 32), (7, 1, 32), (7, 1, 32), (7, 64), (7, 128)])]

    def ours(t: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        x, h = add_rms_norm(t["x"], None, t["first"], 1e-5)
        q, k, v = split_rope(h, rope, positions, *((t["q_norm"], t["k_norm"]) if normed else ()))
        total, out = add_rms_norm(x, t["y"], t["second"], 1e-5)
        return [q, k, v, silu_and_mul(out), total]

    def definition(t: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        q, k, v = norm64(t["x"], t["first"]).view(7, 4, 32).split((2, 1, 1), 1)
        if normed:
            q, k = norm64(q, t["q_norm"]), norm64(k, t["k_norm"])
        total = t["x"] + t["y"]
        gate, value = norm64(total, t["second"]).chunk(2, -1)
        silu = gate * torch.sigmoid(gate) * value
        return [rope64(q, rope, positions), rope64(k, rope, positions), v, silu, total]

    grads = []
    for function, kind in ((ours, dtype), (definition, torch.float64)):
        tensors = {name: leaf.to(kind).clone().requires_grad_() for name, leaf in leaves.items()}
        sum((part.double() * weight).sum() for part, weight in zip(function(tensors), up, strict=True)).backward()
        grads.append([t.grad.double() for name, t in tensors.items() if normed or "_norm" not in name])
    bound = 1e-5 if dtype is torch.float32 else 6e-2
    for found, wanted in zip(*grads, strict=True):
        assert (found - wanted).abs().max() < bound * (1 + wanted.abs().max())
    with torch.inference_mode():
        served = ours(leaves)
    trained = ours({name: leaf.clone().requires_grad_() for name, leaf in leaves.items()})
    assert all(torch.equal(a, b.detach()) for a, b in zip(served, trained, strict=True))
