"""``midstream serve``: flags, made from the fields of EngineConfig and ServerSettings and their docstrings."""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import inspect
import json
import logging
import os
import textwrap
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from midstream.config import EngineConfig
from midstream.errors import InvalidInput
from midstream.serving.settings import ServerSettings

DESCRIPTION = """\
Serve a model over HTTP: OpenAI's and vLLM's generation routes, and vLLM's routes for RL (pause, resume, weight
updates), for trainers that drive it while it generates. Flags have vLLM's names where it has one."""
EPILOG = """\
examples:
  midstream serve DIR                                    http://127.0.0.1:8000, control beside generation
  midstream serve org/name --revision main               a model of the Hub: from the cache, or downloaded
  midstream serve DIR --dtype float32 --weight-transfer-config '{"backend": "nccl"}'
  midstream serve DIR --data-parallel-size 2 --enable-expert-parallel          the experts of a MoE over two processes
  midstream serve DIR --data-parallel-size 2 --data-parallel-rank 0 --data-parallel-address 10.0.0.5:5555
  midstream serve DIR --data-parallel-size 2 --data-parallel-rank 1 --data-parallel-address 10.0.0.5:5555  (elsewhere)
  midstream serve DIR --host 0.0.0.0 --api-key K --control-token T             every route behind a Bearer token
  midstream serve DIR --host 0.0.0.0 --control-host 10.0.0.5 --control-port 8001     control on a private address
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Hello", "max_tokens": 8}'
  curl -X POST 'localhost:8000/pause?mode=keep'; curl localhost:8000/status; curl -X POST localhost:8000/resume

--api-key and --control-token can come from MIDSTREAM_API_KEY and MIDSTREAM_CONTROL_TOKEN, where nobody sees them in a
list of processes. Ctrl-C and SIGTERM end the server within seconds: requests end with what they have."""

_ENGINE_FLAGS = {
    "revision": "--revision",
    "dtype": "--dtype",
    "device": "--device",
    "tokenizer": "--tokenizer",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "kv_cache_bytes": "--kv-cache-memory-bytes",
    "enable_prefix_caching": "--enable-prefix-caching",
    "num_threads": "--num-threads",
    "data_parallel_size": "--data-parallel-size",
    "data_parallel_rank": "--data-parallel-rank",
    "data_parallel_size_local": "--data-parallel-size-local",
    "data_parallel_address": "--data-parallel-address",
    "enable_expert_parallel": "--enable-expert-parallel",
    "dp_vote": "--dp-vote",
    "dp_sync_interval": "--dp-sync-interval",
    "dp_timeout_s": "--dp-timeout-s",
    "elastic": "--elastic",
    "update_lease_s": "--update-lease-s",
    "initial_version": "--initial-version",
    "step_log": "--step-log",
}
_TRANSFER_KEYS = {
    "backend": "weight_transfer_backend",
    "default_mode": "default_update_mode",
    "default_cast": "default_cast",
}
"""Keys of --weight-transfer-config that are the engine's; the others go to the backend, unread."""
_SECRETS = {"api_key": "MIDSTREAM_API_KEY", "control_token": "MIDSTREAM_CONTROL_TOKEN"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag of the command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a directory of safetensors in Hugging Face format, a GGUF file, or org/name on the Hugging Face Hub "
        "(the cache, or a download)",
    )
    engine = parser.add_argument_group("engine")
    _add_flags(engine, EngineConfig, _ENGINE_FLAGS)
    engine.add_argument(
        "--weight-transfer-config",
        metavar="JSON",
        default="{}",
        help='how weights arrive: {"backend": "nccl"}; "default_mode": "partial" takes updates of some tensors only, '
        '"default_cast": "allow" other floating dtypes',
    )
    flags = {f.name: "--" + f.name.replace("_", "-") for f in fields(ServerSettings)}
    _add_flags(parser.add_argument_group("server"), ServerSettings, flags)


