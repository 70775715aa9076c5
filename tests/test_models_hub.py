"""Models by id: a cache laid out as the library does it, and a Hub on loopback that speaks what the library asks."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import midstream
from checkpoints import write_text_checkpoint
from midstream.cli import main
from midstream.config import EngineConfig
from midstream.errors import InvalidInput, ModelLoadError
from midstream.models.hub import locate, located
from midstream.models.loader import open_checkpoint
from midstream.serving.llm import LLM
from midstream.types import SamplingParams
from servers import served

torch.set_num_threads(1)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD = "f" * 40
ID = "acme/tiny-1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("m") / "w0", num_hidden_layers=1)


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache; the network is forbidden until a test has a Hub of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(
    cache: pathlib.Path, model: pathlib.Path, repo: str = ID, commit: str = COMMIT, ref: str = "main"
) -> pathlib.Path:
    """As a download leaves it: a blob for each file, a link to it from the snapshot, a ref with the commit."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        name = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, folder / "blobs" / name)
        (snapshot / file.name).symlink_to(pathlib.Path("../../blobs") / name)
    (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return snapshot


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_an_id_in_the_cache_is_the_directory_it_is_in(cache: pathlib.Path, model: pathlib.Path) -> None:
    now, old = put(cache, model), put(cache, model, commit=OLD, ref="v1/old")
    assert locate(ID) == (str(now), COMMIT)
    assert locate(f"{ID}@v1/old") == locate(ID, "v1/old") == locate(f"{ID}@{OLD}") == (str(old), OLD)
    found = located(EngineConfig(model=ID, revision="v1/old"))
    assert (found.model, found.model_name, found.revision) == (str(old), ID, OLD)


def test_a_path_is_a_path(cache: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, model)
    assert locate(str(model)) == (str(model), None)
    for text in ("./a/b", "/a/b", "~/b", "a", "a/b/c", "../b", "dir/m.gguf", "dir/m.safetensors", "a/b:c", ""):
        assert locate(text) == (text, None)
    monkeypatch.chdir(model.parent)
    (model.parent / "acme").mkdir()
    (model.parent / ID).symlink_to(model)
    assert locate(ID) == (ID, None), "what exists here wins"
    with pytest.raises(InvalidInput, match="is a path"):
        LLM(str(model), revision="main")
    for bad in ({"model": "a/b@v1", "revision": "v2"}, {"model": "a/b@../x"}, {"model": "a/b:../x.gguf"}):
        with pytest.raises(InvalidInput):
            locate(**bad)


def test_offline_it_says_what_the_cache_lacks(cache: pathlib.Path, model: pathlib.Path) -> None:
    def lacks(what: str, name: str = ID) -> None:
        with pytest.raises(ModelLoadError, match=f"HF_HUB_OFFLINE.*{re.escape(str(cache))}.*lacks {what} of it"):
            locate(name)

    lacks("everything")
    snapshot = put(cache, model)
    lacks("everything", f"{ID}@v2")
    lacks("q4.gguf", f"{ID}:q4.gguf")
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    lacks("model.safetensors.index.json")  # half a download
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))
    lacks(names[1])
    (snapshot / names[0]).unlink()
    (snapshot / "model.safetensors.index.json").unlink()
    lacks("weights")
    assert locate(ID, weights=False)[1] == COMMIT
    (snapshot / "config.json").unlink()
    lacks("config.json")
    (snapshot / "q4.gguf").write_bytes(b"GGUF")
    assert locate(ID) == locate(f"{ID}:q4.gguf") == (str(snapshot / "q4.gguf"), COMMIT)
    (snapshot / "q5.gguf").write_bytes(b"GGUF")
    lacks("config.json")  # two are one too many
    (snapshot / "model.safetensors.index.json").write_text("[]")
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="not an index of shards"):
        locate(ID)


