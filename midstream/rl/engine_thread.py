"""An event loop in a thread: where the engine's client lives, while the trainer's threads go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from midstream.errors import Conflict, TimedOut

T = TypeVar("T")
CLOSE_S = 10.0
"""Closing anything that runs on the thread takes no longer than this."""


class EngineThread:
    """An event loop in a thread of its own. The engine client lives on it; other threads post coroutines."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="rollouts", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            coroutine.close()
            raise Conflict("the engine thread is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Wait for the result, from another thread. After ``timeout_s``: cancels the coroutine, raises ``TimedOut``."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise Conflict(f"{what}: a blocking call from the engine thread would wait for itself")
        return result_within(timeout_s, self.submit(coroutine), what)

    def close(self) -> None:
        """Cancel what still runs and end the thread, within some seconds. Calling it again does nothing."""
        if not self._thread.is_alive():
            return
        self.run(cancel(), CLOSE_S, "closing the engine thread")
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_S)


def result_within(timeout_s: float, future: Future[T], what: str) -> T:
    """Wait for the result. After ``timeout_s``: cancels, raises ``TimedOut``."""
    try:
        return future.result(timeout_s)
    except TimeoutError as error:
        if future.done():  # just in time, or the TimeoutError is the work's own
            return future.result()
        future.cancel()
        raise TimedOut(f"{what} did not end within {timeout_s:g} s") from error


async def cancel(tasks: Collection[asyncio.Task[Any]] | None = None) -> None:
    """End ``tasks`` (by default all others) of this loop, within some seconds. A cancelled ``generate_one`` aborts its
    request in the engine."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] if tasks is None else tasks
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_S / 2)
