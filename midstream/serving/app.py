"""The HTTP application: which routes there are, who may call them, and how errors look. One engine, no globals.

create_app(llm, settings)       generation, what one can see (health, metrics, status), and control where it is safe
create_control_app(front, app)  control alone, for a listener of its own
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from midstream.errors import InvalidInput, MethodNotAllowed, MidstreamError, NotFound, TooLarge
from midstream.metrics import CONTENT_TYPE
from midstream.serving import generate, openai, rl
from midstream.serving.answers import error_response
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.frontend import Frontend
from midstream.serving.gate import Gate
from midstream.serving.settings import ServerSettings as ServerSettings
from midstream.serving.spec import describe

_log = logging.getLogger(__name__)
_OPEN_PATHS = ("/health", "/liveness", "/metrics", "/status", "/server_info", "/get_world_size", "/openapi.json")
_GENERATION_PATHS = ("/v1/", "/inference/", "/tokenize", "/detokenize")


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Generation over ``llm``, and control where ``settings`` let it be beside it.

    The application starts the engine and closes it. ``app.state.front`` is its :class:`Frontend`.
    """
    front = Frontend(llm, settings)

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await front.start()
        try:
            yield
        finally:
            await front.close()
            await llm.aclose()

    app = _application("midstream", front, life)
    app.include_router(openai.make_router(front))
    app.include_router(generate.make_router(front))
    app.include_router(_visible(front))
    control = rl.make_router(front.llm, front.jobs.engine_ids)
    if settings.control_off is None:
        app.include_router(control)
    _close(app, front, _paths(control), settings.control_off)
    return app


def create_control_app(front: Frontend) -> FastAPI:
    """The control routes of ``front``'s engine alone, and what one can see. The engine's life is the other app's."""
    app = _application("midstream control", front, None)
    control = rl.make_router(front.llm, front.jobs.engine_ids)
    app.include_router(_visible(front))
    app.include_router(control)
    _close(app, front, _paths(control), None)
    return app


def _application(title: str, front: Frontend, life: Any) -> FastAPI:
    app = FastAPI(
        title=title,
        description="An LLM inference engine for online RL.",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.front = front
    app.openapi = lambda: describe(app, front)  # type: ignore[method-assign]
    app.add_exception_handler(MidstreamError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(ValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_fault)
    return app


def _close(app: FastAPI, front: Frontend, control_paths: list[str], control_off: str | None) -> None:
    app.add_middleware(
        Gate,
        settings=front.settings,
        metrics=front.metrics,
        open_paths=_OPEN_PATHS,
        generation_paths=_GENERATION_PATHS,
        control_paths=control_paths,
        control_off=control_off,
    )


def _paths(router: APIRouter) -> list[str]:
    return [path for route in router.routes if (path := getattr(route, "path", "")) not in _OPEN_PATHS]


# -- what one can see --------------------------------------------------------------------------------------------------


def _visible(front: Frontend) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.head("/health", include_in_schema=False)
    @router.head("/liveness", include_in_schema=False)
    @router.get("/health")
    @router.get("/liveness")
    async def health() -> dict[str, str]:
        """200 while the engine lives, paused or not."""
        front.llm.check_alive()
        return {"status": "ok"}

    @router.get("/status")
    async def status() -> dict[str, Any]:
        """Pause state, requests, weight version, open update, numerics."""
        return {**await front.llm.status(), "server": {**front.jobs.status(), "model": front.names[0]}}

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format."""
        try:
            state: dict[str, Any] | None = await front.llm.status()
        except MidstreamError:
            state = None
        return Response(front.metrics.text(state), media_type=CONTENT_TYPE)

    @router.get("/server_info")
    async def server_info(config_format: Literal["json", "text"] = "text") -> dict[str, Any]:
        """The configuration in vLLM's shape; secrets are not in it."""
        found = _vllm_config(front)
        return {"vllm_config": found if config_format == "json" else str(found), "vllm_env": {}, "system_env": {}}

    return router


def _vllm_config(front: Frontend) -> dict[str, Any]:
    config = front.llm.config
    backend = config.weight_transfer_backend
    return {
        "model_config": {
            "model": config.model_name or config.model,
            "revision": config.revision,
            "tokenizer": config.tokenizer or config.model_name or config.model,
            "served_model_name": list(front.names),
            "dtype": f"torch.{front.started['dtype']}",
            "max_model_len": front.max_model_len,
            "logprobs_mode": front.settings.logprobs_mode,
        },
        "cache_config": {
            "block_size": config.block_size,
            "num_gpu_blocks": front.started["num_blocks"],
            "enable_prefix_caching": config.enable_prefix_caching,
        },
        "scheduler_config": {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
        },
        "parallel_config": {
            "data_parallel_size": config.data_parallel_size,
            "enable_expert_parallel": config.enable_expert_parallel,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
        },
        "weight_transfer_config": {"backend": backend} if backend else None,
        "lora_config": None,
    }


# -- errors ------------------------------------------------------------------------------------------------------------


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MidstreamError)
    _log.warning("%s %s: %s", request.method, request.url.path, error.message)
    return error_response(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    _log.warning("%s %s answered %d", request.method, request.url.path, error.status_code)
    if error.status_code == 404:
        return error_response(NotFound(f"there is no {request.url.path} here"))
    kinds: dict[int, type[MidstreamError]] = {400: InvalidInput, 405: MethodNotAllowed, 413: TooLarge}
    plain = kinds.get(error.status_code, MidstreamError)(str(error.detail))
    plain.status = error.status_code
    return error_response(plain, dict(error.headers or {}))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, (RequestValidationError, ValidationError))
    faults = []
    for fault in error.errors()[:5]:
        if fault["loc"] == ("body",) and fault["type"] != "missing" and not _is_json(request):
            given = request.headers.get("content-type", "missing")
            faults.append(f"the content type has to be application/json, and is {given!r:.80}: the body was not read")
            continue
        where = ".".join(str(part) for part in fault["loc"] if part != "body")
        faults.append(f"{where}: {fault['msg']}" if where else str(fault["msg"]))
    invalid = InvalidInput("; ".join(dict.fromkeys(faults)))
    _log.warning("%s %s: %s", request.method, request.url.path, invalid.message)
    return error_response(invalid)


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours. Its traceback goes to the log, never to the client."""
    return error_response(MidstreamError(f"internal error ({type(error).__name__}); the server's log has more"))
