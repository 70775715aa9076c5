from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from midstream.errors import InvalidInput
from midstream.rl.config import TrainConfig

RECIPES = Path(__file__).parent.parent / "examples" / "recipes"
QUICKSTART = RECIPES.parents[1] / "midstream" / "rl" / "models" / "reverse" / "quickstart.toml"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.name)
def test_the_recipes_load_and_scale_down(path: Path) -> None:
    config = TrainConfig.from_toml(path)
    assert TrainConfig.from_dict(asdict(config)) == config
    tiny = config.scaled_to_tiny("some/model")
    assert tiny.model == "some/model" and tiny.task == "reverse" and tiny.rollouts_per_step <= 32
    assert (tiny.lr, tiny.clip_high, tiny.max_staleness) == (config.lr, config.clip_high, config.max_staleness)


def test_the_published_recipe_is_the_published_recipe() -> None:
    config = TrainConfig.from_toml(RECIPES / "qwen3_1.7b_dapo.toml")
    assert config.groups_per_step == 32 and config.samples_per_group == 16 and config.max_staleness == 8
    assert config.lr == 1e-6 and config.warmup_steps == 160 and config.sequence_mask == (0.99, 1.01)
    assert config.max_num_seqs == 144 * 16 and not config.dynamic_sampling
    assert (1 - config.clip_low, 1 + config.clip_high) == (0.5, 4.0)
    assert Path(config.task.partition(":")[0]).exists(), "a task's file is found beside the recipe"


def test_overrides_win_unless_they_are_none() -> None:
    config = TrainConfig.from_toml(QUICKSTART, seed=7, task="sort", steps=None)
    assert config.seed == 7 and config.task == "sort"
    assert config.steps == TrainConfig.from_toml(QUICKSTART).steps


def test_sync_means_staleness_zero() -> None:
    assert TrainConfig(model="m", task="reverse", max_staleness=3, sync=True).max_staleness == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lrr": 1}, "lrr.*allowed: model"),
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"steps": 1.5}, "steps"),
        ({"steps": True}, "steps"),
        ({"lr": "1e-4"}, "lr must be a finite number, got"),
        ({"lr": float("nan")}, "nan"),
        ({"temperature": 0}, "greedy"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"overlong_buffer_tokens": 17}, "17"),
        ({"samples_per_group": 65}, "max_num_seqs 64"),
        ({"sequence_mask": [1.1, 2]}, "sequence_mask"),
        ({"dtype": "float16"}, "float16"),
        ({"engine": {"ranks": 2}}, "unknown engine options ranks"),
        ({"engine": {"data_parallel_size": 0}}, "data_parallel_size must be at least 1"),
        ({"engine": {"model": "m", "dtype": "auto"}}, "engine: dtype, model must not be given there"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        TrainConfig.from_dict({"model": "m", "task": "reverse"} | values)


def test_unreadable_recipes_say_why(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        TrainConfig.from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(InvalidInput, match="not valid TOML"):
        TrainConfig.from_toml(tmp_path / "bad.toml")
    (tmp_path / "short.toml").write_text("steps = 3")
    with pytest.raises(InvalidInput, match="lacks model and task"):
        TrainConfig.from_toml(tmp_path / "short.toml")
