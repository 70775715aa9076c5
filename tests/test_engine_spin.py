"""The second model of the group's protocol, in Promela, explored by spin: it holds, and its mutants fail."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

MODEL = pathlib.Path(__file__).with_name("models") / "pause.pml"
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {' and no '.join(MISSING)} here (on Debian: apt-get install spin gcc)"
    ),
]


def explore(directory: pathlib.Path, *options: str) -> tuple[int, bool]:
    """(errors found, whether the whole state space was searched) for the model with these -D options."""
    subprocess.run(["spin", *options, "-a", str(MODEL)], cwd=directory, check=True, capture_output=True, timeout=60)
    flags = ["-O2", "-w", "-DSAFETY", "-DMEMLIM=3000", "-DVECTORSZ=2048", "-DCOLLAPSE"]
    subprocess.run(["gcc", *flags, "-o", "pan", "pan.c"], cwd=directory, check=True, capture_output=True, timeout=120)
    ran = subprocess.run(
        ["./pan", "-m1000000", "-w22"], cwd=directory, check=True, capture_output=True, text=True, timeout=300
    )
    found = re.search(r"errors: (\d+)", ran.stdout)
    assert found is not None, ran.stdout
    is_whole = not re.search(r"Search not completed|max search depth too small|out of memory", ran.stdout)
    return int(found.group(1)), is_whole


HOLDS = [
    ("-DR=1", "-DRACES=0"),
    ("-DR=1", "-DRACES=0", "-DV=2"),
    ("-DR=1", "-DRACES=0", "-DWAITS=1"),
    ("-DR=2", "-DRACES=0", "-DCOMMITS=0"),
    ("-DR=2", "-DRACES=0", "-DCOMMITS=0", "-DSTAYS=1"),
    ("-DR=1", "-DCOMMITS=0"),
    ("-DR=1",),
    ("-DN=3", "-DR=1", "-DRACES=0", "-DCOMMITS=0"),
]
"""Options of the model: what happens beside a pause and its resume."""


@pytest.mark.parametrize("options", HOLDS, ids=" ".join)
def test_the_second_model_holds(tmp_path: pathlib.Path, options: tuple[str, ...]) -> None:
    assert explore(tmp_path, *options) == (0, True)


MUTANTS = ("STOP_AT_ONCE", "FRONT_END", "NO_BARRIER", "NO_WAVE", "LOCAL_FLAG", "NO_VOTE", "NO_EPOCH", "MAJORITY")


@pytest.mark.parametrize(
    "options",
    [*((f"-D{name}", "-DR=1", "-DRACES=0") for name in MUTANTS), ("-DOUTLIVES", "-DR=2", "-DRACES=0", "-DSTAYS=1")],
    ids=" ".join,
)
def test_each_mutant_of_the_second_model_fails(tmp_path: pathlib.Path, options: tuple[str, ...]) -> None:
    assert explore(tmp_path, *options)[0] > 0
