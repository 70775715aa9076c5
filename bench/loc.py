"""Counts the package's lines against the two budgets it promises: a core of one day's reading, and a small whole.

A line is a physical line, blank lines and comments included: all of them are read. Kernels (C++ and Triton, with what
loads them), tests, bench and examples are counted apart. Exits with 1 when a budget is exceeded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

CORE_BUDGET = 8_000
PACKAGE_BUDGET = 16_000
LONG_FILE = 350
"""A file beyond this many lines is a question about its design."""

CORE_ROOMS = ("types.py", "engine", "kv", "weights", "models", "ops", "rl")
KERNEL_ROOMS = ("ops/cpu", "ops/triton")
SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".cu")


def sources(root: Path) -> Iterator[Path]:
    """Every source file under ``root``, in order; compiled and cached files are not sources."""
    for path in sorted(root.rglob("*")):
        if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts:
            yield path


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def room_of(relative: Path) -> str:
    """The part of the package that a file belongs to: its folder, a kernel folder, or itself at the top level."""
    for kernels in KERNEL_ROOMS:
        if relative.is_relative_to(kernels):
            return kernels
    return relative.parts[0]


def count(repository: Path) -> tuple[dict[str, int], dict[str, int], list[tuple[str, int]]]:
    """Lines by room of the package, lines of what is counted apart, and the files that are too long."""
    rooms: dict[str, int] = {}
    apart: dict[str, int] = {}
    long_files: list[tuple[str, int]] = []
    package = repository / "midstream"
    for path in sources(package):
        relative, lines = path.relative_to(package), num_lines(path)
        room = room_of(relative)
        target = apart if room in KERNEL_ROOMS else rooms
        target[room] = target.get(room, 0) + lines
        if lines > LONG_FILE and room not in KERNEL_ROOMS:
            long_files.append((relative.as_posix(), lines))
    for folder in ("tests", "bench", "examples"):
        apart[folder] = sum(num_lines(path) for path in sources(repository / folder))
    return rooms, apart, long_files


def main() -> int:
    rooms, apart, long_files = count(Path(__file__).resolve().parent.parent)
    core = sum(lines for room, lines in rooms.items() if room in CORE_ROOMS)
    package = sum(rooms.values())
    for room, lines in sorted(rooms.items(), key=lambda item: (item[0] not in CORE_ROOMS, item[0])):
        print(f"  {room:<14}{lines:>7,}{'  core' if room in CORE_ROOMS else ''}")
    print(f"  {'apart':<14}" + ", ".join(f"{room} {lines:,}" for room, lines in apart.items()))
    for name, lines in sorted(long_files, key=lambda item: -item[1]):
        print(f"  longer than {LONG_FILE}: {name} {lines:,}")
    within = True
    for name, lines, budget in (("core", core, CORE_BUDGET), ("package", package, PACKAGE_BUDGET)):
        print(f"{name:<16}{lines:>7,} of {budget:,} lines{'' if lines <= budget else '  OVER BUDGET'}")
        within = within and lines <= budget
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
