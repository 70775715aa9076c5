"""Fuzz `midstream serve` from its own OpenAPI document, with schemathesis in whatever environment has it.

    python -m bench.fuzz_server --schemathesis PATH/TO/schemathesis --seconds 300

Valid and invalid requests on every route, generation and control, first route by route, then in random sequences.
A pause, a sleep or an open update may hold for a few calls; then everything is woken, so that one call does not refuse
all others.

One JSON line per route: {"route", "valid", "ok", "invalid", "declared_5xx", "faults", "slowest_s"}, and one for all.
"ok" are the valid requests answered 2xx. "declared_5xx" are 503 with Retry-After (paused), and 504 where the request
set a time limit. Exit 1: any other 5xx, a request that took longer than the limit, a failing check of schemathesis, a
server that died or has requests or blocks left over, or less than half of the valid requests ok.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from typing import Any

LIMIT_S = 20.0
EXAMPLES = "60"
"""Of each route and phase, before the random sequences."""
_HELD_CALLS = 4
"""For how many calls a pause, a sleep or an update holds."""
_LOG, _URL, _MODEL = "MIDSTREAM_FUZZ_LOG", "MIDSTREAM_FUZZ_URL", "MIDSTREAM_FUZZ_MODEL"
_CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"

if _LOG in os.environ:  # this file is schemathesis' hooks too
    import schemathesis

    _since_hold = 0
    _num_calls = 0
    _held: list[str] = []
    _last_call = time.monotonic()

    def _watch() -> None:
        """Where both workers wait in requests that a pause holds, nobody is left to count calls."""
        while True:
            time.sleep(1.0)
            if time.monotonic() - _last_call > LIMIT_S / 4:
                _wake(os.environ[_URL], os.environ[_MODEL])

    threading.Thread(target=_watch, daemon=True).start()

    @schemathesis.hook
    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        """Most request ids are made new ones: an id is an idempotency key, and under a used one another body is 409."""
        global _num_calls
        _num_calls += 1
        if isinstance(case.body, dict) and isinstance(case.body.get("request_id"), str) and _num_calls % 8:
            case.body["request_id"] = f"{_num_calls}-{case.body['request_id']}"[: max(len(case.body["request_id"]), 8)]

    @schemathesis.hook
    def after_call(context: Any, case: Any, response: Any) -> None:
        """Note what came back, and end a pause, a sleep or an update that has held for long enough."""
        global _since_hold, _last_call
        _last_call = time.monotonic()
        modes = [part.mode.value for part in case.meta.components.values()] if case.meta else ["none"]
        route = f"{case.method} {case.path}"
        note = {
            "route": route,
            "valid": all(mode == "positive" for mode in modes) and case.method.upper() == case.operation.method.upper(),
            "status": response.status_code,
            "s": response.elapsed,
            "body": repr(case.body)[:400],
            "query": repr(case.query)[:200],
            "text": response.text[:400] if response.status_code >= 400 else "",
            "declared": _is_declared(case, response),
        }
        with open(os.environ[_LOG], "a", encoding="utf-8") as log:
            log.write(json.dumps(note) + "\n")
        if case.path in ("/pause", "/sleep", "/start_weight_update") and response.status_code == 200:
            _held.append(route)
        if _held:
            _since_hold += 1
        if _since_hold > _HELD_CALLS:
            _wake(os.environ[_URL], os.environ[_MODEL])
            _held.clear()
            _since_hold = 0


def _is_declared(case: Any, response: Any) -> bool:
    """Whether an answer of 5xx is one that the request asked for: not now, come again; or a time limit of its own."""
    if response.status_code == 503:
        return "retry-after" in response.headers
    return response.status_code == 504 and "time" in repr(case.query) + repr(case.body)


def _post(url: str, path: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method="POST", headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _wake(url: str, model: str) -> None:
    """Bring the engine back from whatever it was asked to do, to the weights it started with. The other worker may
    interfere, by an update of its own say: then the next time does it."""
    _post(url, "/abort_weight_update")
    for path, body in (("/wake_up", None), ("/update_weights", {"weight_dir": model}), ("/resume?force=true", None)):
        status, text = _post(url, path, body)
        assert status in (200, 409), (path, status, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz midstream serve from its own OpenAPI document.")
    parser.add_argument("model", nargs="?", default="midstream/rl/models/reverse")
    parser.add_argument("--schemathesis", default="schemathesis", help="the command, in an environment of its own")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--backend", default="ipc")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--log", help="keep the note of every call here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(given.log or f"{folder}/calls.jsonl")
        log.write_text("")
        model = _with_chat_template(pathlib.Path(given.model), pathlib.Path(folder))
        command = [sys.executable, "-m", "midstream", "serve", str(model), "--port", "0", "--num-threads", "1"]
        command += ["--weight-transfer-config", json.dumps({"backend": given.backend})]
        with open(f"{folder}/server.log", "w") as errors:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            url = _url(server)
            start = time.monotonic()
            codes = []
            common = ["--checks", _CHECKS, "--request-timeout", str(LIMIT_S), "--workers", given.workers]
            common += ["--continue-on-failure", "--max-failures", "1000", "--no-color", "--generation-database", "none"]
            common += ["--suppress-health-check", "all", "--warnings", "off"]
            environment = {**os.environ, "SCHEMATHESIS_HOOKS": os.path.abspath(__file__)}
            environment |= {_LOG: str(log.absolute()), _URL: url, _MODEL: str(model.absolute())}
            for part in (["run", "--phases", "examples,coverage,fuzzing", "--max-examples", EXAMPLES], ["fuzz"]):
                left = given.seconds - (time.monotonic() - start)
                timed = [*part, "--max-time", str(int(left))] if part == ["fuzz"] else part
                done = subprocess.run(
                    [shutil.which(given.schemathesis) or given.schemathesis, *timed, f"{url}/openapi.json", *common],
                    env=environment,
                    cwd=folder,  # it leaves files where it runs
                    stdout=sys.stderr,
                    timeout=given.seconds * 2 + 60,
                )
                codes.append(done.returncode)
            alive = server.poll() is None
            idle = alive and _becomes_idle(url, str(model))
        finally:
            server.terminate()
            server.wait(10)
        print(pathlib.Path(f"{folder}/server.log").read_text()[-4000:], file=sys.stderr)
        return _report(log, codes, alive, idle)


def _with_chat_template(model: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """``model``, or a copy of it with a chat template where it has none."""
    config = json.loads((model / "tokenizer_config.json").read_text())
    if "chat_template" in config or (model / "chat_template.jinja").exists():
        return model
    copy = pathlib.Path(shutil.copytree(model, folder / "model"))
    config["chat_template"] = "{% for m in messages %}{{ m.role }}={{ m.content }},{% endfor %}"
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    return copy


def _becomes_idle(url: str, model: str) -> bool:
    """Whether nothing is left of all those requests once nobody asks any more."""
    _wake(url, model)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/status", timeout=LIMIT_S) as response:
            status = json.load(response)
        if not status["running"] + status["waiting"] + status["held"] + status["server"]["requests"]:
            return bool(status["num_free_blocks"] == status["num_blocks"])
    return False


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"on (http://\S+)", line):
            return found.group(1)
    raise SystemExit("the server did not start")


def _report(log: pathlib.Path, codes: list[int], alive: bool, idle: bool) -> int:
    calls = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    routes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    slowest: dict[str, float] = collections.defaultdict(float)
    for call in calls:
        for route in (call["route"], "all"):
            count = routes[route]
            count["valid" if call["valid"] else "invalid"] += 1
            count["ok"] += call["valid"] and 200 <= call["status"] < 300
            count["declared_5xx"] += call["status"] >= 500 and call["declared"]
            count["faults"] += call["status"] >= 500 and not call["declared"]
            slowest[route] = max(slowest[route], call["s"])
    methods = {call["route"] for call in calls if call["valid"]} | {"all"}  # the others are not in the document
    for route, count in sorted(routes.items(), key=lambda item: (item[0] == "all", item[0])):
        if route not in methods:
            continue
        names = ("valid", "ok", "invalid", "declared_5xx", "faults")
        print(json.dumps({"route": route, **{n: count[n] for n in names}, "slowest_s": round(slowest[route], 3)}))
    total = routes["all"]
    wrong = [f"schemathesis exit codes {codes}"] if any(codes) else []
    wrong += [] if alive else ["the server died"]
    wrong += [] if idle else ["requests or blocks are left over"]
    wrong += ["answers of 5xx"] if total["faults"] else []
    wrong += ["a slow answer"] if slowest["all"] > LIMIT_S else []
    wrong += ["less than half of the valid requests succeed"] if total["ok"] * 2 < total["valid"] else []
    print(json.dumps({"wrong": wrong}))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