def _add_flags(group: argparse._ArgumentGroup, config: type[Any], flags: dict[str, str]) -> None:
    hints, docs = get_type_hints(config), _field_docs(config)
    for f in fields(config):
        if f.name not in flags:
            continue
        kinds = [kind for kind in get_args(hints[f.name]) or (hints[f.name],) if kind is not type(None)]
        default = None if f.default is MISSING else f.default
        text = docs.get(f.name, "").replace("%", "%%")
        options: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": text}
        if default not in (None, (), False):
            options["help"] = f"{text} (default: {default})"
        if bool in kinds:
            options["action"] = argparse.BooleanOptionalAction if default is not False else "store_true"
        elif get_origin(hints[f.name]) is Literal:
            options["choices"] = list(get_args(hints[f.name]))
        elif get_origin(hints[f.name]) is tuple:
            options.update(nargs="+", metavar="NAME")
        else:
            kind = int if int in kinds else float if float in kinds else str
            options.update(type=kind, metavar={int: "N", float: "S", str: "TEXT"}[kind])
        group.add_argument(flags[f.name], **options)


def _field_docs(config: type[Any]) -> dict[str, str]:
    """The text under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of AsyncLLM."""
    given = vars(arguments)
    options = {name: given[name] for name in _ENGINE_FLAGS if name in given}
    try:
        transfer = json.loads(arguments.weight_transfer_config)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"--weight-transfer-config is not JSON: {error}") from error
    if not isinstance(transfer, dict):
        raise InvalidInput(f'--weight-transfer-config takes an object like {{"backend": "nccl"}}, got {transfer!r}')
    options.update({_TRANSFER_KEYS[key]: value for key, value in transfer.items() if key in _TRANSFER_KEYS})
    extra = {key: value for key, value in transfer.items() if key not in _TRANSFER_KEYS}
    return {"model": arguments.model, **options, **({"extra": extra} if extra else {})}


def server_settings(arguments: argparse.Namespace) -> ServerSettings:
    given = vars(arguments)
    secrets = {name: os.environ[variable] for name, variable in _SECRETS.items() if variable in os.environ}
    return ServerSettings(**{**secrets, **{f.name: given[f.name] for f in fields(ServerSettings) if f.name in given}})


def control_routes(settings: ServerSettings, url: str | None) -> str:
    """What the banner says after the word control."""
    guard = "behind --control-token" if settings.control_token else "open"
    if settings.has_control_address:
        return f"on {url}, {guard}"
    return (settings.control_off or guard).removeprefix("control routes are ")


def _part(config: EngineConfig) -> str:
    """What this command is of an engine over several nodes."""
    own = ", ".join(map(str, config.local_ranks)) or "none"
    if not config.owns_engine:
        return f"launches ranks: {own}; the engine is at {config.data_parallel_address}"
    others = ", ".join(str(r) for r in range(config.data_parallel_size) if r not in config.local_ranks) or "none"
    return f"launches ranks: {own}; at {config.data_parallel_address} others are waited for: {others}"


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Exit code 0; an engine that dies is an error."""
    options, settings = engine_options(arguments), server_settings(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from midstream.serving.async_llm import AsyncLLM
    from midstream.serving.server import HTTPServer, memory_plan

    print(f"midstream: loading {options['model']} …", flush=True)
    llm = AsyncLLM(**options)
    name = llm.config.model_name
    model = f"{name} at {llm.config.revision}, in {llm.config.model}" if name else llm.config.model
    server = HTTPServer(llm, settings)
    if llm.config.data_parallel_address is not None:
        print(f"midstream: {_part(llm.config)}", flush=True)

    def ready(status: dict[str, Any]) -> None:
        generation = "behind --api-key" if settings.api_key else "open"
        print(f"midstream: serving {server.front.names[0]} on {server.url}")
        print(f"  model    {model}, weight version {status['version']!r} ({status['weights_id'][:12]})")
        print(f"  memory   {memory_plan(llm, status)}")
        control = control_routes(settings, server.control_url)
        print(f"  routes   generation {generation}; control {control}; weights by {llm.config.weight_transfer_backend}")
        # What imports made stays: without this each collection, and the interpreter's end, looks through all of it.
        gc.collect()
        gc.freeze()
        print("  Ctrl-C ends it", flush=True)

    asyncio.run(server.run(ready))
    print("midstream: ended; every request was answered", flush=True)
    return 0
