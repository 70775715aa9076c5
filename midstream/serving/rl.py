"""The control routes: pause, weights, sleep. vLLM's native RL surface, and the aliases that clients of it use.

Every answer is vLLM's, with what the call changed beside it. A call that changed nothing it was asked to change is an
error. Bodies are JSON and nothing else: no byte from the network is ever unpickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from midstream.errors import InvalidInput, NotFound, TimedOut
from midstream.serving.async_llm import AsyncLLM
from midstream.types import KVPolicy, PauseMode

Owner = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Label = Annotated[str, Field(max_length=1024)]


class Body(BaseModel):
    """A JSON object. Keys that are not known here are other versions' and change nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)


B = TypeVar("B", bound=Body)


class AbortBody(Body):
    request_ids: list[str] | None = None
    """None or empty: all."""


class InitBody(Body):
    init_info: dict[str, Any]
    fingerprint: dict[str, Any] | None = None
    """The trainer's numerics; /status then says whether the two sides are exact."""


class StartBody(Body):
    mode: Literal["full", "partial"] | None = None
    cast: Literal["deny", "allow"] | None = None
    manifest: dict[str, Any] | None = None
    is_checkpoint_format: bool | None = None


class UpdateBody(Body):
    """Exactly one of ``update_info`` and ``weight_dir``. The last two: for an update without a start; 409
    while one that was started is open."""

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: str | None = None
    weight_version: Label | None = None
    kv_policy: KVPolicy | None = None


class FinishBody(Body):
    weight_version: Label | None = None
    kv_policy: KVPolicy | None = None


class VersionBody(Body):
    new_version: Annotated[Label, Field(min_length=1)]


class CheckerBody(Body):
    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None


class PauseBody(Body):
    mode: PauseMode | None = None
    clear_cache: bool | None = None
    timeout_s: Annotated[float, Field(ge=0, le=1e9)] | None = None
    owner: Owner | None = None
    lease_s: Seconds | None = None


class ResumeBody(Body):
    owner: Owner | None = None
    force: bool | None = None


class SleepBody(Body):
    level: Annotated[int, Field(ge=0, le=2)] | None = None
    mode: PauseMode | None = None


class WakeBody(Body):
    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class ResetCacheBody(Body):
    reset_running_requests: bool | None = None


class RpcBody(Body):
    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: Seconds | None = None


