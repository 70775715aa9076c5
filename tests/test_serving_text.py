"""A chat template that comes with a request is a stranger's program: it reaches nothing, and it ends."""

from __future__ import annotations

import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoints import write_text_checkpoint
from midstream.errors import InvalidInput
from midstream.serving import frontend
from midstream.serving.text import Text, time_limit
from servers import served

MESSAGES = [{"role": "user", "content": "ab"}]
FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("m") / "w0", num_hidden_layers=1)


def test_a_loop_ends_in_time_and_leaves_no_trace() -> None:
    before = sys.gettrace()
    with pytest.raises(TimeoutError, match=r"more than 0.05 s"), time_limit(0.05):
        (lambda: [None for _ in iter(int, 1)])()
    assert sys.gettrace() is before
    with time_limit(30):
        assert sum(range(10)) == 45
    assert sys.gettrace() is before


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (FOR_EVER, "ran for more than 0.2 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion|ran for"),
        ("{{ 'a' * 2000 }}", "has 2000 characters, over the limit of 1000"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(200000) %}{% endfor %}", "Range too big"),
        ("{% include '/etc/passwd' %}", "can not show"),
    ],
)
def test_a_hostile_template_is_an_error(model: pathlib.Path, template: str, why: str) -> None:
    text = Text(model)
    with ThreadPoolExecutor(1) as thread:  # as the server does it: not under a test's own tracing
        limits = {"time_limit_s": 0.2, "max_chars": 1000}
        made = thread.submit(text.apply_chat_template, MESSAGES, chat_template="{{ messages[0].content }}", **limits)
        assert made.result() == text.encode("ab")
        hostile = thread.submit(text.apply_chat_template, MESSAGES, chat_template=template, **limits)
        with pytest.raises(InvalidInput, match=why):
            hostile.result()


def test_a_text_that_can_not_fit_is_refused_before_it_is_encoded(model: pathlib.Path) -> None:
    here = 40_000
    with served(model, max_request_tokens=here, max_request_sequences=4) as server:
        text = server.server.llm.text
        longest = text.max_chars(int(server.status()["max_model_len"]))
        assert text.max_chars(2) == 2 * text.max_chars(1) >= 128 and longest < here
        chat = {"chat_template": "{{ messages[0].content * 2 }}"}
        for path, body, has, limit in (
            ("/v1/completions", {"prompt": "a" * (longest + 1)}, longest + 1, longest),
            ("/v1/completions", {"prompt": ["a", "a" * (longest + 1)]}, longest + 1, longest),
            ("/v1/completions", {"prompt": ["a"] * 5}, 5, 4),
            ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "content": "a" * longest}], **chat}, 0, longest),
            ("/tokenize", {"prompt": "a" * (here + 1)}, here + 1, here),
            ("/tokenize", {"messages": [{**MESSAGES[0], "content": "a" * here}], **chat}, 0, here),
            ("/detokenize", {"tokens": [5] * (here + 1)}, here + 1, here),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 400, (path, answer.text)
            said = answer.json()["error"]["message"]
            assert f"{has or 2 * limit} " in said and f"over the limit of {limit}" in said
        ids = server.post("/tokenize", {"prompt": "a" * here, "add_special_tokens": False}).json()["tokens"]
        assert len(ids) == here, "more than a prompt may have, and no more than a request"
        assert server.post("/detokenize", {"tokens": ids}).json()["prompt"].replace(" ", "") == "a" * here
    with served(model, max_request_tokens=1000) as server:
        answer = server.post("/tokenize", {"prompt": "a" * 2000})
        assert answer.status_code == 400 and "2000 tokens, over the limit of 1000" in answer.json()["error"]["message"]


def test_encoding_goes_by_batches_which_let_other_threads_run(model: pathlib.Path) -> None:
    text = Text(model)
    wanted = text._backend().encode("abc").ids

    many, long = wanted * 3000, text._backend().decode(wanted * 3000)

    class Batches:
        """A tokenizer without ``encode`` and ``decode``, which hold the interpreter's lock."""

        encode_batch = text._backend().encode_batch
        decode_batch = text._backend().decode_batch

    text._fast = Batches
    assert text.encode("abc") == wanted and text.decode(many) == long
    made = text.apply_chat_template(MESSAGES, chat_template="{{ messages[0].content }}")
    assert made == text.tokenizer().encode("ab", add_special_tokens=False)


def test_a_template_that_never_ends_holds_up_nobody_for_long(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "_TEMPLATE_S", 0.2)
    with served(model) as server:
        body = {"messages": MESSAGES, "max_tokens": 2}
        answer = server.post("/v1/chat/completions", {**body, "chat_template": FOR_EVER})
        assert answer.status_code == 400 and "ran for more than 0.2 s" in answer.json()["error"]["message"]
        answer = server.post("/tokenize", {"messages": MESSAGES, "chat_template": FOR_EVER})
        assert answer.status_code == 400
        answer = server.post("/v1/chat/completions", {**body, "chat_template_kwargs": {"time_limit_s": 1e9}})
        assert answer.status_code == 400 and "time_limit_s" in answer.json()["error"]["message"]


def test_a_server_has_the_core_s_view_of_the_tokenizer_before_it_serves(tmp_path: pathlib.Path) -> None:
    model = write_text_checkpoint(tmp_path / "m", num_hidden_layers=1)
    with served(model) as server:
        assert server.server.llm._core_has_tokenizer
    (model / "tokenizer.json").write_text("{")  # a broken one is told to whoever asks for text
    with served(model) as server:
        body = {"prompt": [5, 6], "max_tokens": 1, "ignore_eos": True}
        assert (
            server.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 1}}).status_code
            == 200
        )
        assert server.post("/v1/completions", {**body, "prompt": "ab"}).status_code == 400
