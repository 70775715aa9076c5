"""The benchmarks' own arithmetic; nothing here is timed."""

from __future__ import annotations

import json
import math
import pathlib
from statistics import fmean, median

import pytest

from bench import async_training, tasks
from bench.__main__ import suite, table, write
from bench.machine import figure
from bench.step import MODEL, decode_step_s
from midstream import LLM, SamplingParams
from midstream.rl.tasks import make_task
from midstream.serving.text import Text


def test_a_figure_is_judged_by_its_value_or_its_ratio() -> None:
    assert figure("f", 3.0, "s", at_most=4.0)["met"]
    assert not figure("f", 5.0, "s", 1.0, at_most=4.0)["met"]
    line = figure("f", 8.0, "tokens/s", 4.0, at_least=1.9, of="ratio", disturbed=0.01)
    assert line["ratio"] == 2.0 and line["met"] and line["disturbed"] == 0.01
    assert not figure("f", 8.0, "tokens/s", 5.0, at_least=1.9, of="ratio")["met"]
    assert not figure("f", 8.0, "tokens/s", None, at_least=0.1, of="ratio")["met"], "no reference: nothing is proved"
    assert "met" not in figure("f", 1.0, "ms", 2.0)


def test_bounds_of_both_modes() -> None:
    curve = {1: 1.0, 2: 1.0, 4: 2.0}
    # 4 running, 3 (between 2 and 4), then a straggler; the best rate is 2 tokens a second
    assert async_training.bounds([4, 3, 1], 8, 1.5, curve) == (pytest.approx(2.0 + 1.5 + 1.0 + 1.5), 4.0)
    assert async_training.bounds([1], 1, 9.0, curve)[1] == 9.0, "nor is it faster than its optimizer"


def test_a_decode_step_lasts_until_the_next(tmp_path: pathlib.Path) -> None:
    steps = [(0.0, 2, 64, 0), (5.0, 2, 2, 0), (6.0, 2, 2, 0), (8.0, 2, 2, 0), (11.0, 1, 1, 0), (20.0, 2, 2, 7)]
    names = ("t0", "running", "tokens", "reprefill")
    lines = [json.dumps({"event": "step", **dict(zip(names, step, strict=True))}) for step in steps]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, json.dumps({"event": "commit"}), ""]))
    assert decode_step_s(tmp_path / "log.jsonl", 2) == pytest.approx(1.5)


def test_the_lengths_of_the_task_have_a_heavy_tail(tmp_path: pathlib.Path) -> None:
    tasks.save_model(MODEL, tmp_path / "model")
    text = Text(MODEL)

    class Ids:
        eos_token_ids = (2,)
        prompt = staticmethod(text.encode)
        encode = staticmethod(text.encode)
        decode = staticmethod(text.decode)

    task = make_task(f"{tasks.__file__}:heavy_tail", Ids(), 0)  # type: ignore[arg-type]
    problems = [task.problem("train", i) for i in range(96)]
    params = SamplingParams(n=2, max_tokens=tasks.MAX_TOKENS, seed=0, detokenize=False, logprobs=1)
    with LLM(str(tmp_path / "model"), num_threads=1, max_num_seqs=192, num_blocks=192 * 26) as llm:
        outputs = llm.generate([problem.prompt_token_ids for problem in problems], params)
    completions = [c for output in outputs for c in output.outputs]
    lengths = sorted(len(c.token_ids) for c in completions)
    assert fmean(lengths) > 1.5 * median(lengths), "exponential lengths: 1.44"
    assert lengths[-1] > 10 * median(lengths)
    for problem, output in zip(problems, outputs, strict=True):  # the end's chance is what the last letter says
        chance = 1 / tasks.mean_lengths()[problem.prompt[-1]]
        first = output.outputs[0].token_ids[0]
        expected = math.log(chance if first == Ids.eos_token_ids[0] else 1 - chance)
        assert output.outputs[0].logprobs is not None
        assert output.outputs[0].logprobs[0][first].logprob == pytest.approx(expected, abs=1e-3)


def test_results_replace_those_of_their_name(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.jsonl"
    write([figure("a", 1.0, "s"), figure("b", 2.0, "s")], path)
    write([figure("b", 3.0, "s"), figure("c", 4.0, "s")], path)
    assert [(line["name"], line["value"]) for line in map(json.loads, path.read_text().splitlines())] == [
        ("a", 1.0), ("b", 3.0), ("c", 4.0)
    ]  # fmt: skip


def test_the_table_shows_every_figure() -> None:
    lines = [figure("a", 1.0, "s", at_most=4.0, disturbed=0.5), figure("b", 1.0, "ms", 2.0, disturbed=0.0)]
    lines.append(figure("counted", 3, "steps"))
    assert table(lines).row_count == 3


def test_every_benchmark_has_its_module() -> None:
    folder = pathlib.Path(tasks.__file__).parent
    found = suite("m", "l", None)
    assert all((folder / f"{module}.py").exists() for module, _ in found.values())
    assert "rollout_large" not in suite("m", None, None)
