"""Row operations of the decoder and the row-stable linear product.

Everything here gives a row the same bits whatever the other rows are. For torch's own products that is a property of
the library and of the shape, so it is tried before it is trusted: see :class:`LinearWeight`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from midstream.ops import cpu, reference


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, (x + y) / rms(x + y) * weight) for x, y [T, N], weight [N]; without y (x, x / rms(x) * weight).

    Zhang and Sennrich 2019; rms(x)^2 = mean(x^2) + eps.
    """
    if torch.is_grad_enabled():
        if y is None:  # x itself goes on: its gradient shall not pass through here
            return x, _RMSNorm.apply(x, weight, eps)
        return _AddRMSNorm.apply(x, y, weight, eps)  # type: ignore[no-any-return]
    return _add_rms_norm(x, y, weight, eps)


def _add_rms_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    twin = cpu.add_rms_norm if cpu.supports(x, x.shape[-1]) else reference.add_rms_norm
    return twin(x, y, weight, eps)


def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [..., N] and weight [N]."""
    x32, grad32 = x.float(), grad.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    normed = x32 * scale
    inner = grad32 * weight.float()
    grad_x = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * scale
    return grad_x.to(x.dtype), (grad32 * normed).flatten(0, -2).sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps: float):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _add_rms_norm(x, None, weight, eps)[1]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return *_rms_norm_backward(grad, x, weight, ctx.eps), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, weight, eps: float):  # type: ignore[no-untyped-def]
        total, out = _add_rms_norm(x, y, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx, grad_total, grad):  # type: ignore[no-untyped-def]
        total, weight = ctx.saved_tensors
        grad_x, grad_weight = _rms_norm_backward(grad, total, weight, ctx.eps)
        grad_x = grad_x + grad_total
        return grad_x, grad_x, grad_weight, None


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2N] = gate ‖ up → silu(gate) * up [T, N] (Shazeer 2020)."""
    if not cpu.supports(x, x.shape[-1] // 2):
        return reference.silu_and_mul(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _SiluAndMul.apply(x)  # type: ignore[no-any-return]
    return cpu.silu_and_mul(x)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return cpu.silu_and_mul(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return cpu.silu_and_mul_backward(grad.contiguous(), *ctx.saved_tensors)


MAX_HALF = 256
"""Half of the widest head that the kernels take."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How a fused qkv [T, (H + 2K) F] becomes q, k and v: heads, rotary tables, and the width of a norm's epsilon.

    cos, sin [positions, F/2], fp32 (Su et al. 2021; the two halves of a head rotate against each other, as in Hugging
    Face's layout).
    """

    num_heads: int
    num_kv_heads: int
    cos: torch.Tensor
    sin: torch.Tensor
    eps: float


def split_rope(
    qkv: torch.Tensor,
    rope: Rope,
    positions: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, H, F], k [T, K, F] (normalised where there are norms [F], then rotated) and v [T, K, F]; positions [T]."""
    if not cpu.supports(qkv, rope.cos.shape[1]) or rope.cos.shape[1] > MAX_HALF:
        return reference.split_rope(qkv, rope, positions, q_norm, k_norm)
    if torch.is_grad_enabled() and qkv.requires_grad:
        return _SplitRope.apply(qkv, q_norm, k_norm, rope, positions)  # type: ignore[no-any-return]
    return cpu.split_rope(qkv, rope, positions, q_norm, k_norm)


class _SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_norm, k_norm, rope: Rope, positions):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(qkv, q_norm, k_norm, positions)
        ctx.rope = rope
        return cpu.split_rope(qkv, rope, positions, q_norm, k_norm)

    @staticmethod
    def backward(ctx, dq, dk, dv):  # type: ignore[no-untyped-def]
        qkv, q_norm, k_norm, positions = ctx.saved_tensors
        rope: Rope = ctx.rope
        grad = cpu.split_rope_backward(dq.contiguous(), dk.contiguous(), dv.contiguous(), rope, positions)
        norms: list[torch.Tensor | None] = [None, None]
        if q_norm is not None:
            heads = (rope.num_heads, rope.num_kv_heads, rope.num_kv_heads)
            parts = grad.view(len(grad), sum(heads), -1).split(heads, 1)
            inputs = qkv.view(len(qkv), sum(heads), -1).split(heads, 1)
            for i, weight in enumerate((q_norm, k_norm)):
                through, norms[i] = _rms_norm_backward(parts[i], inputs[i], weight, rope.eps)
                parts[i].copy_(through)
        return grad, *norms, None, None


PAIRED = -1
_TILES = (0, PAIRED, 32, 8, 1)
"""Row tiles tried for plain products, in this order: whole batches where they are row-stable."""
_PROBE_ROWS = (2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 127)


@functools.cache
def _choose_tile(rows_out: int, width: int, dtype: torch.dtype, threads: int) -> int:
    """The largest tile for which a row's bits in ``reference.linear`` do not depend on its neighbours.

    Tried on numbers of this very shape, once per process (a second at most): every row of batches of many sizes, at two
    offsets, against the same row in a batch of 128. The terms of each sum cancel, so what is left is what the order of
    additions rounded away, and no rounding of the result hides another order. A single row per call is stable by
    definition.
    """
    generator = torch.Generator().manual_seed(rows_out * 1_000_003 + width)
    half, mirror = width // 2, torch.randperm(width // 2, generator=generator)
    x = torch.randn(131, width, generator=generator).to(dtype)
    weight = torch.randn(min(rows_out, 4096), width, generator=generator).to(dtype)
    x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, mirror], -weight[:, mirror]
    weight[:, 2 * half :] = 0
    for tile in _TILES[:-1]:
        whole = reference.linear(x, weight, tile)
        if all(
            torch.equal(reference.linear(x[at : at + n].clone(), weight, tile), whole[at : at + n])
            for n in (1, *_PROBE_ROWS)
            for at in (0, 3)
        ):
            return tile
    return _TILES[-1]


class LinearWeight:
    """A weight [N, K] of a row-stable product, in the layout the product likes.

    ``plain`` is kept where gradients need it (the trainer) or where there is no kernel for it; otherwise the packed
    form is the only copy and :meth:`dense` restores it. ``plain`` may carry gradients: they reach it in its dtype.
    """

    __slots__ = ("dtype", "packed", "plain", "shape", "tile")

    def __init__(self, weight: torch.Tensor, keep_plain: bool = False) -> None:
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        has_kernel = cpu.supports(weight, weight.shape[1])
        self.packed = cpu.pack(weight.detach()) if has_kernel else None
        self.plain = weight if keep_plain or not has_kernel else None
        self.tile = 0
        if weight.is_cpu and not has_kernel:
            self.tile = _choose_tile(*self.shape, self.dtype, torch.get_num_threads())

    def dense(self) -> torch.Tensor:
        """The weight [N, K] as it was given, bit for bit (a copy where only the packed form is held)."""
        if self.plain is not None:
            return self.plain.detach()
        assert self.packed is not None
        return cpu.unpack(self.packed, self.shape[0], self.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return cpu.linear(x.contiguous(), self.packed, self.shape[0])
        assert self.plain is not None
        return reference.linear(x, self.plain, self.tile)


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
