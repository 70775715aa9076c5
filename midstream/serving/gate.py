"""What stands between the socket and the routes: who may call what, how large a body may be, and what is counted.

Deny by default: a path is open (health and the like), or generation (``api_key``), or else it is control
(``control_token``). A web page in a browser on this machine can reach a loopback address, so control without a token
refuses whatever carries an Origin.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Collection, Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.errors import Forbidden, MidstreamError, NotFound, TooLarge, Unauthorized
from midstream.metrics import ServerMetrics
from midstream.serving.answers import error_response
from midstream.serving.settings import ServerSettings

_log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware around one application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSettings,
        metrics: ServerMetrics,
        open_paths: Collection[str],
        generation_paths: Collection[str],
        control_paths: Collection[str],
        control_off: str | None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._open = frozenset(open_paths)
        self._generation = tuple(generation_paths)
        self._control = frozenset(control_paths)
        self._control_off = control_off

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.monotonic()
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            fault = self._fault(scope)
            if fault is not None:
                _log.warning("%s %s: %s", scope["method"], scope["path"], fault.message)
                headers = {"WWW-Authenticate": "Bearer"} if isinstance(fault, Unauthorized) else {}
                await error_response(fault, headers)(scope, receive, counted)
            else:
                await self._app(scope, self._limited(receive), counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http_requests.labels(route, str(status or "none")).inc()
            self._metrics.http_seconds.labels(route).observe(time.monotonic() - start)

    def _fault(self, scope: Scope) -> MidstreamError | None:
        path: str = scope["path"]
        headers = _headers(scope, ("authorization", "origin", "content-length"))
        limit = self._settings.max_body_bytes
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            return TooLarge(f"the body has {length} bytes, over the limit of {limit}")
        if path in self._open:
            return None
        if path in self._control or not path.startswith(self._generation):
            return self._control_fault(path, headers)
        return _token_fault(headers, self._settings.api_key, "generation needs the API key")

    def _control_fault(self, path: str, headers: dict[str, str]) -> MidstreamError | None:
        if self._control_off is not None:
            return NotFound(self._control_off if path in self._control else f"there is no {path} here")
        if self._settings.control_token is None and "origin" in headers:
            return Forbidden("control routes are not for web pages: start the server with --control-token")
        return _token_fault(headers, self._settings.control_token, "control routes need the control token")

    def _limited(self, receive: Receive) -> Receive:
        """``receive``, that counts: a chunked body says no length beforehand."""
        limit = self._settings.max_body_bytes
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise HTTPException(413, f"the body is over the limit of {limit} bytes")
            return message

        return counting


def _headers(scope: Scope, names: Iterable[str]) -> dict[str, str]:
    wanted = {name.encode(): name for name in names}
    return {wanted[key]: value.decode("latin-1") for key, value in scope["headers"] if key in wanted}


def _token_fault(headers: dict[str, str], token: str | None, needs: str) -> Unauthorized | None:
    if token is None:
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode()):
        return None
    return Unauthorized(f"{needs}: Authorization: Bearer …")
