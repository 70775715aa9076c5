"""The C++ kernels: built once with the machine's compiler, cached by source and flags, called through ctypes.

There is no binding layer: the kernels are C functions over pointers, ctypes releases the GIL around each call, and
the build takes seconds because no torch header is read. ``python -m midstream.ops.cpu`` builds ahead of time. The
functions here have the contracts of their twins in ``ops.reference``; whoever calls them has asked :func:`supports`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import mmap
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from midstream.ops.attention import AttentionMetadata
    from midstream.ops.layers import Rope

_HERE = pathlib.Path(__file__).parent
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_BUILD_TIMEOUT_S = 180

ROW = np.dtype(
    [(name, np.float32) for name in ("temperature", "top_p", "log_min_p", "uniform")]
    + [(name, np.int32) for name in ("top_k", "greedy", "num_top", "top_of_processed", "wants_rank")]
)
"""How to draw from one row of logits: ``struct Row`` of sampling.cpp."""
DRAWN = np.dtype(
    [(name, np.float32) for name in ("raw", "processed", "least", "temperature")]
    + [(name, np.int32) for name in ("last", "token", "rank")]
)
"""What came of it: ``struct Drawn``."""


def _cache_dir() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(root) / "midstream"


def _cpu_identity() -> str:
    """-march=native code must not be reused on another CPU that shares the cache directory."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("flags"):
                return line
    return platform.processor()


def _build(machine: str = "native") -> pathlib.Path:
    """The library for ``machine`` (the compiler's -march), made unless it stands in the cache."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler (g++ or clang++) found")
    flags = ["-O3", f"-march={machine}", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi"]
    sources = sorted(_HERE.glob("*.cpp"))
    content = b"".join(path.read_bytes() for path in (*sources, *sorted(_HERE.glob("*.h"))))
    key = hashlib.sha256(content + " ".join([compiler, *flags, _cpu_identity()]).encode()).hexdigest()[:20]
    target = _cache_dir() / f"kernels-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # torch brings its own OpenMP runtime; linking that one keeps a single thread pool in the process.
    runtime = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*"))
    link = [runtime[0], f"-Wl,-rpath,{os.path.dirname(runtime[0])}"] if runtime else ["-fopenmp"]
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        objects = [f"{work}/{path.stem}.o" for path in sources]
        compiling = [[compiler, *flags, "-c", str(p), "-o", o] for p, o in zip(sources, objects, strict=True)]
        for command in (*compiling, [compiler, "-shared", *objects, "-o", f"{work}/kernels.so", *link]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
            if done.returncode:
                raise OSError(f"{' '.join(command)} failed:\n{done.stderr.strip()[:2000]}")
        os.replace(f"{work}/kernels.so", target)
    return target


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None (said once, with the reason) where they cannot be built or are switched off."""
    if os.environ.get("MIDSTREAM_KERNELS") == "reference":
        return None
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, subprocess.TimeoutExpired) as error:
        warnings.warn(f"midstream runs on the reference kernels (slower): {error}", stacklevel=2)
        return None


def supports(tensor: torch.Tensor, *sizes: int) -> bool:
    """Whether the kernels serve this dtype and device, and ``sizes``: multiples of sixteen lanes."""
    if not tensor.is_cpu or tensor.dtype not in _SUFFIX or library() is None:
        return False
    for size in sizes:  # noqa: SIM110  (this runs six times a layer: a generator would be half of it)
        if size % 16:
            return False
    return True


@functools.cache
def _function(name: str, dtype: torch.dtype, kinds: str) -> Any:
    """``kinds``: a letter for each argument: p pointer, l int64, i int, f float. The threads come last."""
    lib = library()
    assert lib is not None
    function = getattr(lib, f"midstream_{name}_{_SUFFIX[dtype]}")
    of = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
    function.argtypes = [of[kind] for kind in kinds] + [ctypes.c_int]
    function.restype = None
    return function


def _pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    found: list[int | None] = []
    for t in tensors:
        assert t is None or t.is_contiguous()
        found.append(None if t is None else t.data_ptr())
    return found


_MADV_HUGEPAGE = 14


def want_huge_pages(*tensors: torch.Tensor) -> None:
    """Ask the system for large pages, before the first touch: scattered blocks then cost fewer address look-ups."""
    with contextlib.suppress(OSError, AttributeError):
        for tensor in tensors:
            start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = max(tensor.data_ptr() + tensor.nbytes - start, 0)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)


