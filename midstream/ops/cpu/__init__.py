"""The C++ kernels: built once with the machine's compiler, cached by source and flags, called through ctypes.

There is no binding layer: the kernels are C functions over pointers, ctypes releases the GIL around each call, and
the build takes two seconds because no torch header is read. ``python -m midstream.ops.cpu`` builds ahead of time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import warnings

import torch

_SOURCE = pathlib.Path(__file__).with_name("kernels.cpp")
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_BUILD_TIMEOUT_S = 180


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


def _build() -> pathlib.Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler (g++ or clang++) found")
    flags = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi"]
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join([compiler, *flags, _cpu_identity()]).encode()).hexdigest()[:20]
    target = _cache_dir() / f"kernels-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # torch brings its own OpenMP runtime; linking that one keeps a single thread pool in the process.
    runtime = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*"))
    link = [runtime[0], f"-Wl,-rpath,{os.path.dirname(runtime[0])}"] if runtime else ["-fopenmp"]
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        for command in (
            [compiler, *flags, "-c", str(_SOURCE), "-o", f"{work}/kernels.o"],
            [compiler, "-shared", f"{work}/kernels.o", "-o", f"{work}/kernels.so", *link],
        ):
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


def supports(tensor: torch.Tensor, head_dim: int, block_size: int) -> bool:
    """Whether the kernels serve this dtype, device and geometry (F and S multiples of 16)."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in _SUFFIX
        and head_dim % 16 == 0
        and block_size % 16 == 0
        and library() is not None
    )


def _function(name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    lib = library()
    assert lib is not None
    return getattr(lib, f"midstream_{name}_{_SUFFIX[dtype]}")  # type: ignore[no-any-return]


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def paged_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> None:
    """Contract of ``ops.attention.paged_attention``; every tensor contiguous, tables int32."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size = key_cache.shape
    pointers = [out, q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens]
    sizes = [seq_lens.shape[0], block_tables.shape[1], num_heads, num_kv_heads, head_dim, block_size]
    _function("paged_attention", q.dtype)(
        *map(_pointer, pointers),
        *map(ctypes.c_int, sizes),
        ctypes.c_float(scale),
        ctypes.c_int(torch.get_num_threads()),
    )


def paged_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contract of ``ops.reference.paged_attention_backward``: gradients of q and both caches, in fp32."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size = key_cache.shape
    grads = (
        torch.empty_like(q, dtype=torch.float32),
        torch.zeros_like(key_cache, dtype=torch.float32),
        torch.zeros_like(value_cache, dtype=torch.float32),
    )
    pointers = [*grads, grad, q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens]
    sizes = [seq_lens.shape[0], block_tables.shape[1], num_heads, num_kv_heads, head_dim, block_size]
    _function("paged_attention_backward", q.dtype)(
        *map(_pointer, pointers),
        *map(ctypes.c_int, sizes),
        ctypes.c_float(scale),
        ctypes.c_int(torch.get_num_threads()),
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
    pointers = [key_cache, value_cache, key, value, slot_mapping]
    sizes = [tokens, num_kv_heads, head_dim, key_cache.shape[3]]
    _function("write_kv", key.dtype)(*map(_pointer, pointers), *map(ctypes.c_int, sizes))
