"""Row operations of the decoder and the row-stable linear product.

Everything here gives a row the same bits whatever the other rows are. For products that is a property of the library
and of the shape, so it is tried before it is trusted: see :class:`LinearWeight`.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F


class _RMSNorm(torch.autograd.Function):
    """torch's own forward (the bits both sides get) with the backward written out: a third of the operations."""

    @staticmethod
    def forward(ctx, x, weight, eps: float):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        x32, grad32 = x.float(), grad.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + ctx.eps)
        normed = x32 * scale
        inner = grad32 * weight.float()
        grad_x = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * scale
        grad_weight = (grad32 * normed).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N] / rms(x) * weight [N] (Zhang and Sennrich 2019)."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, weight.shape, weight, eps)

_MAX_ROWS = 8192
"""Rows in one product at most; more are cut into slices."""
_TILES = (32, 8, 1)
"""Row tiles tried, in this order, where whole batches are not row-stable."""
_PROBE_ROWS = (2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 127)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2N] = gate ‖ up → silu(gate) * up [T, N]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, F] (two halves, as in Su et al. 2021, Hugging Face order).

    cos, sin [T, 1, F/2].
    """
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def packing_available() -> bool:
    """Whether torch's private oneDNN products exist here. MIDSTREAM_PACKED=0 forces the plain products."""
    return (
        os.environ.get("MIDSTREAM_PACKED") != "0"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 128)  # type: ignore[no-any-return]


def _product(x: torch.Tensor, weight: torch.Tensor, packed: bool) -> torch.Tensor:
    if packed:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight)


def _size(rows: int) -> int:
    """``rows`` rounded up by an eighth at most. oneDNN keeps code and scratch memory for each of the last 1024 shapes
    it has multiplied; batches of every size would fill that with hundreds of megabytes."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def _tiled(x: torch.Tensor, weight: torch.Tensor, packed: bool, tile: int) -> torch.Tensor:
    """The product in calls of exactly ``tile`` rows; tile 0: all rows at once, at least two and at most _MAX_ROWS."""
    rows = x.shape[0]
    if tile == 0:
        if rows <= _MAX_ROWS:
            size = max(_size(rows) if packed else rows, 2)  # one row takes another path in the library
            padded = F.pad(x, (0, 0, 0, size - rows)) if size > rows else x
            return _product(padded, weight, packed)[:rows]
        return torch.cat([_tiled(part, weight, packed, 0) for part in x.split(_MAX_ROWS)])
    padded = F.pad(x, (0, 0, 0, -rows % tile))
    return torch.cat([_product(part.contiguous(), weight, packed) for part in padded.split(tile)])[:rows]


@functools.cache
def _choose_tile(rows_out: int, width: int, dtype: torch.dtype, packed: bool, threads: int) -> int:
    """The largest tile for which a row's bits do not depend on the number or place of its neighbours.

    Tried on random numbers of this very shape, once per process (a second at most): every row of batches of many
    sizes, at two offsets, against the same row in a batch of 128. A single row per call is stable by definition.
    """
    generator = torch.Generator().manual_seed(rows_out * 1_000_003 + width)
    x = torch.randn(131, width, generator=generator).to(dtype)
    weight = torch.randn(min(rows_out, 4096), width, generator=generator).to(dtype)
    if packed:
        weight = _pack(weight)
    for tile in (0, *_TILES[:-1]):
        whole = _tiled(x, weight, packed, tile)
        if all(
            torch.equal(_tiled(x[at : at + n].clone(), weight, packed, tile), whole[at : at + n])
            for n in (1, *_PROBE_ROWS)
            for at in (0, 3)
        ):
            return tile
    return _TILES[-1]


class LinearWeight:
    """A weight [N, K] of a row-stable product, in the layout the product likes.

    ``plain`` is kept where gradients need it (the trainer) or where there is no packed form; otherwise the packed
    form is the only copy and :meth:`dense` restores it. ``plain`` may carry gradients: they reach it in its dtype.
    """

    __slots__ = ("dtype", "packed", "plain", "shape", "tile")

    def __init__(self, weight: torch.Tensor, keep_plain: bool = False) -> None:
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        use = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and packing_available()
        self.packed = _pack(weight.detach()) if use else None
        self.plain = weight if keep_plain or not use else None
        self.tile = 0
        if weight.device.type == "cpu":
            self.tile = _choose_tile(*self.shape, self.dtype, use, torch.get_num_threads())

    def dense(self) -> torch.Tensor:
        """The weight [N, K] as it was given, bit for bit (a copy where only the packed form is held)."""
        if self.plain is not None:
            return self.plain.detach()
        assert self.packed is not None
        return self.packed.to_dense()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.plain if self.packed is None else self.packed
        assert weight is not None
        return _tiled(x, weight, self.packed is not None, self.tile)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plain, weight: LinearWeight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, plain)
        return weight.product(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, plain = ctx.saved_tensors
        return grad @ plain if ctx.needs_input_grad[0] else None, grad.t() @ x, None


def linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] @ weight [N, K]^T (+ bias [N]) → [T, N]; each row's bits depend on that row alone."""
    if torch.is_grad_enabled() and weight.plain is not None and (weight.plain.requires_grad or x.requires_grad):
        y: torch.Tensor = _Linear.apply(x, weight.plain, weight)
    else:
        y = weight.product(x)
    return y if bias is None else y + bias