def test_offline_a_model_without_tokenizer_serves_ids(cache: pathlib.Path, model: pathlib.Path) -> None:
    snapshot = put(cache, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).unlink()
    with LLM(ID, num_blocks=64) as llm:
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_the_engine_and_its_tokenizer_see_one_directory(cache: pathlib.Path, model: pathlib.Path) -> None:
    snapshot = put(cache, model)
    with LLM(str(model), num_blocks=64) as plain, LLM(ID, num_blocks=64) as llm:
        params = SamplingParams(max_tokens=5, temperature=0)
        found, wanted = (engine.generate("the", params)[0].outputs[0] for engine in (llm, plain))
        assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
        status = llm.status()
        assert (status["model"], status["revision"]) == (ID, COMMIT) and llm.config.model == str(snapshot)
        assert (plain.status()["model"], plain.status()["revision"]) == (str(model), None)


def test_the_server_is_called_by_the_id(cache: pathlib.Path, model: pathlib.Path) -> None:
    put(cache, model)
    with served(ID) as server:  # type: ignore[arg-type]
        assert [entry["id"] for entry in server.get("/v1/models").json()["data"]] == [ID]
        body = {"model": ID, "prompt": "the", "max_tokens": 2}
        assert server.post("/v1/completions", body).json()["model"] == ID
        status = server.status()
        assert (status["model"], status["revision"], status["server"]["model"]) == (ID, COMMIT, ID)
        info = server.get("/server_info?config_format=json").json()["vllm_config"]["model_config"]
        assert (info["model"], info["revision"], info["tokenizer"]) == (ID, COMMIT, ID)


def test_the_command_line_takes_an_id(
    cache: pathlib.Path, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, model)
    assert main(["train", "--model", f"{ID}@main", "--task", "reverse", "--dry-run"]) == 0
    assert f"model: {ID}@main at {COMMIT}" in capsys.readouterr().out
    assert main(["check", "exact", "--model", ID, "--prompts", "1", "--max-tokens", "2"]) == 0
    assert "exact: yes" in capsys.readouterr().out
    for command in (["serve", "acme/other"], ["check", "exact", "--model", "acme/other"]):
        assert main(command) == 1
        assert "acme/other is not a path here, and HF_HUB_OFFLINE is set" in capsys.readouterr().err


