"""The listeners of one server, from binding to the last answer. ``midstream serve`` is this and a few printed lines.

The end, whoever asks for it (a signal, or the engine's death): no new work; every request ends with what it has, also
where a pause holds it; the engine closes, which answers whoever still waits for a control call; the listeners close.
Each step is bounded, and a second signal changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from midstream.engine.runner import ModelRunner
from midstream.errors import InvalidInput, MidstreamError
from midstream.models.loader import open_checkpoint, resolve_dtype
from midstream.models.weights import parameter_shapes
from midstream.serving.app import create_app, create_control_app
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.settings import ServerSettings

_log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 75


class _Listener(uvicorn.Server):
    """uvicorn without its signal handlers: :class:`HTTPServer` decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HTTPServer:
    """One engine behind one or two addresses. Binds at construction, so a taken port fails before a model loads."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self._app = create_app(llm, settings)
        self.front = self._app.state.front
        self._listeners: list[tuple[_Listener, Any]] = []
        self.url = self._bind(self._app, settings.host, settings.port, "on")
        self.control_url: str | None = self.url if settings.control_off is None else None
        if settings.has_control_address:
            app = create_control_app(self.front)
            self.control_url = self._bind(
                app, settings.control_host or settings.host, settings.control_port or 0, "off"
            )
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _bind(self, app: Any, host: str, port: int, lifespan: Any) -> str:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            lifespan=lifespan,
            log_config=None,
            access_log=False,
            server_header=False,
            http="h11",  # the other one takes heads without end, and the body of a refused upgrade for a request
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(self.settings.shutdown_s)),
        )
        try:
            bound = config.bind_socket()
        except SystemExit as error:
            self.close_sockets()
            raise InvalidInput(
                f"can not listen on {host}:{port}: is the port taken, the address this machine's?"
            ) from error
        # asyncio sets it where the socket names its protocol, and uvicorn's does not. Without it an answer's next part,
        # and each event of a stream, waits for the client's delayed acknowledgement of the part before: 40 ms.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listeners.append((_Listener(config), bound))
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{bound.getsockname()[1]}"

    def close_sockets(self) -> None:
        for _, bound in self._listeners:
            bound.close()

    def stop(self) -> None:
        """Begin the end; from any thread, or a signal handler. Calling it again changes nothing."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self, on_ready: Callable[[dict[str, Any]], None] = lambda status: None) -> None:
        """Serve until :meth:`stop` or a signal. Raises what kept the engine from starting, or ended it."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self.stop)
        try:
            if not await self._comes_first(self.llm.start()):
                return
            serving = [asyncio.ensure_future(server.serve([bound])) for server, bound in self._listeners]
            while not all(server.started for server, _ in self._listeners):
                await asyncio.sleep(0.01)
                if any(task.done() for task in serving):
                    raise MidstreamError("a listener did not start; the lines above say why")
            on_ready(self.front.started)
            died = await self._comes_first(self.llm.ended.wait())
            await self._end(serving)
            if died:
                self.llm.check_alive()
        finally:
            await self.llm.aclose()
            self.close_sockets()

    async def _comes_first(self, work: Any) -> bool:
        """Whether ``work`` ended before somebody asked to stop; its error is raised, what is left of it cancelled."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return False
            working.result()
            return True
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _end(self, serving: Sequence[asyncio.Future[None]]) -> None:
        await self.front.close()
        await self.llm.aclose()
        for server, _ in self._listeners:
            server.should_exit = True
        await asyncio.wait(serving, timeout=self.settings.shutdown_s + 2.0)


def memory_plan(llm: AsyncLLM, status: dict[str, Any]) -> str:
    """In one line: what weights and KV cache take, and what fits."""
    config = llm.config
    checkpoint = open_checkpoint(config.model).config
    dtype = resolve_dtype(config.dtype, checkpoint)
    tied = checkpoint.tie_word_embeddings
    sizes = [
        _product(shape)
        for name, shape in parameter_shapes(checkpoint).items()
        if not (tied and name == "lm_head.weight")
    ]
    weights = sum(sizes) * dtype.itemsize
    blocks = int(status["num_blocks"])
    cache = blocks * ModelRunner.block_bytes(checkpoint, dtype, config.block_size)
    return (
        f"weights {_size(weights)} ({sum(sizes) / 1e6:.1f} M parameters, {status['dtype']}), one more copy while an "
        f"update is staged; KV cache {_size(cache)} = {blocks} blocks of {config.block_size} = "
        f"{blocks * config.block_size:,} tokens; up to {config.max_num_seqs} sequences of {status['max_model_len']:,}"
    )


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"
