"""Structured output: which tokens may come next, so that the text matches a JSON schema, a regex or a choice.

A library (llguidance) keeps the parsers; it is imported, and its view of the tokenizer built, when the front end sends
the text of a ``tokenizer.json``: with the first request that asks, or before a server serves if that file exists.
Building it takes up to a second for a large vocabulary and holds the interpreter all the while. Compiling a grammar
lets go of it, and takes anything from a millisecond to minutes: so that happens in threads, under a limit of size and
time.

Grammars are kept here in the core, beside the request: what may come next depends on every token made, and only here
does the next step wait for nothing. ``Scheduler.update`` hands each its token in the order they are made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from midstream.errors import InvalidInput
from midstream.types import Request, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LIMIT_S = 10.0
"""From the request to its grammar, the wait for a thread included."""
_NUM_THREADS = 2
"""The library can not be interrupted: that many grammars that take for ever leave the next ones to their time limit."""

_FUSE = '"decoder":{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"}]}'


class Grammar:
    """How far one request has come in its grammar: a function of the tokens it took, and of nothing else."""

    __slots__ = ("_matcher", "allowed", "error", "is_over")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.allowed = b""
        """What may come next: a bit for each token id, the least significant first."""
        self.error = ""
        """Why it can not go on; empty while it can."""
        self.is_over = False
        """The end token was taken."""
        self._settle()

    def advance(self, token_id: int) -> bool:
        """Take the next token. False if there is no way on after it: see ``error``."""
        was_stopped = self._matcher.is_stopped()  # where the text can not go on, only an end token is taken
        self._matcher.consume_token(token_id)
        self.is_over = was_stopped or self._matcher.stop_reason() == "EndOfSentence"
        return self._settle()

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy())

    def _settle(self) -> bool:
        self.allowed = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # the mask may be what found it
            self.error = (self._matcher.get_error() or "unknown").split("\n<")[0].strip()
        elif not any(self.allowed):
            self.error = "no token of the vocabulary fits what must come next"
        return not self.error


class GrammarCompiler:
    """Makes grammars for one model's vocabulary. Every error is an ``InvalidInput``.

    All but ``compile`` belongs to the core's thread. ``wake`` is called from another one when ``settle`` is due.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._pending: list[tuple[float, Future[list[Grammar]], list[Request]]] = []
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None

    @property
    def is_loaded(self) -> bool:
        return self._tokenizer is not None

    def load_tokenizer(self, text: str) -> None:
        """Take the tokenizer, as the text of a ``tokenizer.json``; once is enough."""
        if self._tokenizer is not None:
            return
        if not self._eos:
            raise InvalidInput("structured outputs need an end token, and the model's config.json has no eos_token_id")
        try:
            from llguidance import LLTokenizer

            if not text.startswith("{"):
                raise ValueError("it is not a JSON object")
            # tokens that stand for themselves: a case of what it knows
            text = text.replace('"decoder":{"type":"Fuse"}', _FUSE)
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos)
        except Exception as error:  # the library's own kinds, and whatever a strange file provokes
            raise InvalidInput(f"structured outputs can not use this model's tokenizer: {error}") from error

    def require_tokenizer(self) -> None:
        if self._tokenizer is None:
            raise InvalidInput("structured outputs need the tokenizer first: the front end sends it")

    def start(self, wanted: StructuredOutputs, requests: list[Request]) -> None:
        """Compile in a thread, unless all of ``requests`` have ended before one is free; then see ``settle``."""

        def work() -> list[Grammar]:
            if all(request.status.is_finished for request in requests):
                return []
            grammar = self.compile(wanted)
            return [grammar.copy() for _ in requests]

        future = self._threads.submit(work)
        self._pending.append((time.monotonic() + _LIMIT_S, future, requests))
        future.add_done_callback(lambda _: self._wake())

    def settle(self) -> Iterator[tuple[list[Request], InvalidInput | None]]:
        """Between two steps: the requests that have their grammars now, and with why not those that get none."""
        now = time.monotonic()
        for entry in [e for e in self._pending if e[1].done() or now > e[0]]:
            self._pending.remove(entry)
            _, future, requests = entry
            if not future.done():
                future.cancel()
                why = f"structured_outputs: not compiled within {_LIMIT_S:g} s: simplify it, or try later"
                yield requests, InvalidInput(why)
            elif (error := future.exception()) is not None:
                other = InvalidInput(f"structured_outputs: {type(error).__name__}: {error}")
                yield requests, error if isinstance(error, InvalidInput) else other
            else:
                for request, grammar in zip(requests, future.result(), strict=False):
                    request.grammar = grammar
                yield requests, None

    def close(self) -> None:
        """Compile no more; does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pending.clear()

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """A grammar at its start."""
        from llguidance import LLMatcher

        assert self._tokenizer is not None
        try:
            if wanted.json is not None:
                source = LLMatcher.grammar_from_json_schema(json.loads(wanted.json))
            elif wanted.regex is not None:
                source = LLMatcher.grammar_from_regex(wanted.regex)
            else:
                choices = " | ".join(json.dumps(text) for text in wanted.choice or ())
                source = LLMatcher.grammar_from_lark(f"start: {choices}")
            grammar = Grammar(LLMatcher(self._tokenizer, source, log_level=0))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"structured_outputs: {error}") from error
        if grammar.error:
            raise InvalidInput(f"structured_outputs: {grammar.error}")
        return grammar
