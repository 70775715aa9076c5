"""Who may import whom, checked on the source of every module (docs/architecture.md has the picture).

Every import counts: at the top of a module, inside a function, or under TYPE_CHECKING. Modules that do not exist yet
are skipped, so that a rule can be written down before its room is built.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "midstream"

BOTTOM = frozenset({"types", "config", "errors", "metrics"})
MAY_IMPORT: dict[str, frozenset[str]] = {
    "__main__": frozenset({"cli"}),
    "types": BOTTOM,
    "config": BOTTOM,
    "errors": BOTTOM,
    "metrics": BOTTOM,
    "ops": BOTTOM,
    "parallel": BOTTOM | {"ops"},
    "models": BOTTOM | {"ops", "parallel"},
    "kv": BOTTOM | {"ops", "parallel"},
    "weights": BOTTOM | {"ops", "parallel", "models.shards"},  # how a model directory is read stands in one place
    "engine": BOTTOM | {"ops", "parallel", "models", "kv", "weights"},
    "check": BOTTOM | {"engine"},
    "serving": BOTTOM | {"ops", "parallel", "models", "kv", "weights", "engine"},
    "serving.client": BOTTOM,  # rl's only view of the engine: nothing of the engine may come with it
    "rl": BOTTOM | {"ops", "models", "weights", "serving.client"},
}
"""Which parts each part may import, itself apart; the longest name that fits decides. ``cli`` may import everything."""

NO_TORCH = (
    "types", "config", "errors", "metrics",
    "kv.block_pool", "kv.manager",
    "engine.scheduler", "engine.protocol", "engine.vote", "engine.coordinator", "engine.merge", "check.scenarios",
    "engine.grammar", "engine.pipe",
    "weights.session", "weights.columns",
    "serving.client", "serving.router",
    "rl.types", "rl.buffer", "rl.advantage",
)  # fmt: skip

FOREIGN_HOMES: dict[str, tuple[str, ...]] = {
    "triton": ("ops",),
    "torch.distributed": ("parallel", "weights"),
    "socket": ("engine.pipe", "engine.process", "serving.link", "serving.server", "weights.nccl"),
    "msgspec": ("engine.process", "serving.link", "serving.answers"),
    "fastapi": ("serving",),
    "starlette": ("serving",),
    "pydantic": ("serving",),
    "pydantic_core": ("serving",),
    "uvicorn": ("serving",),
    "httpx": ("serving.client",),
    "transformers": ("serving.text", "models.loader"),
    "tokenizers": ("serving.text", "models.loader"),
    "jinja2": ("serving.text",),
    "llguidance": ("engine.grammar",),
    "gguf": ("models.loader",),
    "huggingface_hub": ("models.hub",),
    "prometheus_client": ("metrics",),
    "reasoning_gym": ("rl",),
    "matplotlib": ("rl", "cli"),
    "rich": ("rl", "serving", "cli"),
}
"""The parts that may import a foreign library, by the longest name that fits."""

FORBIDDEN_LIBRARIES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal")
"""They run code, or trust bytes, that may come from somebody else."""

PRIVATE_TORCH_HOME = "ops.layers"


@dataclass(frozen=True)
class Import:
    """``from target import name`` or ``import target`` (name empty), with absolute names."""

    target: str
    name: str
    line: int


def module_of(path: Path) -> str:
    """``midstream/kv/manager.py`` is ``kv.manager``; a package is its folder; the root package is the empty name."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    found = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts}
    assert "types" in found and "" in found, f"no package at {PACKAGE}"
    return found


@cache
def tree_of(module: str) -> ast.Module:
    path = modules()[module]
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """All imports at any depth; ``import_module("literal")`` too, so that laziness hides nothing."""
    return tuple(find_imports(tree_of(module), module, is_package=modules()[module].name == "__init__.py"))


def find_imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    package = ["midstream", *(part for part in module.split(".") if part)]
    if not is_package:
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield Import(target, alias.name, node.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, "", node.lineno)


def own_target(found: Import) -> str | None:
    """This package's module that an import reaches, or None; ``from midstream.kv import manager`` is kv.manager."""
    if found.target != "midstream" and not found.target.startswith("midstream."):
        return None
    target = found.target.removeprefix("midstream").lstrip(".")
    inner = f"{target}.{found.name}".strip(".")
    return inner if found.name and inner in modules() else target


def full_name(found: Import) -> str:
    return f"{found.target}.{found.name}" if found.name else found.target


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule_for(module: str) -> str | None:
    """The longest key of MAY_IMPORT that ``module`` lies in."""
    return max((key for key in MAY_IMPORT if is_within(module, key)), key=len, default=None)


