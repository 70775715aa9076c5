"""The generation routes over HTTP: every form of prompt, every shape of answer, streamed and not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from midstream.errors import InvalidInput
from midstream.serving import shapes
from midstream.serving.bodies import CompletionBody
from midstream.serving.llm import LLM
from midstream.serving.settings import ServerSettings
from midstream.types import CompletionOutput, Logprob, SamplingParams
from servers import MODEL, Served, events, served

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ extra or '' }}{% endif %}"
)
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(served_model_name=("reverse", "alias")) as found:
        yield found


def complete(server: Served, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {**GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def stream(server: Served, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    response = server.post(path, {**GREEDY, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def test_models_by_every_name_and_none_other(server: Served) -> None:
    found = server.get("/v1/models").json()["data"]
    assert [m["id"] for m in found] == ["reverse", "alias"] and found[0]["max_model_len"] == 512
    assert server.get("/v1/models/alias").json()["id"] == "alias"
    for name in ("reverse", "alias", str(MODEL), None):
        assert complete(server, prompt="abc", model=name)["model"] == (name or "reverse")
    refused = server.post("/v1/completions", {"prompt": "abc", "model": "gpt"})
    assert refused.status_code == 404 and "'reverse', 'alias'" in refused.json()["error"]["message"]


def test_every_form_of_prompt_gives_the_offline_tokens(server: Served) -> None:
    with LLM(str(MODEL), num_threads=1, num_blocks=64) as llm:
        ids = [llm.text.encode(t) for t in ("abc", "de")]
        wanted = [o.outputs[0] for o in llm.generate(ids, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)]
    forms: list[tuple[Any, int]] = [("abc", 1), (["abc", "de"], 2), (ids[0], 1), (ids, 2)]
    for prompt, number in forms:
        answer = complete(server, prompt=prompt, return_token_ids=True)
        assert [c["token_ids"] for c in answer["choices"]] == [w.token_ids for w in wanted[:number]]
        assert [c["prompt_token_ids"] for c in answer["choices"]] == ids[:number]
        assert [c["text"] for c in answer["choices"]] == [w.text for w in wanted[:number]]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids[:number]))
        assert answer["usage"]["completion_tokens"] == sum(len(w.token_ids) for w in wanted[:number])
    for bad in ("", [], [[]], [1, "a"], [-1], [[1], "a"], [True], [10**6], None, {}, [[1], []]):
        response = server.post("/v1/completions", {"prompt": bad})
        assert response.status_code == 400, (bad, response.text)


def test_choices_are_prompt_major_and_carry_the_seed_that_made_them(server: Served) -> None:
    ids = [[4, 5, 6], [7, 8]]
    answer = complete(
        server, prompt=ids, n=3, temperature=1.5, seed=(1 << 62) + 5, return_token_ids=True, ignore_eos=True
    )
    choices = answer["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert [c["prompt_token_ids"] for c in choices] == [ids[0]] * 3 + [ids[1]] * 3
    assert choices[0]["seed"] == choices[3]["seed"] == (1 << 62) + 5
    for choice in choices:
        again = complete(
            server,
            prompt=choice["prompt_token_ids"],
            temperature=1.5,
            seed=choice["seed"],
            return_token_ids=True,
            ignore_eos=True,
        )
        assert again["choices"][0]["token_ids"] == choice["token_ids"]
    unseeded = complete(server, prompt=ids[0], temperature=2.0, return_token_ids=True, ignore_eos=True)["choices"][0]
    again = complete(
        server, prompt=ids[0], temperature=2.0, return_token_ids=True, ignore_eos=True, seed=unseeded["seed"]
    )
    assert again["choices"][0]["token_ids"] == unseeded["token_ids"]


def test_logprobs_in_the_shapes_that_clients_parse(server: Served) -> None:
    plain = complete(server, prompt="abc", logprobs=3, ignore_eos=True, return_token_ids=True)["choices"][0]
    found = plain["logprobs"]
    assert "".join(found["tokens"]) == plain["text"] or "<" in "".join(found["tokens"])
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["text_offset"]) == 6
    assert all(3 <= len(top) <= 4 for top in found["top_logprobs"])
    named = complete(server, prompt="abc", logprobs=0, ignore_eos=True, return_tokens_as_token_ids=True)["choices"][0]
    assert named["logprobs"]["tokens"] == [f"token_id:{t}" for t in plain["token_ids"]]
    assert named["logprobs"]["token_logprobs"] == found["token_logprobs"]
    assert [list(top) for top in named["logprobs"]["top_logprobs"]] == [[t] for t in named["logprobs"]["tokens"]]
    assert complete(server, prompt="abc", logprobs=True)["choices"][0]["logprobs"] is not None
    assert complete(server, prompt="abc", logprobs=False)["choices"][0]["logprobs"] is None
    assert complete(server, prompt="abc")["choices"][0]["logprobs"] is None

    body = {
        "token_ids": [4, 5, 6],
        "sampling_params": {
            "temperature": 0,
            "max_tokens": 6,
            "ignore_eos": True,
            "logprobs": 2,
            "output_kind": 2,
            "routed_experts_prompt_start": 1,
        },
    }
    choice = server.post("/inference/v1/generate", body).json()["choices"][0]
    assert choice["token_ids"] == plain["token_ids"]
    for token, entry, wanted in zip(
        choice["token_ids"], choice["logprobs"]["content"], found["token_logprobs"], strict=True
    ):
        assert entry["token"] == f"token_id:{token}" and entry["token_id"] == token and entry["logprob"] == wanted
        assert (
            len(entry["top_logprobs"]) == 2
            and entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
        )
    teacher = complete(server, prompt=[[4, 5, 6]], max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert teacher[0] is None and [next(iter(p)) for p in teacher[1:]] == ["5", "6"]
    assert all({"logprob", "rank"} <= entry.keys() for p in teacher[1:] for entry in p.values())
    body["sampling_params"] = {"max_tokens": 1, "prompt_logprobs": 2}
    assert [p and list(p) for p in server.post("/inference/v1/generate", body).json()["prompt_logprobs"]] == [
        p and list(p) for p in teacher
    ]


def test_alternatives_of_the_same_text_do_not_replace_each_other() -> None:
    entries = {7: Logprob(-3.0, 4, "\ufffd"), 1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "\ufffd")}
    entries[3] = Logprob(-2.0, 3, "\ufffd")
    out = CompletionOutput(0, token_ids=[7], logprobs=[entries])
    found = shapes.completion_logprobs(out, 0, 1, as_ids=False, text_offset=0)
    assert found is not None and found["tokens"] == ["\ufffd"] and found["token_logprobs"] == [-3.0]
    assert found["top_logprobs"] == [{"\ufffd": -3.0, "a": -0.5, "token_id:2": -1.0, "token_id:3": -2.0}]


def test_infinite_logprobs_are_clamped() -> None:
    assert [shapes.finite(x) for x in (-math.inf, math.nan, -1e9, -0.5)] == [-9999.0, -9999.0, -9999.0, -0.5]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_a_stream_adds_up_to_the_document(server: Served, path: str) -> None:
    sampling: dict[str, Any] = {
        "temperature": 1.3,
        "seed": 5,
        "n": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "logprobs": 1,
    }
    if path == "/v1/completions":
        body: dict[str, Any] = {"prompt": [[4, 5, 6], [7, 8]], **sampling}
    elif path == "/v1/chat/completions":
        message = {"role": "user", "content": "abc"}
        body = {"messages": [message], **sampling, "logprobs": True, "top_logprobs": 1, "chat_template": TEMPLATE}
    else:
        body = {"token_ids": [4, 5, 6], "sampling_params": sampling, "output_mode": "text"}
    body.update(return_token_ids=True, return_weight_versions=True)
    whole = server.post(path, body).json()
    chunks = stream(server, path, **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    for wanted in whole["choices"]:
        parts = [c for e in chunks for c in e["choices"] if c["index"] == wanted["index"]]
        assert [t for p in parts for t in p.get("token_ids", [])] == wanted["token_ids"]
        assert parts[-1]["finish_reason"] == wanted["finish_reason"] == "length"
        assert parts[-1]["seed"] == wanted["seed"]
        assert (
            parts[-1]["weight_versions"]
            == wanted["weight_versions"]
            == [{"version": "0", "number": 0, "start": 0, "end": 9}]
        )
        said = [("weight_versions" in p) for p in parts if p.get("token_ids")]  # two steps may share a chunk
        assert said[0] and said[-1] and not any(said[1:-1])
        if path == "/v1/chat/completions":
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(p["delta"]["content"] for p in parts) == wanted["message"]["content"]
        else:
            assert "".join(p["text"] for p in parts) == wanted["text"]
        if path == "/v1/completions":
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [x for p in parts for x in p["logprobs"][key]] == wanted["logprobs"][key]
        else:
            joined = [x for p in parts if p["logprobs"] for x in p["logprobs"]["content"]]
            assert joined == wanted["logprobs"]["content"]
    ids = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
    first = chunks[0]
    assert (first.get("prompt_token_ids") or first["choices"][0]["prompt_token_ids"]) == ids == [4, 5, 6]


def test_chat_goes_through_the_template_with_its_arguments(server: Served) -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    base = {**GREEDY, "messages": messages, "chat_template": TEMPLATE, "return_token_ids": True, "tool_choice": "none"}
    answer = server.post(
        "/v1/chat/completions", {**base, "chat_template_kwargs": {"extra": "de"}, "max_completion_tokens": 3}
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    letters = server.post("/tokenize", {"prompt": "abcde"}).json()["tokens"]
    assert found["prompt_token_ids"] == letters and found["object"] == "chat.completion"
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert (
        found["choices"][0]["message"]["content"]
        == complete(server, prompt=letters, max_tokens=6)["choices"][0]["text"]
    )
    assert found["choices"][0]["logprobs"] is None
    plain = server.post("/v1/chat/completions", {**GREEDY, "messages": messages})
    assert plain.status_code == 400 and "chat template" in plain.json()["error"]["message"]
    for wrong in (
        {"tool_choice": "auto"},
        {"chat_template": "{{ raise_exception('no') }}"},
        {"chat_template": "{% bad"},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ):
        assert server.post("/v1/chat/completions", {**base, **wrong}).status_code == 400
    by_messages = server.post("/tokenize", {"messages": messages, "chat_template": TEMPLATE}).json()
    assert by_messages["tokens"] == letters[:3] and by_messages["max_model_len"] == 512


def test_tokenize_and_detokenize(server: Served) -> None:
    found = server.post("/tokenize", {"prompt": "abc", "return_token_strs": True, "add_special_tokens": False}).json()
    assert found == {"count": 3, "max_model_len": 512, "tokens": [4, 5, 6], "token_strs": ["a", "b", "c"]}
    assert server.post("/detokenize", {"model": "reverse", "tokens": [4, 5, 6]}).json() == {"prompt": "abc"}
    assert "<eos>" in server.post("/detokenize", {"tokens": [4, 0, 1, 2, 3]}).json()["prompt"]
    for bad in ({}, {"prompt": "a", "messages": []}, {"prompt": 3}, {"messages": []}):
        assert server.post("/tokenize", bad).status_code == 400
    for bad in ({}, {"tokens": "a"}, {"tokens": [-1]}, {"tokens": [1 << 40]}):
        assert server.post("/detokenize", bad).status_code == 400


def test_ids_outside_the_vocabulary_are_refused_with_the_range(server: Served) -> None:
    for wrong in (44, 1 << 32, 1 << 63, 1 << 200):
        answer = server.post("/detokenize", {"tokens": [4, wrong]})
        said = answer.json()["error"]["message"]
        assert answer.status_code == 400 and str(wrong) in said and "[0, 43]" in said
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert server.post("/detokenize", {"tokens": [43]}).status_code == 200


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({}, "messages.1.role"),
        ({"content": "a"}, "messages.1.role"),
        ({"role": 3, "content": "a"}, "messages.1.role"),
        ({"role": None, "content": "a"}, "messages.1.role"),
        ({"role": "user", "content": 3}, "messages.1.content"),
        ({"role": "user", "content": {"text": "a"}}, "messages.1.content"),
        ({"role": "user", "content": False}, "messages.1.content"),
        ({"role": "user", "content": ["a"]}, "messages.1.content"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages.1.content"),
        ("a", "messages.1"),
    ],
)
def test_a_message_that_is_none_is_named(server: Served, message: Any, where: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}, message], "chat_template": TEMPLATE}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{where}: "), answer.text
    body["messages"] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert server.post("/tokenize", body).status_code == 200


@pytest.mark.parametrize("name", ["messages", "self", "conversation", "tokenize", "tools", "time_limit_s", "max_chars"])
def test_arguments_that_are_not_the_template_s_are_refused(server: Served, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template": TEMPLATE}
    answer = server.post("/v1/chat/completions", {**body, "chat_template_kwargs": {name: "abc"}})
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400 and said.startswith(f"chat_template_kwargs: {name} ")
    fine = {"chat_template_kwargs": {"add_generation_prompt": False, "extra": "c"}}
    assert server.post("/tokenize", {**body, **fine}).json()["count"] == 1


DEEP: Any = []
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "wrong",
    [False, True, 0, 1, 0.0, [], [{}], "", "false", "3", "[]", "{", "[" * 100_000, "NaN", DEEP],
    ids=lambda v: type(v).__name__,
)
def test_a_schema_is_an_object_or_the_text_of_one(wrong: Any) -> None:
    for wanted in ({"json": wrong}, {"json": wrong, "json_object": False}):
        body = CompletionBody.model_validate({"prompt": "a", "structured_outputs": wanted})
        with pytest.raises(InvalidInput, match="structured_outputs: json"):
            parsed(body)


def test_structured_outputs_as_clients_write_them_out() -> None:
    for wanted, found in (
        ({"json": {"type": "object"}, "regex": None, "disable_fallback": False}, '{"type": "object"}'),
        ({"json": '{"type":"object"}'}, '{"type":"object"}'),
        ({"json_object": True}, '{"type": "object"}'),
        ({"json_object": False}, None),
        ({}, None),
    ):
        params = parsed(CompletionBody.model_validate({"prompt": "a", "structured_outputs": wanted}))
        assert (params.structured_outputs.json if params.structured_outputs else None) == found
    for wrong in ({"regex": False}, {"choice": 0}, {"json_object": 0}, {"json_object": "no"}):
        with pytest.raises(InvalidInput, match="structured_outputs"):
            parsed(CompletionBody.model_validate({"prompt": "a", "structured_outputs": wrong}))


def parsed(body: CompletionBody) -> SamplingParams:
    return body.sampling_params(ServerSettings(), logprobs=None, max_tokens=4, detokenize=True, is_stream=False)


def test_case_102_ids_that_do_not_survive_text_come_back_as_they_are(server: Served) -> None:
    prompt = [2, 4, 1, 1, 5, 2, 0, 6]  # special tokens inside: decoding and encoding them gives other ids
    text = server.post("/detokenize", {"tokens": prompt}).json()["prompt"]
    shown = "".join(c for c in text if c.isalpha())
    assert server.post("/tokenize", {"prompt": shown}).json()["tokens"] != prompt
    sampling = {"temperature": 1.7, "seed": 11, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": prompt, "sampling_params": sampling, "return_token_ids": True}
    first = server.post("/inference/v1/generate", body).json()
    assert first["prompt_token_ids"] == prompt
    other = server.post("/v1/completions", {"prompt": prompt, **sampling, "return_token_ids": True}).json()["choices"][
        0
    ]
    assert other["token_ids"] == first["choices"][0]["token_ids"] and other["prompt_token_ids"] == prompt
    # turn 2 = prompt + ids + suffix, never re-encoded; its prompt logprobs are those that turn 1 reported
    made = first["choices"][0]["token_ids"]
    again = {
        "token_ids": [*prompt, *made, 7],
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0},
        "return_token_ids": True,
    }
    second = server.post("/inference/v1/generate", again).json()
    assert second["prompt_token_ids"] == [*prompt, *made, 7]
    scored = second["prompt_logprobs"][len(prompt) : len(prompt) + len(made)]
    reported = [c["logprob"] for c in first["choices"][0]["logprobs"]["content"]]
    assert [entry[str(token)]["logprob"] for entry, token in zip(scored, made, strict=True)] == reported


def test_stop_texts_and_ids_and_the_kept_set(server: Served) -> None:
    base = {"prompt": "abc", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    whole = complete(server, **base, return_token_ids=True)["choices"][0]
    letter = whole["text"][0]
    stopped = complete(server, **base, stop=[letter], return_token_ids=True)["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == letter and stopped["text"] == ""
    by_id = complete(server, **base, stop_token_ids=[whole["token_ids"][2]], return_token_ids=True)["choices"][0]
    assert by_id["finish_reason"] == "stop" and by_id["stop_reason"] == whole["token_ids"][2]
    assert by_id["token_ids"] == whole["token_ids"][: len(by_id["token_ids"])]
    kept = complete(server, prompt="abc", temperature=1.0, top_k=3, return_sampling_mask=True, return_token_ids=True)[
        "choices"
    ][0]
    assert len(kept["sampling_mask"]) == len(kept["token_ids"])
    assert all(t in mask and len(mask) == 3 for t, mask in zip(kept["token_ids"], kept["sampling_mask"], strict=True))


def test_unknown_keys_are_ignored_and_options_that_matter_are_refused(server: Served) -> None:
    harmless = {
        "session_id": "s",
        "some_new_key": [1],
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "best_of": 1,
        "echo": False,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "user": "u",
        "stop": None,
        "seed": None,
    }
    assert (
        server.post(
            "/v1/completions", {**GREEDY, "prompt": "abc", **harmless}, headers={"X-Session-ID": "t"}
        ).status_code
        == 200
    )
    refused: list[dict[str, Any]] = [
        {"frequency_penalty": 0.5},
        {"logit_bias": {"5": 1}},
        {"echo": True},
        {"best_of": 4},
        {"guided_json": {}},
        {"min_tokens": 4},
        {"use_beam_search": True},
        {"n": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"seed": 1 << 63},
        {"seed": 1 << 90},
        {"logprobs": 21},
        {"max_tokens": 0},
        {"stop": [1]},
        {"stop_token_ids": [99999]},
        {"n": 17},
        {"structured_outputs": {"json": {}, "regex": "a"}},
        {"response_format": {"type": "x"}},
        {"temperature": "hot"},
        {"stream": "yes"},
        {"cache_salt": 5},
        {"request_id": ""},
    ]
    for extra in refused:
        response = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 4, **extra})
        assert response.status_code == 400, (extra, response.text)
        error = response.json()["error"]
        assert error["message"] and error["type"] and error["code"] == 400
    for extra in ({"features": {"a": 1}}, {"kv_transfer_params": {"a": 1}}, {"token_ids": []}, {"output_mode": "x"}):
        assert server.post("/inference/v1/generate", {"token_ids": [4], **extra}).status_code == 400


def test_cache_salts_separate_and_usage_shows_hits(server: Served) -> None:
    prompt = [4 + i % 30 for i in range(64)]

    def cached(**extra: Any) -> int:
        usage = complete(server, prompt=prompt, max_tokens=1, priority=3, **extra)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="v1") == 0
    assert cached(cache_salt="v1") >= 48
    assert cached(cache_salt="v2") == 0


def test_json_never_holds_what_json_does_not_have(server: Served) -> None:
    raw = server.http.post(
        "/v1/completions",
        content=b'{"prompt": "abc", "temperature": NaN}',
        headers={"content-type": "application/json"},
    )
    assert raw.status_code == 400 and json.loads(raw.text)
    for text in (
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\ud800"}',
        b'{"prompt": "a", "cache_salt": "\\ud800"}',
        b'{"prompt": "a", "session": "\\ud800", "request_id": "k\\ud800"}',
        b"{",
        b"[]",
        b"",
        b"null",
        b"\xff",
    ):
        response = server.http.post("/v1/completions", content=text, headers={"content-type": "application/json"})
        assert response.status_code == 400, (text, response.text)
