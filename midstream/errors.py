"""One exception tree. Every error says the value that was wrong and what to do about it.

    MidstreamError                  .status (HTTP code), .retryable
    ├── InvalidInput (ValueError)   400  a parameter, prompt or call that can never work
    │   └── WeightUpdateError       400  an update that does not fit the model; .tensors lists every offender
    ├── ModelLoadError              400  a checkpoint that cannot be loaded; lists every name at fault
    ├── Conflict                    409  the call does not fit the state the engine is in
    │   ├── PauseCancelled          409  a resume (or another pause) ended this pause before it completed
    │   └── UpdateConflict          409  no update open, or one is open already
    ├── Unauthorized                401  no token, or the wrong one
    ├── Forbidden                   403  not from here
    ├── MethodNotAllowed            405  a route that is here, by another method
    ├── TooLarge                    413  a request body over the limit
    ├── NotFound                    404  a model, route or request that is not here
    ├── Overloaded                  503  retryable: the server takes no more at the moment
    ├── EnginePaused                503  retryable: new requests are refused while an abort or wait pause holds
    ├── TimedOut (TimeoutError)     504  a bounded wait ended; says what was still missing
    ├── RewardError                 500  a task's reward function failed or took too long
    ├── NotReady                    503  retryable: the engine is started again, or waits for the current weights
    ├── RankLost                    503  a rank of this group ended or fell silent; the group ends with it
    └── EngineDead                  503  the engine process ended; every open stream gets this

Errors cross the process border by class name, message and ``details``, never by pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MidstreamError(Exception):
    """Base of every error this project raises on purpose."""

    status = 500
    retryable = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class InvalidInput(MidstreamError, ValueError):
    """A value that can never work; the message names it and the allowed range."""

    status = 400


class WeightUpdateError(InvalidInput):
    """An update that does not fit the model. The old weights go on serving, bit for bit."""

    def __init__(self, message: str, tensors: list[str] | tuple[str, ...] = (), **details: Any) -> None:
        super().__init__(message, tensors=list(tensors), **details)
        self.tensors = list(tensors)


class ModelLoadError(MidstreamError):
    """A model directory or file that cannot be loaded."""

    status = 400


class Conflict(MidstreamError):
    """The call does not fit the engine's present state."""

    status = 409


class PauseCancelled(Conflict):
    """The pause in flight was cancelled by a resume or replaced by a pause of another mode."""


class UpdateConflict(Conflict):
    """A weight verb out of order: no update is open, or another one is."""


class Unauthorized(MidstreamError):
    """The route needs a token that the request does not carry."""

    status = 401


class Forbidden(MidstreamError):
    """The route is not for whoever asks from there."""

    status = 403


class MethodNotAllowed(MidstreamError):
    """The route takes other methods; the Allow header names them."""

    status = 405


class TooLarge(MidstreamError):
    """A request body over the server's limit."""

    status = 413


class NotFound(MidstreamError):
    """A name that nothing here answers to; the message lists the names that there are."""

    status = 404


class Overloaded(MidstreamError):
    """A limit of the server is reached, or it is ending. Try again later."""

    status = 503
    retryable = True


class EnginePaused(MidstreamError):
    """The engine takes no new requests until it is resumed. Try again later."""

    status = 503
    retryable = True


class TimedOut(MidstreamError, TimeoutError):
    """A bounded wait came to its end; the message says what was still missing."""

    status = 504


class RewardError(MidstreamError):
    """A reward function raised or exceeded its time limit."""


class NotReady(MidstreamError):
    """The engine was started again after a loss and does not serve yet. Try again later."""

    status = 503
    retryable = True


class RankLost(MidstreamError):
    """A collective failed: another rank ended, or was silent for the time limit. The group can not go on."""

    status = 503


class EngineDead(MidstreamError):
    """The engine process has ended. Start a new one."""

    status = 503


def _tree(cls: type[MidstreamError]) -> dict[str, type[MidstreamError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


def to_wire(error: BaseException) -> dict[str, Any]:
    """An error as plain data. Foreign exceptions become ``MidstreamError`` with their type in the text."""
    if isinstance(error, MidstreamError):
        return {"type": type(error).__name__, "message": error.message, "details": error.details}
    return {"type": "MidstreamError", "message": f"{type(error).__name__}: {error}", "details": {}}


def from_wire(data: Mapping[str, Any]) -> MidstreamError:
    """Inverse of :func:`to_wire`; an unknown type becomes the base class."""
    cls = _tree(MidstreamError).get(str(data["type"]), MidstreamError)
    return cls(str(data["message"]), **dict(data.get("details") or {}))
