"""What holds for the engine, as its ranks have said it: what they are to be again after a loss, and who serves now."""

from __future__ import annotations

from typing import Any

from midstream.errors import Conflict, NotReady
from midstream.types import RequestIncrement


class Held:
    """Pure logic. All ranks start; then some may be lost, and start again beside the others, or all do."""

    def __init__(self) -> None:
        self.is_serving = False
        """All ranks have started; some may be lost since."""
        self.why: dict[int, tuple[str, str]] = {}
        """Of ranks that take no requests: the state, and the reason."""
        self.pending: str | None = None
        """Why no rank takes requests though they run."""
        self.status: dict[str, Any] = {}
        self.version: dict[str, Any] = {}
        """number, version (the label), weights_id."""
        self.pause: dict[str, Any] | None = None
        """Arguments of the pause that holds."""
        self.tokenizer: dict[str, Any] | None = None
        """Arguments that brought the grammars' tokenizer."""

    def start(self, status: dict[str, Any]) -> None:
        """All ranks have started for the first time."""
        self.status, self.is_serving = status, True
        self.version = {key: status[key] for key in ("number", "version", "weights_id")}

    def check_started(self) -> None:
        """Raises NotReady while all ranks are started again."""
        if not self.is_serving and self.why:
            raise NotReady(f"the engine is started again: {next(iter(self.why.values()))[1]}; try again later")

    def check_serving(self) -> None:
        """Raises NotReady while no rank takes requests."""
        self.check_started()
        if self.pending is not None:
            raise NotReady(self.pending)

    def check_call(self, verb: str) -> None:
        """Raises NotReady, or Conflict where nothing is there that it could be about."""
        self.check_started()
        if self.pending is not None and verb == "update_weight_version":
            raise Conflict(f"there are no weights that could have a label: {self.pending}")

    def remember(self, verb: str, arguments: dict[str, Any], result: dict[str, Any]) -> None:
        """What holds after this call."""
        if verb == "status":
            self.status = result
        elif verb == "pause_generation":
            self.pause = {name: value for name, value in arguments.items() if name != "timeout_s"}
        elif verb == "resume_generation":
            self.pause = None
        elif verb == "load_grammar_tokenizer":
            self.tokenizer = arguments
        if self.version.keys() <= result.keys():
            is_commit = result["number"] > self.version["number"]
            if is_commit:
                self.pending = None
            if is_commit or verb in ("finish_weight_update", "update_weights"):
                self.version = {key: result[key] for key in self.version}
            elif verb == "update_weight_version":
                self.version["version"] = result["version"]

    def note_numbers(self, increments: list[RequestIncrement]) -> None:
        """A number that clients have seen is never used again, also where the answer of its commit was lost."""
        for increment in increments:
            last = increment.weight_versions[-1] if increment.weight_versions else None
            if last is not None and last.number > self.version.get("number", last.number):
                self.version = {"number": last.number, "version": last.version, "weights_id": ""}

    @property
    def last_status(self) -> dict[str, Any]:
        """With what holds since; while the ranks can not be asked."""
        held = {} if self.is_serving else {"state": "starting", **(self.pause or {})}
        return {**self.status, **held, **self.version}

    def described(self, status: dict[str, Any], num_ranks: int) -> dict[str, Any]:
        """``status`` of several ranks with those that do not serve, and why."""
        is_pending = self.pending is not None and self.is_serving
        if is_pending:
            status = {**status, "state": "pending_weights", "why": self.pending, **self.version}
        by_rank = {rank: {"rank": rank, "state": "starting", "why": "it joins"} for rank in range(num_ranks)}
        by_rank |= {entry["rank"]: entry for entry in status["ranks"]}
        if is_pending:
            waits = {"state": "pending_weights", "why": self.pending}
            by_rank = {rank: {**entry, **waits} for rank, entry in by_rank.items()}
        by_rank |= {rank: {"rank": rank, "state": state, "why": why} for rank, (state, why) in self.why.items()}
        return {**status, "ranks": [by_rank[rank] for rank in sorted(by_rank)]}
