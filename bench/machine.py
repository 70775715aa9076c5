"""What the machine itself says: how much of it others use while we measure, and how fast it reads memory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_TICKS = os.sysconf("SC_CLK_TCK")
QUIET = 0.05
"""Others may use this share of the cores before a measurement counts as disturbed."""


def _busy_s() -> float:
    """CPU seconds that the whole machine has worked since its start."""
    fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _own_s() -> float:
    """CPU seconds of this process and all below it, those that ended included."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        used[pid] = sum(map(int, fields[11:15])) / _TICKS
    total, queue = 0.0, [os.getpid()]
    while queue:
        pid = queue.pop()
        total += used.get(pid, 0.0)
        queue += children.get(pid, ())
    return total


class Foreign:
    """Meters the CPU that processes outside our own tree use, from construction or :meth:`start` on."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._at, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s()

    def share(self) -> float:
        """Of all cores, since the start."""
        seconds = time.perf_counter() - self._at
        foreign = _busy_s() - self._busy - (_own_s() - self._own)
        return max(foreign, 0.0) / seconds / (os.cpu_count() or 1)

    def wait_quiet(self, timeout_s: float = 15.0) -> None:
        """Return when others leave the machine alone, or after ``timeout_s``; then start."""
        end = time.perf_counter() + timeout_s
        while time.perf_counter() < end:
            self.start()
            time.sleep(0.4)
            if self.share() < QUIET / 2:
                break
        self.start()


def measured(run: Callable[..., T]) -> tuple[T, float]:
    """What ``run`` gave, and the share of the machine that others took meanwhile: the least disturbed of up to three.
    ``run`` is called with its number."""
    tries: list[tuple[T, float]] = []
    meter = Foreign()
    while len(tries) < 3 and not (tries and tries[-1][1] < QUIET):
        meter.wait_quiet()
        found = run(len(tries))
        tries.append((found, round(meter.share(), 3)))
    return min(tries, key=lambda one: one[1])


@contextlib.contextmanager
def killed_after(process: subprocess.Popen[Any], seconds: float) -> Iterator[None]:
    """Within the block ``process`` lives so long at most, so that reading from it ends too."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cpu_s(pid: int) -> float:
    """CPU seconds that process ``pid`` has used, without its children."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / _TICKS


def read_bytes_per_s(size: int = 512 << 20) -> float:
    """Bandwidth of reading memory that is in no cache, with all threads; the best of five passes."""
    block = torch.ones(size // 8, dtype=torch.int64)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        best = max(best, size / (time.perf_counter() - start))
    return best


def products_s(weights: Sequence[Any], rows: int, passes: int = 10) -> float:
    """``x @ w.T`` on ``rows`` rows for each of the packed ``weights``, nothing else; the best of ``passes``."""
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(w.dtype) for w in weights}
    best = float("inf")
    with torch.inference_mode():
        for _ in range(passes):
            start = time.perf_counter()
            for w in weights:
                w.product(inputs[w.shape[1]])
            best = min(best, time.perf_counter() - start)
    return best


def layer_weights(llm: Any) -> list[Any]:
    """What an engine in this process multiplies with in all of its layers; its head is not one of them."""
    layers = llm.core.worker.weights.layers
    return [w for layer in layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def figure(
    name: str,
    value: float,
    unit: str,
    reference: float | None = None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    of: str = "value",
    **more: Any,
) -> dict[str, Any]:
    """One line of results.jsonl. ``reference`` is the peer's value or the limit, in the same unit, from the same run;
    ``ratio`` is value / reference. ``at_least`` or ``at_most``: what is asked of the value, or of the ratio where
    ``of`` says so; ``met`` whether it is so."""
    found: dict[str, Any] = {"name": name, "value": round(value, 4), "unit": unit}
    found["reference"] = None if reference is None else round(reference, 4)
    found["ratio"] = None if reference is None else round(value / reference, 4)
    judged = value if of == "value" else value / (reference or float("nan"))
    if at_least is not None:
        found |= {"at_least": at_least, "of": of, "met": judged >= at_least}
    if at_most is not None:
        found |= {"at_most": at_most, "of": of, "met": judged <= at_most}
    return found | more
