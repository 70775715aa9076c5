"""Models named by id: ``org/name``, found in the Hugging Face cache or downloaded into it.

Everything below works on paths, so this happens once, in the process of whoever starts an engine or a trainer. The
cache comes first: what is there whole is used without a word to the network, also when the branch has moved on since.
Only what the engine reads is fetched, the weights last, so that weights at rest mean that the rest is there too.
``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and ``HF_ENDPOINT`` mean what they mean everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from midstream.config import EngineConfig
from midstream.errors import InvalidInput, ModelLoadError
from midstream.models.shards import INDEX, shard_names

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./-]+\.gguf))?",
    re.ASCII,
)
_SMALL = ("*config.json", "token*", "vocab*", "merges.txt", "*tokens*.json", "chat_template*", INDEX)
"""Configuration and tokenizer. No other JSON: some repositories have large ones."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def located(config: EngineConfig) -> EngineConfig:
    """``config`` with a model that is here: of an id its directory (or GGUF file) and its commit, and the id itself as
    ``model_name``. Raises ModelLoadError."""
    path, commit = locate(config.model, config.revision)
    if commit is None:
        return config
    return dataclasses.replace(config, model=path, revision=commit, model_name=config.model)


def locate(model: str, revision: str | None = None, weights: bool = True) -> tuple[str, str | None]:
    """Where ``model`` is on this machine, and its commit if it is one of the Hub.

    ``model``: a path; or ``org/name``, ``org/name@revision``, ``org/name:file.gguf``. A path that exists wins, and what
    does not look like an id is handed back as it is. ``weights``: False for the configuration and tokenizer alone.
    """
    match = _ID.fullmatch(model)
    if match is None or match["repo"].endswith((".gguf", ".safetensors")) or Path(model).expanduser().exists():
        if revision is not None:
            raise InvalidInput(
                f"revision {revision!r} goes with a model of the Hub (org/name), and {model!r} is a path"
            )
        return model, None
    repo, file = match["repo"], match["file"]
    if revision is not None and match["revision"] not in (None, revision):
        raise InvalidInput(f"{model!r} names one revision and --revision another: {revision!r}")
    revision = match["revision"] or revision or "main"
    if ".." in revision or ".." in (file or ""):
        raise InvalidInput(f"{model!r}: a revision or file does not contain '..'")
    from huggingface_hub import constants

    snapshot = _cached(repo, revision)
    path, lacks = _look(snapshot, file, weights) if snapshot else (None, ["everything"])
    if constants.HF_HUB_OFFLINE and lacks not in ([], ["a tokenizer"]):
        raise ModelLoadError(
            f"{model} is not a path here, and HF_HUB_OFFLINE is set while the cache ({constants.HF_HUB_CACHE}) lacks "
            f"{', '.join(lacks)} of it (revision {revision}): download it once, or give a directory"
        )
    if lacks and not constants.HF_HUB_OFFLINE:
        with _explained(model, repo, revision):
            snapshot = _download(repo, revision, file, weights)
        path, lacks = _look(snapshot, file, weights)
        if lacks not in ([], ["a tokenizer"]):
            raise ModelLoadError(f"{model}: {repo} (revision {revision}) has no {', '.join(lacks)}")
    assert snapshot is not None and path is not None
    return str(path), snapshot.name


def _cached(repo: str, revision: str) -> Path | None:
    """The snapshot that the cache has of ``revision``, whole or not."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    ref = folder / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    return found if (found := folder / "snapshots" / commit).is_dir() and "/" not in commit else None


def _look(snapshot: Path, file: str | None, weights: bool) -> tuple[Path, list[str]]:
    """What in a snapshot is the model, and what it lacks."""
    if file is not None:
        return snapshot / file, [] if (snapshot / file).is_file() else [file]
    held = sorted(path.name for path in snapshot.glob("*.safetensors"))
    if not (snapshot / "config.json").is_file():
        ggufs = list(snapshot.glob("*.gguf"))
        return (ggufs[0], []) if len(ggufs) == 1 and not held else (snapshot, ["config.json"])
    lacks = [] if any((snapshot / name).is_file() for name in _TOKENIZERS) else ["a tokenizer"]
    if weights and (snapshot / INDEX).is_file():
        lacks += [name for name in shard_names(snapshot / INDEX) if name not in held]
    elif weights and (not held or re.search(r"-\d+-of-\d+\.safetensors$", held[0])):
        lacks.append(INDEX if held else "weights")
    return snapshot, lacks


def _download(repo: str, revision: str, file: str | None, weights: bool) -> Path:
    """What the engine reads of ``repo``, into the cache; its snapshot. The library shows the progress."""
    from huggingface_hub import HfApi, snapshot_download

    names = {entry.rfilename for entry in HfApi().model_info(repo, revision=revision).siblings or ()}
    top = sorted(name for name in names if "/" not in name)
    small = [name for name in top if file is None and any(fnmatch(name, pattern) for pattern in _SMALL)]
    tensors = [name for name in top if name.endswith(".safetensors")]
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if file is not None:
        if file not in names:
            raise ModelLoadError(f"{repo} (revision {revision}) has no {file}; its GGUF files: {', '.join(ggufs)}")
        tensors = [file]
    elif "model.safetensors" in tensors:  # others beside it are the same weights in another layout
        tensors = ["model.safetensors"]
    elif not tensors and len(ggufs) == 1:
        small, tensors = [], ggufs
    elif not tensors:
        hint = f"; name one of its GGUF files: {repo}:{ggufs[0]}, …" if ggufs else ""
        raise ModelLoadError(f"{repo} (revision {revision}) has no safetensors{hint}")
    commit = revision
    if small:
        commit = (snapshot := Path(snapshot_download(repo, revision=revision, allow_patterns=small))).name
        if INDEX in small:
            tensors = shard_names(snapshot / INDEX)
    if weights or not small:
        snapshot = Path(snapshot_download(repo, revision=commit, allow_patterns=tensors))
    return snapshot


@contextlib.contextmanager
def _explained(model: str, repo: str, revision: str) -> Iterator[None]:
    """What the library raises, as one sentence with a remedy."""
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/{repo}"
    try:
        yield
    except ModelLoadError:
        raise
    except errors.GatedRepoError as error:
        raise ModelLoadError(f"{repo} is gated: accept its terms at {where}, then set HF_TOKEN to a token") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no model {model}: there is no such path here, and no {where} (if it is private, set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo} has no revision {revision!r}: see {where}/tree/main") from error
    except Exception as error:
        if any(getattr(cause, "errno", None) == errno.ENOSPC for cause in _chain(error)):
            why = f"the disk of the cache ({constants.HF_HUB_CACHE}) is full: make room, or set HF_HOME"
        elif isinstance(error, errors.HfHubHTTPError):
            why = f"the Hub answers {error}"
        else:
            why = (
                f"the Hub ({constants.ENDPOINT}) can not be reached, or the download broke off "
                f"({type(error).__name__}: {error}); what is here already is kept, so try again or give a directory"
            )
        raise ModelLoadError(f"{model} could not be fetched: {why}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