def layer_fault(module: str, target: str) -> str | None:
    """Why ``module`` may not import ``target`` (both names inside the package), or None if it may."""
    if module in ("", "cli"):
        return None
    if target == "":
        return "takes a public name from midstream: name its home, so that the layer is seen"
    rule = rule_for(module)
    if rule is None:
        return "has no rule: give its part a line in MAY_IMPORT"
    if is_within(target, rule) or any(is_within(target, allowed) for allowed in MAY_IMPORT[rule]):
        return None
    return f"may not import {target}: {rule} may import {', '.join(sorted(MAY_IMPORT[rule]))}"


def where(module: str, found: Import) -> str:
    return f"{modules()[module].relative_to(PACKAGE.parent)}:{found.line}"


def test_imports_go_down_only() -> None:
    faults = []
    for module in modules():
        for found in imports_of(module):
            target = own_target(found)
            fault = None if target is None else layer_fault(module, target)
            if fault:
                faults.append(f"{where(module, found)} {module} {fault}")
    assert not faults, "\n" + "\n".join(faults)


def test_every_folder_of_modules_is_a_package() -> None:
    """One without ``__init__.py`` works from a checkout and is missing from the wheel."""
    folders = {path.parent for path in modules().values()}
    assert not [str(folder.relative_to(PACKAGE)) for folder in folders if not (folder / "__init__.py").exists()]


def test_each_side_sees_its_half_of_the_weight_seam() -> None:
    """The engine never holds the trainer's half; rl never holds the worker's half nor the session itself."""
    faults = []
    for module in modules():
        for found in imports_of(module):
            target = own_target(found)
            if target is None or not is_within(target, "weights"):
                continue
            if is_within(module, "engine") and found.name.startswith("Trainer"):
                faults.append(f"{where(module, found)} {module} imports the trainer's half: {found.name}")
            if is_within(module, "rl") and found.name in ("WeightTransferEngine", "UpdateSession"):
                faults.append(f"{where(module, found)} {module} imports the worker's half: {full_name(found)}")
    assert not faults, "\n" + "\n".join(faults)


def test_foreign_libraries_stay_in_their_homes() -> None:
    faults = []
    for module in modules():
        for found in imports_of(module):
            for library, homes in FOREIGN_HOMES.items():
                if is_within(full_name(found), library) and not any(is_within(module, home) for home in homes):
                    faults.append(f"{where(module, found)} {module} imports {library}: its home is {', '.join(homes)}")
    assert not faults, "\n" + "\n".join(faults)