# -- layers ------------------------------------------------------------------------------------------------------------


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of ``ops.layers.add_rms_norm``."""
    out = torch.empty_like(x)
    total = x if y is None else torch.empty_like(x)
    width = x.shape[-1]
    _function("add_rms_norm", x.dtype, "ppppplif")(
        *_pointers(out, total, x, y, weight), x.numel() // width, width, eps, torch.get_num_threads()
    )
    return total, out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Contract of ``ops.layers.silu_and_mul``."""
    rows, width = x.shape
    out = x.new_empty(rows, width // 2)
    _function("silu_and_mul", x.dtype, "ppli")(*_pointers(out, x), rows, width // 2, torch.get_num_threads())
    return out


def silu_and_mul_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of x [T, 2N] from that of the output [T, N]."""
    rows, width = grad.shape
    out = torch.empty_like(x)
    _function("silu_and_mul_backward", x.dtype, "pppli")(
        *_pointers(out, grad, x), rows, width, torch.get_num_threads()
    )
    return out


def split_rope(
    qkv: torch.Tensor,
    rope: Rope,
    positions: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contract of ``ops.layers.split_rope``."""
    rows, num_heads, num_kv_heads = len(qkv), rope.num_heads, rope.num_kv_heads
    size = 2 * rope.cos.shape[1]
    q = qkv.new_empty(rows, num_heads, size)
    k, v = (qkv.new_empty(rows, num_kv_heads, size) for _ in range(2))
    _function("split_rope", qkv.dtype, "ppppppppp" + "liiif")(
        *_pointers(q, k, v, qkv, positions, rope.cos, rope.sin, q_norm, k_norm),
        *(rows, num_heads, num_kv_heads, size, rope.eps),
        torch.get_num_threads(),
    )
    return q, k, v


def split_rope_backward(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, rope: Rope, positions: torch.Tensor
) -> torch.Tensor:
    """Gradient of qkv from those of q, k and v, as if there were no norms."""
    rows, num_heads, size = dq.shape
    num_kv_heads = dk.shape[1]
    out = dq.new_empty(rows, (num_heads + 2 * num_kv_heads) * size)
    _function("split_rope_backward", dq.dtype, "ppppppp" + "liii")(
        *_pointers(out, dq, dk, dv, positions, rope.cos, rope.sin),
        *(rows, num_heads, num_kv_heads, size),
        torch.get_num_threads(),
    )
    return out


_PANEL = 48
"""Outputs that stand side by side in a packed weight: ``WIDTH`` of linear.cpp."""


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] in the layout of :func:`linear`: [panels, K / P, 48, P], bf16 pairs as one int32."""
    n = weight.shape[0]
    whole = torch.nn.functional.pad(weight, (0, 0, 0, -n % _PANEL)).contiguous()
    lanes = whole.view(torch.int32) if whole.dtype == torch.bfloat16 else whole
    return lanes.view(-1, _PANEL, lanes.shape[1]).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [n, K] that :func:`pack` was given."""
    return packed.transpose(1, 2).contiguous().view(dtype).flatten(0, 1)[:n]


def linear(x: torch.Tensor, packed: torch.Tensor, n: int) -> torch.Tensor:
    """Contract of ``ops.layers.linear`` without a bias, for a weight [n, K] that is packed."""
    rows, width = x.shape
    out = x.new_empty(rows, n)
    _function("linear", x.dtype, "ppplli")(*_pointers(out, x, packed), rows, n, width, torch.get_num_threads())
    return out


# -- attention ---------------------------------------------------------------------------------------------------------


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Contract of ``ops.attention.paged_attention``; every tensor contiguous, tables int32."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size = key_cache.shape
    out = torch.empty_like(q)
    _function("paged_attention", q.dtype, "ppppppp" + "iiiiiif")(
        *_pointers(out, q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens),
        *(seq_lens.shape[0], block_tables.shape[1], num_heads, num_kv_heads, head_dim, block_size),
        scale,
        torch.get_num_threads(),
    )
    return out


LAYER = ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "post_norm", "gate_up", "down")
"""The weights of a decoder layer, as :func:`decode` wants them: linear ones packed, None where there is no such."""


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in LAYER]


def layer_table(layers: Sequence[Sequence[torch.Tensor | None]]) -> ctypes.Array[_Layer]:
    """What :func:`decode` reads; the tensors, in the order of ``LAYER``, must outlive it."""
    return (_Layer * len(layers))(*(_Layer(*_pointers(*tensors)) for tensors in layers))


