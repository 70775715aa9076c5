"""Row operations: a row's bits depend on that row alone, for every number of neighbours and every place among them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from midstream.ops import layers
from midstream.ops.layers import LinearWeight, linear, rms_norm, rope, silu_and_mul

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setenv("MIDSTREAM_PACKED", "0")
    elif not layers.packing_available():
        pytest.skip("this torch has no packed products, or they are switched off")
    return bool(request.param)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows_out"), [(64, 128), (96, 64), (128, 48), (45, 33), (576, 192), (1536, 64)])
def test_case_104_a_products_row_has_the_same_bits_for_every_number_of_rows(
    width: int, rows_out: int, dtype: torch.dtype, packed: bool
) -> None:
    weight = LinearWeight(random(1, rows_out, width, dtype=dtype))
    assert (weight.packed is not None) == packed
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


def test_forced_off_the_plain_products_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_PACKED", "0")
    assert not layers.packing_available()
    monkeypatch.setattr(layers, "_pack", lambda _: pytest.fail("packed although switched off"))
    weight = LinearWeight(random(1, 32, 64))
    assert weight.packed is None and weight.plain is not None


@pytest.mark.parametrize(
    ("unstable", "wanted"),
    [
        (lambda rows: torch.zeros(rows), 0),
        (lambda rows: torch.full((rows,), float(rows)), 32),  # depends on the number of rows in the call
        (lambda rows: torch.arange(rows) // 8, 8),  # depends on the place, in steps of eight
        (lambda rows: torch.arange(rows) // 2, 1),  # on the place, in steps of two: only a row at a time is left
    ],
)
def test_the_largest_tile_that_is_row_stable_is_chosen(unstable, wanted: int, monkeypatch) -> None:
    monkeypatch.setattr(layers, "_product", lambda x, w, _: F.linear(x, w) * 0 + unstable(len(x))[:, None] * 1e-3)
    assert layers._choose_tile.__wrapped__(16, 32, torch.float32, False, 1) == wanted


@pytest.mark.parametrize("tile", [0, 32, 8, 1])
def test_every_tile_gives_the_product(tile: int) -> None:
    x, weight = random(1, 77, 32), random(2, 16, 32)
    for rows in (1, 2, 31, 32, 33, 77):
        found = layers._tiled(x[:rows], weight, False, tile)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_operations_keep_a_rows_bits(dtype: torch.dtype) -> None:
    x = random(1, 140, 4, 48, dtype=dtype)
    gain = random(2, 48, dtype=dtype)
    angles = random(3, 140, 1, 24)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    operations = [
        lambda s: rms_norm(x[s], gain, 1e-5),
        lambda s: silu_and_mul(x[s].flatten(1)),
        lambda s: rope(x[s], cos[s], sin[s]),
    ]
    for operation in operations:
        whole = operation(slice(0, 140))
        for rows in range(1, 131, 3):
            for at in (0, 3, 140 - rows):
                assert torch.equal(operation(slice(at, at + rows)), whole[at : at + rows])


def test_rope_turns_each_pair_by_its_angle() -> None:
    x, angle = random(1, 5, 2, 8), random(2, 5, 1, 4)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    assert torch.allclose(rope(x, angle.cos(), angle.sin()), torch.cat((pairs.real, pairs.imag), -1), atol=1e-6)


def test_case_117_few_sizes_of_products_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps code for every shape: 20 MB more with each thousand requests, until 1024 of them were seen."""
    sizes = [layers._size(rows) for rows in range(1, 8193)]
    assert all(rows <= size <= rows * 9 / 8 for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 90 and {16, 32, 64, 128, 1024} <= set(sizes)
    seen = set()
    monkeypatch.setattr(layers, "_product", lambda x, w, packed: seen.add(x.shape[0]) or F.linear(x, w))
    for rows in range(1, 300):
        assert layers._tiled(torch.ones(rows, 4), torch.ones(3, 4), True, 0).shape == (rows, 3)
    assert len(seen) < 60
