"""EngineClient: everything a trainer or a server may ask of an engine. No torch."""

from __future__ import annotations

from typing import Any, Protocol

from midstream.types import KVPolicy, PauseMode, RequestOutput, SamplingParams


class EngineClient(Protocol):
    """Generation, pause and the weight verbs; every call is bounded and fails with one of midstream.errors.

    Implemented by ``AsyncLLM``. Names and meaning are vLLM's where it has them.
    """

    async def generate_one(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None
    ) -> RequestOutput:
        """The finished output, with its n completions. Cancelling the call aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its caller gets the partial tokens with finish reason ``abort``."""
        ...

    async def pause_generation(
        self, mode: PauseMode = "abort", clear_cache: bool = True, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Returns when no step runs any more and every output of the steps before is out.

        abort: all requests end with what they have. wait: all accepted ones finish first; ``timeout_s`` ends the
        wait with TimedOut and undoes the pause. keep: all freeze, and go on at resume.
        """
        ...

    async def resume_generation(self) -> dict[str, Any]:
        """Go on; cancels a pause in flight. {"was_paused": bool}"""
        ...

    async def is_paused(self) -> bool:
        """True from the start of a pause."""
        ...

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> dict[str, Any]: ...

    async def start_weight_update(
        self, manifest: dict[str, Any] | None = None, mode: str = "full", cast: str = "deny"
    ) -> dict[str, Any]: ...

    async def update_weights(self, request: dict[str, Any]) -> dict[str, Any]: ...

    async def finish_weight_update(
        self, weight_version: str | None = None, kv_policy: KVPolicy | None = None
    ) -> dict[str, Any]:
        """Verify, settle and commit between two steps; {updated, of, bytes, version, number, weights_id, …}"""
        ...

    async def abort_weight_update(self) -> dict[str, Any]: ...

    async def shutdown_weight_transfer_engine(self) -> dict[str, Any]: ...

    async def status(self) -> dict[str, Any]: ...