def decode(
    x: torch.Tensor,
    layers: ctypes.Array[_Layer],
    inner: int,
    norm: torch.Tensor,
    rope: Rope,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Contract of ``Llama.serve`` from the embeddings x [T, D] on, which are overwritten. ``inner``: of the MLP."""
    m, (rows, width), num_heads, num_kv_heads = metadata, x.shape, rope.num_heads, rope.num_kv_heads
    size = 2 * rope.cos.shape[1]
    qkv, heads = (num_heads + 2 * num_kv_heads) * size, num_heads * size
    out, scratch = torch.empty_like(x), x.new_empty(rows * (width + max(qkv, 2 * inner) + max(heads, inner) + qkv))
    tables = (m.slot_mapping, m.block_tables, m.cu_seqlens_q, m.seq_lens)
    _function("decode", x.dtype, "pppppppppppppp" + "lliiiiiiiiiff")(
        *_pointers(out, x, scratch),
        ctypes.addressof(layers),
        *_pointers(norm, key_cache, value_cache, positions, rope.cos, rope.sin, *tables),
        *(key_cache[0].numel(), rows, len(layers), len(m.seq_lens), m.block_tables.shape[1]),
        *(width, inner, num_heads, num_kv_heads, size, key_cache.shape[4], scale, rope.eps),
        torch.get_num_threads(),
    )
    return out


def paged_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contract of ``ops.reference.paged_attention_backward``."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    grads = (
        torch.empty_like(q, dtype=torch.float32),
        torch.zeros_like(keys, dtype=torch.float32),
        torch.zeros_like(values, dtype=torch.float32),
    )
    _function("paged_attention_backward", q.dtype, "ppp" + "ppppppp" + "iiiiiif")(
        *_pointers(*grads, grad, q, keys, values, block_tables, cu_seqlens_q, seq_lens),
        *(seq_lens.shape[0], block_tables.shape[1], num_heads, num_kv_heads, head_dim, block_size),
        scale,
        torch.get_num_threads(),
    )
    return grads


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Contract of ``ops.attention.write_kv``."""
    tokens, num_kv_heads, head_dim = key.shape
    _function("write_kv", key.dtype, "ppppp" + "iiii")(
        *_pointers(key_cache, value_cache, key, value, slot_mapping),
        *(tokens, num_kv_heads, head_dim, key_cache.shape[3]),
        torch.get_num_threads(),
    )


# -- sampling ----------------------------------------------------------------------------------------------------------


def sample(
    logits: torch.Tensor, raw_logits: torch.Tensor, rows: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """One token for each row of logits [R, V]: what was drawn (``DRAWN``), then the ids [R, n] and logprobs [R, n] of
    the most likely tokens (-1: there is none). ``rows`` (``ROW``) says how; raw logprobs are of ``raw_logits``."""
    num_rows, vocab = logits.shape
    drawn = np.empty(num_rows, DRAWN)
    max_top = int(rows["num_top"].max(initial=0))
    ids = np.full((num_rows, max_top), -1, np.int32)
    logprobs = np.zeros((num_rows, max_top), np.float32)
    _function("sample", logits.dtype, "pppppp" + "iii")(
        drawn.ctypes.data,
        ids.ctypes.data,
        logprobs.ctypes.data,
        *_pointers(logits, raw_logits),
        rows.ctypes.data,
        num_rows,
        vocab,
        max_top,
        torch.get_num_threads(),
    )
    return drawn, ids, logprobs


def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, rows: np.ndarray[Any, Any]
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Logprob [R] of ids [R] under each row's distribution; and what :func:`logprobs_backward` needs of it."""
    count, vocab = logits.shape
    out = torch.empty(count)
    kept, sums = torch.empty(count, 3), torch.empty(count, dtype=torch.float64)
    _function("logprobs", logits.dtype, "pppppp" + "ii")(
        *_pointers(out, kept, sums, logits, ids), rows.ctypes.data, count, vocab, torch.get_num_threads()
    )
    return out, (kept, sums)


def logprobs_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    rows: np.ndarray[Any, Any],
    kept: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Gradient of the logits [R, V] from that of the logprobs [R]."""
    out = torch.empty_like(logits)
    _function("logprobs_backward", logits.dtype, "ppppppp" + "ii")(
        *_pointers(out, grad, *kept, logits, ids), rows.ctypes.data, *logits.shape, torch.get_num_threads()
    )
    return out
