"""EngineClient: everything a trainer or a server may ask of an engine; HTTPClient asks it over HTTP. No torch."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import uuid
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from midstream.errors import (
    Conflict,
    EngineDead,
    Forbidden,
    InvalidInput,
    MidstreamError,
    NotFound,
    TimedOut,
    TooLarge,
    Unauthorized,
    from_wire,
)
from midstream.types import (
    CompletionOutput,
    KVPolicy,
    Logprob,
    PauseMode,
    RequestOutput,
    RoutedExperts,
    SamplingParams,
    WeightVersionSpan,
)

if TYPE_CHECKING:
    import httpx


class EngineClient(Protocol):
    """Generation, pause and the weight verbs, each failing with one of midstream.errors.

    Every verb is bounded, a wait pause by its timeout_s.

    Implemented by ``AsyncLLM`` and ``HTTPClient``. Names and meaning are vLLM's where it has them.
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
        self,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float | None = None,
        owner: str | None = None,
        lease_s: float | None = None,
    ) -> dict[str, Any]:
        """Returns when no step runs any more and every output of the steps before is out.

        abort: all requests end with what they have. wait: all accepted ones finish first; ``timeout_s`` ends the
        wait with TimedOut and undoes the pause. keep: all freeze, and go on at resume. ``owner``: only it, or force,
        changes or undoes this pause. ``lease_s``: it ends by itself after so long, unless it is taken again.
        """
        ...

    async def resume_generation(self, owner: str | None = None, force: bool = False) -> dict[str, Any]:
        """Go on; cancels a pause in flight. {"was_paused": bool}. Conflict for another owner's pause."""
        ...

    async def is_paused(self) -> bool:
        """True from the start of a pause."""
        ...

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> dict[str, Any]: ...

    async def start_weight_update(
        self, manifest: dict[str, Any] | None = None, mode: str | None = None, cast: str | None = None
    ) -> dict[str, Any]:
        """``mode`` and ``cast``: by default as the engine is configured."""
        ...

    async def update_weights(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"update_info": {…}} or {"weight_dir": path}: one chunk; without a start a whole update."""
        ...

    async def finish_weight_update(
        self, weight_version: str | None = None, kv_policy: KVPolicy | None = None
    ) -> dict[str, Any]:
        """Verify, settle and commit between two steps; {updated, of, bytes, version, number, weights_id, …}"""
        ...

    async def abort_weight_update(self) -> dict[str, Any]: ...

    async def shutdown_weight_transfer_engine(self) -> dict[str, Any]: ...

    async def status(self) -> dict[str, Any]: ...


_NUM_TRIES = 4
_RETRY_DELAY_S = 0.25
_ABORT_S = 5.0
_BY_STATUS: dict[int, type[MidstreamError]] = {
    400: InvalidInput,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: InvalidInput,
    504: TimedOut,
}


class HTTPClient:
    """An EngineClient for ``midstream serve``. Belongs to one event loop; close with ``aclose()`` or ``async with``.

    Every call has a time limit. An error of the server is raised as the class it has there, with its text; ``TimedOut``
    and ``EngineDead`` say which engine and which call. A call is tried again only where that can do nothing twice:
    when no connection was made, when it only reads, and generation, whose request id is an idempotency key.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        control_url: str | None = None,
        control_token: str | None = None,
        connect_timeout_s: float = 10.0,
        timeout_s: float = 60.0,
        transfer_timeout_s: float = 1800.0,
        generate_timeout_s: float = 3600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``control_url``: where the control routes are, if not at ``base_url``. ``timeout_s``: of every call but
        generation and those that move weights. ``transport``: instead of the network, for tests."""
        import httpx  # a second of import is spared to whoever runs the engine in process

        limits = {
            "connect_timeout_s": connect_timeout_s,
            "timeout_s": timeout_s,
            "transfer_timeout_s": transfer_timeout_s,
            "generate_timeout_s": generate_timeout_s,
        }
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise InvalidInput(f"{name} must be a positive number, got {value!r}")
        for url in (base_url, control_url):
            if url is not None and not url.startswith(("http://", "https://")):
                raise InvalidInput(f"an engine's address starts with http:// or https://, got {url!r}")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.control_url = (control_url or self.base_url).rstrip("/")
        self._api_key = api_key
        self._control_token = control_token
        self._timeout_s = timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=connect_timeout_s),  # the whole call has its own limit
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # an engine is not behind the user's proxy
            transport=transport,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> HTTPClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- generation --------------------------------------------------------------------------------------------

    async def generate_one(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None, cache_salt: str = ""
    ) -> RequestOutput:
        """The finished output. If the connection breaks, the same request is taken up again where it runs."""
        request_id = request_id or uuid.uuid4().hex
        body = {
            "token_ids": list(prompt_token_ids),
            "request_id": request_id,
            "cache_salt": cache_salt or None,
            "return_details": True,
            "sampling_params": _sampling_fields(params),
        }
        try:
            found = await self._call(
                "POST", "/inference/v1/generate", self._generate_timeout_s, body, is_control=False, is_repeatable=True
            )
        except (asyncio.CancelledError, TimedOut):
            with contextlib.suppress(MidstreamError, TimeoutError):  # or it ends by itself, when nobody reads it
                async with asyncio.timeout(_ABORT_S):
                    await self.abort(request_id)
            raise
        return _request_output(found, list(prompt_token_ids), params)

    async def abort(self, request_id: str) -> None:
        await self.abort_requests([request_id])

    async def abort_requests(self, request_ids: list[str] | None = None) -> dict[str, Any]:
        return await self._post("/abort_requests", {"request_ids": request_ids})

    # -- pause -------------------------------------------------------------------------------------------------

    async def pause_generation(
        self,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float | None = None,
        owner: str | None = None,
        lease_s: float | None = None,
    ) -> dict[str, Any]:
        limit_s = self._timeout_s
        if mode == "wait":
            limit_s = self._generate_timeout_s if timeout_s is None else timeout_s + self._timeout_s
        options = {"mode": mode, "clear_cache": clear_cache, "timeout_s": timeout_s, "owner": owner, "lease_s": lease_s}
        return await self._post("/pause", None, limit_s, options)

    async def resume_generation(self, owner: str | None = None, force: bool = False) -> dict[str, Any]:
        return await self._post("/resume", None, None, {"owner": owner, "force": force})

    async def is_paused(self) -> bool:
        return bool((await self._get("/is_paused"))["is_paused"])

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> dict[str, Any]:
        limit_s = self._generate_timeout_s if mode == "wait" else None
        return await self._post("/sleep", None, limit_s, {"level": level, "mode": mode})

    async def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        return await self._post("/wake_up", None, None, {"tags": tags})

    async def is_sleeping(self) -> bool:
        return bool((await self._get("/is_sleeping"))["is_sleeping"])

    # -- weights -----------------------------------------------------------------------------------------------

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self._post("/init_weight_transfer_engine", request, self._transfer_timeout_s)

    async def start_weight_update(
        self, manifest: dict[str, Any] | None = None, mode: str | None = None, cast: str | None = None
    ) -> dict[str, Any]:
        return await self._post("/start_weight_update", {"manifest": manifest, "mode": mode, "cast": cast})

    async def update_weights(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self._post("/update_weights", request, self._transfer_timeout_s)

    async def finish_weight_update(
        self, weight_version: str | None = None, kv_policy: KVPolicy | None = None
    ) -> dict[str, Any]:
        body = {"weight_version": weight_version, "kv_policy": kv_policy}
        return await self._post("/finish_weight_update", body, self._transfer_timeout_s)

    async def abort_weight_update(self) -> dict[str, Any]:
        return await self._post("/abort_weight_update")

    async def shutdown_weight_transfer_engine(self) -> dict[str, Any]:
        return await self._post("/shutdown_weight_transfer_engine")

    async def update_weight_version(self, new_version: str) -> dict[str, Any]:
        return await self._post("/update_weight_version", {"new_version": new_version})

    async def weight_checker(self, action: str, baseline: dict[str, str] | None = None) -> dict[str, Any]:
        body = {"action": action, "baseline": baseline}
        return await self._post("/weight_checker", body, self._transfer_timeout_s)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Any]:
        return await self._post("/reset_prefix_cache", None, None, {"reset_running_requests": reset_running_requests})

    # -- state -------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        return await self._get("/status")

    async def weight_info(self) -> dict[str, Any]:
        return await self._get("/weight_info")

    async def health(self) -> None:
        """Raises unless the engine lives."""
        await self._call("GET", "/health", self._timeout_s, is_control=False, is_repeatable=True)

    # -- inside ------------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, self._timeout_s, is_repeatable=True)

    async def _post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        limit_s: float | None = None,
        query: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return await self._call("POST", path, limit_s or self._timeout_s, body, query)

    async def _call(
        self,
        method: str,
        path: str,
        limit_s: float,
        body: dict[str, Any] | None = None,
        query: dict[str, Any] | None = None,
        *,
        is_control: bool = True,
        is_repeatable: bool = False,
    ) -> dict[str, Any]:
        """One call, within ``limit_s`` all tries together. ``is_repeatable``: doing it twice does it once."""
        import httpx

        url = (self.control_url if is_control else self.base_url) + path
        key = self._control_token if is_control else self._api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        given = {name: value for name, value in (query or {}).items() if value is not None}
        sent = None if body is None else {name: value for name, value in body.items() if value is not None}
        tries = 0
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    tries += 1
                    try:
                        response = await self._http.request(method, url, json=sent, params=given, headers=headers)
                        return _answer(response, url)
                    except httpx.TransportError as error:
                        not_sent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                        if tries == _NUM_TRIES or not (not_sent or is_repeatable):
                            raise self._lost(error, url, not_sent) from error
                    await asyncio.sleep(_RETRY_DELAY_S * tries)
        except TimeoutError as error:
            if isinstance(error, MidstreamError):
                raise
            raise TimedOut(f"{url}: the engine did not answer within {limit_s:g} s (waiting for the answer)") from error

    def _lost(self, error: Exception, url: str, not_sent: bool) -> MidstreamError:
        import httpx

        if isinstance(error, httpx.ConnectTimeout):
            return TimedOut(f"{url}: no connection within {self._connect_timeout_s:g} s (connecting)")
        if not_sent:
            return EngineDead(f"{url}: no engine answers there (connecting): {error}")
        return EngineDead(f"{url}: the connection broke (waiting for the answer); what it did is not known: {error}")


def _answer(response: httpx.Response, url: str) -> dict[str, Any]:
    """The body of a 2xx; anything else is raised, in the class and with the text that the server gave."""
    try:
        body = response.json() if response.content else {}
    except ValueError:
        body = None
    if response.is_success:
        if not isinstance(body, dict):
            raise MidstreamError(f"{url}: the answer is no JSON object: {response.text[:200]!r}")
        return body
    said = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    if isinstance(said, dict) and isinstance(said.get("message"), str):
        details = said.get("details")
        extra = {k: v for k, v in details.items() if k != "message"} if isinstance(details, dict) else {}
        error = from_wire({"type": str(said.get("type")), "message": said["message"], "details": extra})
    else:
        text = said if isinstance(said, str) else response.text[:500]
        error = MidstreamError(text or f"status {response.status_code} without a word")
    if type(error) is MidstreamError:  # no word of ours: the status says what kind it is
        error = _BY_STATUS.get(response.status_code, MidstreamError)(error.message, **error.details)
    error.add_note(f"from {url}, status {response.status_code}")
    raise error


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """``params`` as /inference/v1/generate takes them; what is None there stays away."""
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    for name in ("detokenize", "final_only"):  # text is not asked for, and one answer always
        del fields[name]
    fields["logprobs"] = params.logprobs or 0
    fields["stop"], fields["stop_token_ids"] = list(params.stop), list(params.stop_token_ids)
    if params.structured_outputs is not None:
        wanted = dataclasses.asdict(params.structured_outputs)
        fields["structured_outputs"] = {name: value for name, value in wanted.items() if value is not None}
    return {name: value for name, value in fields.items() if value is not None}


def _request_output(found: dict[str, Any], prompt: list[int], params: SamplingParams) -> RequestOutput:
    try:
        outputs = [_completion(choice, params) for choice in found["choices"]]
        listed = found.get("prompt_logprobs")
        prompt_logprobs = None if listed is None else [_candidates(entries) for entries in listed]
        return RequestOutput(str(found["request_id"]), None, prompt, outputs, True, prompt_logprobs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MidstreamError(f"the answer to generate is not midstream's: {type(error).__name__}: {error}") from error


def _candidates(entries: dict[str, Any] | None) -> dict[int, Logprob] | None:
    if entries is None:
        return None
    return {int(t): Logprob(e["logprob"], e.get("rank"), e.get("decoded_token")) for t, e in entries.items()}


def _routed_experts(npy: str | None, start: int) -> RoutedExperts | None:
    if npy is None:
        return None
    ids = np.load(io.BytesIO(base64.b64decode(npy)), allow_pickle=False)
    _, num_layers, top_k = ids.shape
    return RoutedExperts(start, num_layers, top_k, bytearray(ids.astype("<u2").tobytes()))


def _completion(choice: dict[str, Any], params: SamplingParams) -> CompletionOutput:
    content, details = choice["logprobs"]["content"], choice["details"]
    kept = choice.get("kv_versions")
    spans = choice["weight_versions"]
    logprobs = [
        {int(e["token_id"]): Logprob(e["logprob"], e.get("rank")) for e in (entry, *entry.get("top_logprobs", ()))}
        for entry in content
    ]
    return CompletionOutput(
        index=choice["index"],
        token_ids=choice["token_ids"],
        logprobs=None if params.logprobs is None else logprobs,
        token_logprobs=[entry["logprob"] for entry in content],
        processed_logprobs=details["processed_logprobs"],
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        weight_versions=[WeightVersionSpan(s["version"], s["number"], s["start"], s["end"]) for s in spans],
        kv_versions=None if kept is None else [(one["number"], one["start"], one["end"]) for one in kept],
        seed=choice["seed"],
        sampling_mask=choice.get("sampling_mask"),
        routed_experts=_routed_experts(choice.get("routed_experts"), params.routed_experts_prompt_start),
        num_cached_tokens=details["num_cached_tokens"],
        num_reprefilled_tokens=details["num_reprefilled_tokens"],
        num_preemptions=details["num_preemptions"],
    )