@pytest.mark.slow
def test_the_environment_says_where_the_cache_is(cache: pathlib.Path, model: pathlib.Path) -> None:
    put(cache, model)
    script = f"from midstream.models.hub import locate; print(locate({ID!r})[0])"
    path = str(pathlib.Path(midstream.__file__).parent.parent)
    home = {"HF_HOME": str(cache.parent), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | home
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert found.stdout.strip() == str(cache / "models--acme--tiny-1" / "snapshots" / COMMIT)


# -- the Hub -----------------------------------------------------------------------------------------------------------


class FakeHub(http.server.ThreadingHTTPServer):
    """The routes that a download uses, over the files of one directory."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Routes)
        self.files = files
        self.commit = COMMIT
        self.fetched: list[str] = []
        self.asked = 0
        self.token: str | None = None
        """Files need it; None: nobody does."""


class _Routes(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        hub.asked += 1
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+?))?/?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        if not found or found[1] != ID:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if (api and api[3] not in (None, "main", hub.commit)) or (file and file[2] not in ("main", hub.commit)):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if api and api[2] == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            return self.answer(200, json.dumps(entries).encode())
        if api:
            entries = [{"rfilename": name} for name in hub.files]
            return self.answer(200, json.dumps({"id": ID, "sha": hub.commit, "siblings": entries}).encode())
        assert file
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        if file[3] not in hub.files:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        data = hub.files[file[3]]
        if self.command == "GET":
            hub.fetched.append(file[3])
        headers = {"X-Repo-Commit": hub.commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        self.answer(200, data, headers)

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(cache: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The tiny model on a Hub, among files that nobody needs."""
    from huggingface_hub import constants

    files = {path.name: path.read_bytes() for path in model.iterdir()}
    waste = (
        "pytorch_model.bin",
        "onnx/model.onnx",
        "onnx/config.json",
        "consolidated.safetensors",
        "README.md",
        "q.gguf",
    )
    server = FakeHub({**files, "generation_config.json": b"{}", **dict.fromkeys(waste, b"waste"), "huge.json": b"{}"})
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("HF_TOKEN", "")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_what_the_cache_lacks_is_downloaded_and_nothing_else(
    hub: FakeHub, cache: pathlib.Path, model: pathlib.Path
) -> None:
    path, commit = locate(ID)
    assert commit == COMMIT and pathlib.Path(path).is_relative_to(cache)
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert set(hub.fetched) == {entry.name for entry in pathlib.Path(path).iterdir()} == wanted
    assert hub.fetched[-1] == "model.safetensors", "the weights last"
    assert (pathlib.Path(path) / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    open_checkpoint(path)
    asked = hub.asked
    assert locate(ID) == (path, commit) and hub.asked == asked, "the cache first: no word to the network"
    for name in ("model.safetensors", "tokenizer.json"):
        (pathlib.Path(path) / name).unlink()
        assert locate(ID) == (path, commit) and (pathlib.Path(path) / name).is_file()


def test_a_dry_run_downloads_no_weights(hub: FakeHub) -> None:
    path, _ = locate(ID, weights=False)
    assert "config.json" in hub.fetched and "model.safetensors" not in hub.fetched
    locate(ID, weights=False)
    assert len(hub.fetched) == len(set(hub.fetched)) and pathlib.Path(path).is_dir()


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    data = hub.files.pop("model.safetensors")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    hub.files |= dict.fromkeys([*names, "model-00003-of-00002.safetensors"], data)
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": dict(enumerate(names))}).encode()
    path, _ = locate(ID)
    assert sorted(entry.name for entry in pathlib.Path(path).glob("*.safetensors")) == names
    (pathlib.Path(path) / names[1]).unlink()  # half a download: the other half is fetched
    hub.fetched.clear()
    assert locate(ID)[0] == path and (pathlib.Path(path) / names[1]).is_file() and names[0] not in hub.fetched


def test_gguf_files_by_name_or_if_there_is_one(hub: FakeHub) -> None:
    hub.files = {"README.md": b"", "tiny.gguf": b"GGUF", "config.json": b"{}"}
    path, _ = locate(ID)
    assert path.endswith("/tiny.gguf") and hub.fetched == ["tiny.gguf"]
    assert locate(ID)[0] == path and hub.fetched == ["tiny.gguf"]
    hub.files["sub/other.gguf"] = b"GGUF2"
    hub.commit = OLD  # what one commit has does not change
    other, commit = locate(f"{ID}@{OLD}:sub/other.gguf")
    assert commit == OLD
    assert pathlib.Path(other).read_bytes() == b"GGUF2"
    with pytest.raises(ModelLoadError, match=r"has no q4.gguf; its GGUF files: sub/other.gguf, tiny.gguf"):
        locate(f"{ID}@{OLD}:q4.gguf")


def test_what_can_not_be_had_says_why(hub: FakeHub, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    with pytest.raises(ModelLoadError, match="no model acme/none: there is no such path here, and no http.*HF_TOKEN"):
        locate("acme/none")
    with pytest.raises(ModelLoadError, match="has no revision 'v9'"):
        locate(f"{ID}@v9")
    hub.files, files = {"README.md": b"", "a.gguf": b"", "b.gguf": b""}, hub.files
    with pytest.raises(ModelLoadError, match=f"no safetensors; name one of its GGUF files: {ID}:a.gguf"):
        locate(ID)
    hub.files = files
    hub.token = "secret"
    with pytest.raises(ModelLoadError, match="gated: accept its terms at http.*HF_TOKEN"):
        locate(ID)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert locate(ID, weights=False)[1] == COMMIT
    monkeypatch.setattr("huggingface_hub.file_download.http_get", _breaks)
    with pytest.raises(ModelLoadError, match="broke off.*try again"):
        locate(ID)
    full = OSError(errno.ENOSPC, "No space left on device")

    def no_room(*args: Any, **options: Any) -> str:
        raise full

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_room)
    with pytest.raises(ModelLoadError, match=f"the disk of the cache .{re.escape(str(cache))}. is full"):
        locate(ID)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelLoadError, match="http://127.0.0.1:9. can not be reached"):
        locate(ID)


def _breaks(*args: Any, **options: Any) -> None:
    raise ConnectionError("the other side hung up")
