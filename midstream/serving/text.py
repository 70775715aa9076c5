"""Text at the edge: tokenizers, chat templates, and turning a growing list of ids into text for people.

Ids are never re-encoded: text is decoded once, increment by increment.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from midstream.errors import InvalidInput

_CHARS_PER_TOKEN = 64
"""A token stands for at least this many characters in a limit: tokenizers may drop spaces, or join what they do not
know, so a vocabulary of short tokens says little."""

_KEPT_TOKENS = 1 << 15
"""How many single tokens' texts are kept: a stream asks for the same ones again and again."""

_LONG = 4096
"""More ids are decoded as a batch, which lets other threads run, and costs more where there are few."""


class Text:
    """A model's tokenizer. Loaded on first use: a client that speaks token ids never pays for it."""

    def __init__(self, source: str | pathlib.Path) -> None:
        """``source``: a directory with tokenizer files, or a GGUF file that carries its tokenizer."""
        self._source = pathlib.Path(source).expanduser()
        self._fast: Any = None
        self._full: Any = None
        self._longest = 0
        self.token = functools.lru_cache(_KEPT_TOKENS)(self._token)

    @property
    def exists(self) -> bool:
        """Whether there is a tokenizer at all; an engine without one speaks token ids."""
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        return self._source.is_file() or any((self._source / name).is_file() for name in names)

    @property
    def is_quick(self) -> bool:
        """Loading takes less than a second: there is a tokenizer.json. A GGUF file's tokenizer takes many."""
        return (self._source / "tokenizer.json").is_file()

    @property
    def is_loaded(self) -> bool:
        return self._fast is not None

    def load(self) -> None:
        """Load now what the first use would load."""
        self._backend()

    def max_chars(self, num_tokens: int) -> int:
        """A text of more characters can not be ``num_tokens`` tokens: the longest token's, times their number."""
        if not self._longest:
            self._longest = max(_CHARS_PER_TOKEN, *map(len, self._backend().get_vocab()))
        return num_tokens * self._longest

    def encode(self, text: str, add_special_tokens: bool = True, max_chars: int | None = None) -> list[int]:
        """Text → ids, with the special tokens the tokenizer itself adds unless they are not wanted.

        Raises InvalidInput for a text of more than ``max_chars`` characters, before any work on it.
        """
        _check_length(text, max_chars)
        # A batch of one, because only batches let other threads run: a long text takes seconds.
        return list(self._backend().encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Ids → text, special tokens left out unless they are wanted."""
        if len(ids) > _LONG:
            return str(self._backend().decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        return str(self._backend().decode(ids, skip_special_tokens=skip_special_tokens))

    def to_json(self) -> str:
        """The tokenizer as the text of a ``tokenizer.json``."""
        if not self.exists:
            raise InvalidInput(f"no tokenizer at {self._source}: give tokenizer=")
        return str(self._backend().to_str())

    def _token(self, token_id: int, skip_special_tokens: bool = False) -> str:
        """``token``: one id as text, special tokens included unless they are not wanted."""
        return self.decode([token_id], skip_special_tokens)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        time_limit_s: float | None = None,
        max_chars: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Messages → prompt ids, ready for the assistant's turn. Limits: of the rendering, and of the text it makes."""
        tokenizer = self.tokenizer()
        if not (kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            raise InvalidInput(f"the tokenizer at {self._source} has no chat template: give prompts, not messages")
        try:
            with time_limit(time_limit_s) if time_limit_s else contextlib.nullcontext():
                text = tokenizer.apply_chat_template(
                    messages, tokenize=False, **{"add_generation_prompt": True, **kwargs}
                )
        except Exception as error:  # the template is a program of the model's authors: it may raise anything
            raise InvalidInput(f"the chat template can not show these messages: {error}") from error
        _check_length(text, max_chars)
        batch = tokenizer([text], add_special_tokens=False, return_attention_mask=False)  # a batch: as in encode
        return list(batch["input_ids"][0])

    def tokenizer(self) -> Any:
        """The transformers tokenizer (chat templates, GGUF vocabularies)."""
        if self._full is None:
            from transformers import AutoTokenizer  # seconds of import, so only where it is needed

            try:
                if self._source.is_file():
                    self._full = AutoTokenizer.from_pretrained(str(self._source.parent), gguf_file=self._source.name)
                else:
                    self._full = AutoTokenizer.from_pretrained(str(self._source))
            except (OSError, ValueError) as error:
                raise InvalidInput(f"no tokenizer at {self._source}: {error}; give tokenizer= or token ids") from error
        return self._full

    def _backend(self) -> Any:
        if self._fast is None:
            if self._full is None and self.is_quick:
                from tokenizers import Tokenizer

                self._fast = Tokenizer.from_file(str(self._source / "tokenizer.json"))
            else:
                self._fast = self.tokenizer().backend_tokenizer
        return self._fast


def _check_length(text: str, max_chars: int | None) -> None:
    if max_chars is not None and len(text) > max_chars:
        raise InvalidInput(f"the text has {len(text)} characters, over the limit of {max_chars}: shorten it")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError out of Python code of this thread that runs for longer. Looks at the clock between its lines,
    so a loop ends in time and one long operation of the interpreter does not."""
    end = time.monotonic() + seconds

    def look(*_: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it ran for more than {seconds:g} s")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


class Detokenizer:
    """Text of one growing output. What was handed out never changes: bytes of an unfinished character are held back.

    Each call decodes only a short window: the ids since the last complete word boundary and a few before it, for
    tokenizers whose decoding depends on the neighbour.
    """

    def __init__(self, text: Text, skip_special_tokens: bool = True) -> None:
        self._text = text
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        """The window; what came before it is in ``out``, and plays no part any more."""
        self._read = 0  # of the window, ids before this are in ``out`` already
        self._before = ""  # their text
        self.out = ""

    def add(self, ids: list[int]) -> None:
        self._ids += ids
        after = self._decode(self._ids)
        if len(after) > len(self._before) and not after.endswith("\ufffd"):
            self.out += after[len(self._before) :]
            del self._ids[: self._read]
            self._read = len(self._ids)
            self._before = self._decode(self._ids)

    def finish(self) -> str:
        """The whole text, an unfinished character included."""
        self.out += self._decode(self._ids)[len(self._before) :]
        self._ids, self._read, self._before = [], 0, ""
        return self.out

    def _decode(self, ids: list[int]) -> str:
        return self._text.token(ids[0], self._skip) if len(ids) == 1 else self._text.decode(ids, self._skip)
