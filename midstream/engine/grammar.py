"""Structured output: which tokens may come next, so that the text matches a JSON schema, a regex or a choice.

A library (llguidance) keeps the parsers; it is imported, and its view of the tokenizer built, with the first request
that asks. The tokenizer comes as the text of a ``tokenizer.json`` from the front end, which has one open anyway.

Grammars are compiled and kept here in the core, beside the request: what may come next depends on every token made,
and only here does the next step wait for nothing. ``Scheduler.update`` hands each its token in the order they are made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from midstream.errors import InvalidInput
from midstream.types import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


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
            self.error = (self._matcher.get_error() or "unknown").split("\n<state>")[0].strip()
        elif not any(self.allowed):
            self.error = "no token of the vocabulary fits what must come next"
        return not self.error


class GrammarCompiler:
    """Makes grammars for one model's vocabulary. Every error is an ``InvalidInput``."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
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

            data = json.loads(text)
            if data.get("decoder") == {"type": "Fuse"}:  # tokens stand for themselves: a case of what it knows
                data["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
            self._tokenizer = LLTokenizer(json.dumps(data), n_vocab=self._vocab_size, eos_token=self._eos)
        except Exception as error:  # the library's own kinds, and whatever a strange file provokes
            raise InvalidInput(f"structured outputs can not use this model's tokenizer: {error}") from error

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """A grammar at its start; give each sample a copy."""
        if self._tokenizer is None:
            raise InvalidInput("structured outputs need the tokenizer first: the front end sends it")
        from llguidance import LLMatcher

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