def make_router(llm: AsyncLLM, engine_ids: Callable[[Iterable[str]], list[str]] = list) -> APIRouter:
    """All control routes over ``llm``. ``engine_ids``: from the request ids that clients know to the engine's.

    The app that mounts it guards it with the control token and turns errors into answers.
    """
    router = APIRouter()
    weights = WeightRoutes(llm)

    # -- pause -------------------------------------------------------------------------------------------------

    @router.post("/pause")
    async def pause(
        mode: PauseMode | None = None,
        clear_cache: bool | None = None,
        timeout_s: Annotated[float | None, Query(ge=0, le=1e9)] = None,
        owner: Owner | None = None,
        lease_s: Seconds | None = None,
        body: PauseBody | None = None,
    ) -> dict[str, Any]:
        """Answers when no step runs any more and every output of the steps before is out.

        By default ``mode`` is abort and ``clear_cache`` true; both, and the others, may be in the query or in a body.
        abort: requests end with what they have. wait: they finish first, within ``timeout_s``. keep: they freeze.
        ``clear_cache``: KV is dropped (and, under keep, computed again). ``owner``: only it, or force, undoes this.
        ``lease_s``: the engine resumes by itself after so long, unless the pause is taken again.
        """
        given = body or PauseBody()
        owner, lease_s = _first(owner, given.owner), _first(lease_s, given.lease_s)
        found = await llm.pause_generation(
            _first(mode, given.mode) or "abort",
            _first(clear_cache, given.clear_cache, True),
            _first(timeout_s, given.timeout_s),
            owner,
            lease_s,
        )
        return {"status": "paused", **found, "owner": owner, "lease_s": lease_s}

    @router.post("/resume")
    async def resume(
        owner: Owner | None = None, force: bool = False, body: ResumeBody | None = None
    ) -> dict[str, Any]:
        """Go on; a pause in flight is cancelled."""
        given = body or ResumeBody()
        done = await llm.resume_generation(_first(owner, given.owner), force or bool(given.force))
        return {"status": "resumed", **done}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        """True from the start of a pause."""
        return {"is_paused": await llm.is_paused()}

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody | None = None) -> dict[str, Any]:
        """End requests (none named: all); each is answered with its partial tokens and finish reason abort."""
        named = body.request_ids if body else None
        return await llm.abort_requests(engine_ids(named) if named else None)

    # -- weights -----------------------------------------------------------------------------------------------

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitBody) -> dict[str, Any]:
        """Open the channel; with nccl the trainer listens already, or will within the time limit."""
        return await weights.init(body)

    @router.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine() -> dict[str, Any]:
        """Close the channel; 409 while an update is open."""
        return await llm.shutdown_weight_transfer_engine()

    @router.post("/start_weight_update")
    async def start_weight_update(body: StartBody | None = None) -> dict[str, Any]:
        """Open an update. 409 with the open one's id and age if there is one."""
        return await weights.start(body or StartBody())

    @router.post("/update_weights")
    async def update_weights(body: UpdateBody) -> dict[str, Any]:
        """One chunk, answered when its bytes are staged. Without a start: a whole update, answered when it serves."""
        return await weights.update(body)

    @router.post("/finish_weight_update")
    async def finish_weight_update(body: FinishBody | None = None) -> dict[str, Any]:
        """Verify and commit; answered when the new weights serve. Fails if nothing, or not all, has come."""
        return await weights.finish(body or FinishBody())

    @router.post("/abort_weight_update")
    async def abort_weight_update() -> dict[str, Any]:
        """Drop the open update, if there is one; the weights that serve go on. If none is: chunks of the last one that
        was started and dropped are not expected any more, and updates without a start are taken again."""
        return {"message": "Weight update aborted", **await llm.abort_weight_update()}

    @router.post("/update_weight_version")
    async def update_weight_version(body: VersionBody) -> dict[str, Any]:
        """The label alone: weights and number stay."""
        return await llm.update_weight_version(body.new_version)

    @router.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        """Which weights serve."""
        status = await llm.status()
        return {"weight_version": status["version"], "number": status["number"], "weights_id": status["weights_id"]}

    @router.post("/weight_checker")
    async def weight_checker(body: CheckerBody) -> dict[str, Any]:
        """checksum: SHA-256 of what is really held, by checkpoint name. compare: against ``baseline``. reset: zeros, as
        a commit, only while paused."""
        found = await llm.weight_checker(body.action, body.baseline)
        return {"status": "reset", **found} if body.action == "reset" else found

    # -- memory ------------------------------------------------------------------------------------------------

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(
        reset_running_requests: bool = False, reset_external: bool = False, body: ResetCacheBody | None = None
    ) -> dict[str, Any]:
        """409 while requests hold blocks, unless ``reset_running_requests``: they then compute theirs again.
        ``reset_external``: there is no external cache, so nothing more is reset."""
        also_running = reset_running_requests or bool(body and body.reset_running_requests)
        return await llm.reset_prefix_cache(also_running)

    @router.post("/sleep")
    async def sleep(
        level: Annotated[int | None, Query(ge=0, le=2)] = None,
        mode: PauseMode | None = None,
        body: SleepBody | None = None,
    ) -> dict[str, Any]:
        """0: pause. 1 (the default): and free the KV cache. 2: and drop the weights. A pause that holds already keeps
        its mode; else it is abort by default."""
        given = body or SleepBody()
        return await llm.sleep(_first(level, given.level, 1), _first(mode, given.mode) or "abort")

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[list[Literal["weights", "kv_cache", "scheduling"]] | None, Query()] = None,
        body: WakeBody | None = None,
    ) -> dict[str, Any]:
        """Wake all, or what is named. A pause that sleep took ends when all is awake."""
        tags = _first(tags, body and body.tags)
        return await llm.wake_up([str(tag) for tag in tags] if tags else None)

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        return {"is_sleeping": await llm.is_sleeping()}

    # -- the rest ----------------------------------------------------------------------------------------------

    @router.get("/get_world_size")
    async def get_world_size(include_dp: bool = True) -> dict[str, Any]:
        """Workers of this engine."""
        return {"world_size": llm.config.data_parallel_size if include_dp else 1}

    aliases = weights.aliases()

    @router.post("/collective_rpc")
    async def collective_rpc(body: RpcBody) -> dict[str, Any]:
        """An allow-list of the worker methods that clients know, each another name of a route; 404 for any other."""
        method = aliases.get(body.method)
        if method is None:
            raise NotFound(f"no method {body.method!r}; there are {', '.join(sorted(aliases))}")
        try:
            async with asyncio.timeout(body.timeout):
                return {"results": [await method(body.args or [], dict(body.kwargs or {}))]}
        except TimeoutError as error:
            if isinstance(error, TimedOut):
                raise
            raise TimedOut(f"{body.method} did not end within {body.timeout} s; what it began goes on") from error

    return router


