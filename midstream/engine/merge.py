"""One answer of what several ranks answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from midstream.errors import MidstreamError, from_wire, to_wire

SUMMED = frozenset(
    {
        *("running", "waiting", "held", "aborted", "reset_requests", "num_blocks", "num_free_blocks"),
        *("num_sampled_tokens", "num_reprefilled_tokens", "num_connections"),
    }
)
"""What each rank counts for itself."""
_DIGESTS = ("digests", "checksums")


def merge(results: dict[int, dict[str, Any] | MidstreamError | None]) -> dict[str, Any] | MidstreamError:
    """One answer of all ranks'. The first error, with its rank unless all say the same; else key by key: counts their
    sum, what is equal on all ranks as it is, times (…_ms, …_s) and steps the most, the rest a list by rank. Digests
    name by name, all that there are of one joined by " != "; a comparison of them matches if all do."""
    errors = {rank: result for rank, result in results.items() if isinstance(result, MidstreamError)}
    if errors:
        rank, error = next(iter(errors.items()))
        if len(errors) == len(results) and len({str(e) for e in errors.values()}) == 1:
            return error
        wire = to_wire(error)
        return from_wire(
            {**wire, "message": f"rank {rank}: {error.message}", "details": {**error.details, "rank": rank}}
        )
    values = [result for result in results.values() if isinstance(result, dict)]
    return {key: _merged(key, [value.get(key) for value in values]) for key in values[0]}


def _merged(key: str, values: Sequence[Any]) -> Any:
    if key in SUMMED and all(isinstance(value, int) for value in values):
        return sum(values)
    if all(value == values[0] for value in values):
        return values[0]
    if key in _DIGESTS and all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: " != ".join(dict.fromkeys(v[name] for v in values if name in v)) for name in names}
    if key == "match":
        return all(values)
    if key == "mismatches":
        return sorted({name for value in values for name in value})
    is_most = key.endswith(("_ms", "_s")) or key in ("num_steps", "is_paused")
    if is_most and all(isinstance(value, (int, float)) for value in values):
        return max(values)
    return list(values)


def merge_status(by_rank: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """One engine's status of all ranks': paused once all are, pausing as soon as one is. ``ranks``: what may differ."""
    statuses = list(by_rank.values())
    found = {key: _merged(key, [status[key] for status in statuses]) for key in statuses[0]}
    behind = min(statuses, key=lambda status: status["number"])  # while replicas commit, each at its own step
    found |= {key: behind[key] for key in ("number", "version", "weights_id", "exact")}
    states = {status["state"] for status in statuses}
    found["state"] = states.pop() if len(states) == 1 else "pausing"
    found["device_idle"] = all(status["device_idle"] for status in statuses)
    for key in ("mode", "paused_since", "owner", "update"):  # the first that has one
        found[key] = next((status[key] for status in statuses if status[key] is not None), None)
    own = ("state", "running", "waiting", "held", "number", "version", "num_steps", "num_free_blocks")
    return found | {"ranks": [{"rank": rank} | {key: status[key] for key in own} for rank, status in by_rank.items()]}