def attribute_chain(node: ast.AST) -> str:
    """``torch.ops.mkldnn`` for that expression; empty for one that does not start with a plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_torch_calls_have_one_home() -> None:
    """They may change with every build of torch; docs/dependencies.md lists them."""
    faults = []
    for module in modules():
        if module == PRIVATE_TORCH_HOME:
            continue
        attributes = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)]
        used = [(node.lineno, attribute_chain(node)) for node in attributes]
        used += [(found.line, full_name(found)) for found in imports_of(module)]
        faults += [
            f"{module}:{line} uses {name}; its home is {PRIVATE_TORCH_HOME}"
            for line, name in used
            if is_within(name, "torch") and is_private(name)
        ]
    assert not faults, "\n" + "\n".join(faults)


def dangers_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls and imports that would run code taken from data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = attribute_chain(node.func)
            if called in ("eval", "exec", "builtins.eval", "builtins.exec"):
                yield node.lineno, f"{called}()"
            elif called == "torch.load" and not any(
                word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
                for word in node.keywords
            ):
                yield node.lineno, "torch.load() without weights_only=True"
            elif any(
                word.arg == "allow_pickle" and not (isinstance(word.value, ast.Constant) and word.value.value is False)
                for word in node.keywords
            ):
                yield node.lineno, f"{called}(allow_pickle=...)"
    for found in find_imports(tree, "", is_package=True):
        if found.target.split(".")[0] in FORBIDDEN_LIBRARIES:
            yield found.line, f"import of {found.target}"


def test_nothing_runs_code_from_data() -> None:
    faults = [f"{module}:{line} {what}" for module in modules() for line, what in dangers_in(tree_of(module))]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("eval('1')", 1),
        ("model.eval()", 0),
        ("import pickle", 1),
        ("def f():\n    from pickle import loads", 1),
        ("import torch\ntorch.load(p)", 1),
        ("import torch\ntorch.load(p, weights_only=True)", 0),
        ("import numpy\nnumpy.load(p, allow_pickle=True)", 1),
    ],
)
def test_the_danger_check_sees_what_it_should(source: str, number: int) -> None:
    assert len(list(dangers_in(ast.parse(source)))) == number


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("kv.manager", "types", True),
        ("kv.manager", "kv.block_pool", True),
        ("kv.manager", "engine.scheduler", False),
        ("types", "ops.sampling", False),
        ("weights.base", "models.llama", False),
        ("engine.core", "weights.session", True),
        ("engine.core", "serving.client", False),
        ("serving.client", "engine.core", False),
        ("serving.llm", "engine.core", True),
        ("rl.trainer", "serving.client", True),
        ("rl.trainer", "serving.async_llm", False),
        ("rl.trainer", "engine.core", False),
        ("rl.trainer", "", False),
        ("cli", "rl.trainer", True),
        ("utils", "types", False),
    ],
)
def test_the_layer_check_sees_what_it_should(module: str, target: str, allowed: bool) -> None:
    assert (layer_fault(module, target) is None) is allowed


def test_the_import_finder_sees_every_form() -> None:
    source = (
        "from __future__ import annotations\n"
        "import torch.distributed as dist\n"
        "from . import manager\n"
        "from ..types import Request\n"
        "def f():\n    import httpx\n"
        "importlib.import_module('midstream.engine.core')\n"
    )
    found = {full_name(one) for one in find_imports(ast.parse(source), "kv.block_pool", is_package=False)}
    assert found == {
        "__future__.annotations",
        "torch.distributed",
        "midstream.kv.manager",
        "midstream.types.Request",
        "httpx",
        "midstream.engine.core",
    }
    at_package = find_imports(ast.parse("from .block_pool import BlockPool"), "kv", is_package=True)
    assert [full_name(one) for one in at_package] == ["midstream.kv.block_pool.BlockPool"]


def torch_chain(start: str) -> list[str]:
    """A shortest chain of modules, ``start`` first, whose last one imports torch; empty if there is none.

    A package's ``__init__`` is run by an import of anything inside it, so it counts; the root's is lazy and does not.
    """
    queue, seen = [[start]], {start}
    while queue:
        chain = queue.pop(0)
        module = chain[-1]
        if any(is_within(found.target, "torch") for found in imports_of(module)):
            return chain
        nearby = [target for found in imports_of(module) if (target := own_target(found))]
        nearby += [module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)]
        for target in nearby:
            if target in modules() and target not in seen:
                seen.add(target)
                queue.append([*chain, target])
    return []


@pytest.mark.parametrize("module", NO_TORCH)
def test_no_torch_in_the_source(module: str) -> None:
    chain = torch_chain(module)
    assert not chain, " imports ".join([*chain, "torch"])


@pytest.mark.parametrize("module", NO_TORCH)
def test_no_torch_when_imported(module: str) -> None:
    """In a fresh interpreter, through whatever it imports, foreign libraries included."""
    code = f"import sys, midstream.{module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or f"importing midstream.{module} brings torch in"


def test_import_midstream_brings_nothing_in() -> None:
    code = "import sys, midstream; print(*[m for m in sys.modules if m.startswith('midstream.') or m == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_public_names_are_sorted_and_have_homes() -> None:
    midstream = importlib.import_module("midstream")
    assert midstream.__all__ == sorted(set(midstream.__all__))
    assert {*midstream._HOMES, "errors"} == set(midstream.__all__)
    assert set(midstream.__all__) <= set(dir(midstream))
    own = [found for found in imports_of("") if found.name and own_target(found) is not None]
    declared = {found.name: full_name(found) for found in own}
    lazy = {name: f"{home}.{name}" for name, home in midstream._HOMES.items()}
    assert declared == {**lazy, "errors": "midstream.errors"}, "what type checkers see is not what is imported"


def public_names() -> list[str]:
    declaration = re.search(r"__all__ = \[(.*?)\]", modules()[""].read_text(encoding="utf-8"), re.DOTALL)
    assert declaration is not None
    return re.findall(r'"(\w+)"', declaration.group(1))


@pytest.mark.parametrize("name", public_names())
def test_public_name_is_importable(name: str) -> None:
    midstream = importlib.import_module("midstream")
    home = midstream._HOMES.get(name, "midstream.errors")
    if home.removeprefix("midstream.") not in modules():
        pytest.skip(f"{home} is not built yet")
    value = getattr(midstream, name)
    assert value is getattr(midstream, name), "the second look finds the same object"
    assert getattr(value, "__name__", "") in (name, home)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    midstream = importlib.import_module("midstream")
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = midstream.nothing_here