def _first(*values: Any) -> Any:
    """The first that was given: of the query, the body, a default."""
    return next((value for value in values if value is not None), None)


class WeightRoutes:
    """The weight verbs as routes and as aliases."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def init(self, body: InitBody) -> dict[str, Any]:
        request: dict[str, Any] = {"init_info": body.init_info}
        if body.fingerprint is not None:
            request["fingerprint"] = body.fingerprint
        return {"message": "Weight transfer initialized", **await self._llm.init_weight_transfer_engine(request)}

    async def start(self, body: StartBody) -> dict[str, Any]:
        if body.is_checkpoint_format is False:
            raise InvalidInput("is_checkpoint_format must be true: the engine takes weights under checkpoint names")
        found = await self._llm.start_weight_update(body.manifest, body.mode, body.cast)
        return {"message": "Weight update started", **found}

    async def update(self, body: UpdateBody) -> dict[str, Any]:
        if (body.update_info is None) is (body.weight_dir is None):
            raise InvalidInput("give exactly one of update_info and weight_dir")
        request: dict[str, Any] = {"weight_version": body.weight_version, "kv_policy": body.kv_policy}
        if body.weight_dir is not None:
            request["weight_dir"] = body.weight_dir
        elif isinstance(body.update_info, list):
            size = self._llm.config.data_parallel_size
            if len(body.update_info) != size:
                raise InvalidInput(
                    f"update_info is a list of {len(body.update_info)}, one for each worker: this engine has {size}"
                )
            if any(info != body.update_info[0] for info in body.update_info):
                raise InvalidInput("update_info must say the same for each worker: all take the whole of an update")
            request["update_info"] = body.update_info[0]
        else:
            request["update_info"] = body.update_info
        return {"message": "Weights updated", **await self._llm.update_weights(request)}

    async def finish(self, body: FinishBody) -> dict[str, Any]:
        found = await self._llm.finish_weight_update(body.weight_version, body.kv_policy)
        return {"message": "Weight update finished", **found}

    def aliases(self) -> dict[str, Callable[[list[Any], dict[str, Any]], Awaitable[dict[str, Any]]]]:
        """Name of a worker method → what does the same here: (args, kwargs) → the route's answer."""

        def alias(
            route: Callable[[Any], Awaitable[dict[str, Any]]], model: type[Body], first: str | None = None
        ) -> Callable[[list[Any], dict[str, Any]], Awaitable[dict[str, Any]]]:
            async def call(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
                if len(args) > (first is not None):
                    raise InvalidInput(f"{int(first is not None)} positional argument at most, got {len(args)}")
                if args and first is not None:
                    kwargs = {first: args[0], **kwargs}
                return await route(parsed(model, kwargs))

            return call

        async def from_path(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
            given = [*args, *(kwargs[name] for name in ("weight_dir", "weight_path", "path") if name in kwargs)]
            if len(given) != 1:
                raise InvalidInput(f"give one path, as argument or weight_dir; got {len(given)}")
            return await self.update(parsed(UpdateBody, {"weight_dir": given[0]}))

        async def sleep(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
            return await self._llm.sleep(*_arguments(args, kwargs, {"level": 1}))

        async def wake(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
            return await self._llm.wake_up(*_arguments(args, kwargs, {"tags": None}))

        init = alias(self.init, InitBody, "init_info")
        start = alias(self.start, StartBody)
        update = alias(self.update, UpdateBody, "update_info")
        finish = alias(self.finish, FinishBody, "weight_version")
        return {
            "init_weight_transfer_engine": init,
            "start_weight_update": start,
            "skyrl_start_weight_update": start,
            "update_weights": update,
            "update_weights_nccl": update,
            "update_weights_ipc": update,
            "update_weights_from_ipc": update,
            "update_weights_from_path": from_path,
            "finish_weight_update": finish,
            "skyrl_finish_weight_update": finish,
            "skyrl_sleep_for_weight_sync": sleep,
            "skyrl_wake_for_weight_sync": wake,
        }


def parsed(model: type[B], data: Any) -> B:
    """``data`` as ``model``; InvalidInput says which field is wrong."""
    from pydantic import ValidationError

    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InvalidInput(f"{model.__name__}: {faults}") from error


def _arguments(args: list[Any], kwargs: dict[str, Any], defaults: dict[str, Any]) -> list[Any]:
    unknown = sorted(set(kwargs) - set(defaults))
    if unknown or len(args) > len(defaults):
        raise InvalidInput(f"the arguments are {', '.join(defaults)}; got {len(args)} positional and {sorted(kwargs)}")
    given = dict(zip(defaults, args, strict=False))
    return list({**defaults, **given, **kwargs}.values())
