"""The tiny model that ships in midstream/rl/models/reverse, and the script that made it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

from midstream import LLM
from midstream.cli import TaskText
from midstream.models.loader import load_weights, open_checkpoint
from midstream.models.weights import parameter_shapes
from midstream.rl.env import heldout_problems, split_of
from midstream.rl.tasks import ReverseTask
from midstream.serving.text import Text

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "midstream" / "rl" / "models" / "reverse"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "examples" / "make_tiny_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script()


@pytest.fixture(scope="module")
def task() -> ReverseTask:
    return ReverseTask(TaskText(Text(MODEL), (2,)), seed=0)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_shipped_model_passes_the_strict_loader() -> None:
    checkpoint = open_checkpoint(MODEL)
    shapes = {name: tuple(t.shape) for name, t in load_weights(checkpoint, torch.float32)}
    assert shapes == parameter_shapes(checkpoint.config)
    assert checkpoint.config.architecture == "Qwen3ForCausalLM" and checkpoint.config.dtype == "float32"


def test_the_shipped_model_is_small() -> None:
    assert sum(file.stat().st_size for file in MODEL.rglob("*") if file.is_file()) <= 8 << 20
    assert (MODEL / "README.md").is_file()


def test_the_shipped_model_with_experts_is_what_the_script_makes(script: ModuleType, tmp_path: Path) -> None:
    shipped = ROOT / "examples" / "recipes" / "reverse_moe"
    checkpoint = open_checkpoint(shipped)
    shapes = {name: tuple(t.shape) for name, t in load_weights(checkpoint, torch.float32)}
    assert shapes == parameter_shapes(checkpoint.config) and checkpoint.config.architecture == "Qwen3MoeForCausalLM"
    assert sum(file.stat().st_size for file in shipped.iterdir()) < 300_000
    script.write_random_model(tmp_path, seed=0, moe=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        made, there = (json.loads((at / name).read_text()) for at in (tmp_path, shipped))
        assert made | {"dtype": "bfloat16"} == there | {"dtype": "bfloat16"}, name


def test_the_shipped_model_starts_where_a_run_can_improve_it(script: ModuleType, task: ReverseTask) -> None:
    """Sampled: 0.30 to 0.45 on 512 held-out problems. Greedy: well below, since the slip is the likelier start."""
    problems = heldout_problems(task, 512)
    with LLM(model=str(MODEL), num_threads=1, max_num_seqs=128) as llm:
        sampled = script.accuracy(llm, task, problems, temperature=1.0)
        greedy = script.accuracy(llm, task, problems, temperature=0.0)
    assert 0.30 <= sampled <= 0.45
    assert greedy <= sampled - 0.05


def test_a_prompt_as_text_gives_the_word_backwards_or_with_the_slip() -> None:
    with LLM(model=str(MODEL), num_threads=1) as llm:
        (output,) = llm.generate("abcdef=")
        completion = output.outputs[0]
    assert completion.text in ("fedcba", "efdcba") and completion.finish_reason == "stop"


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def test_every_character_round_trips_as_one_token(script: ModuleType) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for character in script.CHARACTERS:
        ids = tokenizer.encode(character).ids
        assert len(ids) == 1 and tokenizer.decode(ids) == character
    text = " ".join([script.CHARACTERS, script.CHARACTERS[::-1]])
    assert len(tokenizer.encode(text).ids) == len(text)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_vocabulary_is_the_models() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    config = open_checkpoint(MODEL).config
    assert sorted(tokenizer.get_vocab().values()) == list(range(config.vocab_size))
    assert config.eos_token_ids == (tokenizer.token_to_id("<eos>"),)
    assert config.bos_token_id == tokenizer.token_to_id("<bos>")
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.token_to_id("<eos>")


@pytest.mark.parametrize("text", ["abcdef=", "27+981=", "40213=", "a, b", "  ", "", "Zürich", "ab<eos>c"])
def test_tokenizers_and_transformers_agree(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    theirs = Text(MODEL).tokenizer()
    ids = tokenizer.encode(text).ids
    assert theirs.encode(text) == theirs.encode(text, add_special_tokens=False) == ids
    for skip in (True, False):
        assert theirs.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_transformers_knows_the_special_tokens(script: ModuleType) -> None:
    theirs = Text(MODEL).tokenizer()
    special = (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id)
    assert special == (script.PAD, script.BOS, script.EOS, theirs.convert_tokens_to_ids("<unk>")) == (0, 1, 2, 3)
    assert theirs.encode("A") == [3], "a character that is not in the vocabulary is told from the others"


def test_the_script_writes_the_shipped_tokenizer_and_config(script: ModuleType, tmp_path: Path) -> None:
    script.write_random_model(tmp_path, seed=0)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((MODEL / name).read_text()), name


# -- the warm start ----------------------------------------------------------------------------------------------------


def test_what_the_warm_start_shows_is_in_no_other_split(script: ModuleType, task: ReverseTask) -> None:
    shown = {p.prompt for p, _ in itertools.islice(script.demonstrations(task, seed=0), 2000)}
    assert {split_of(prompt) for prompt in shown} == {"warm"}
    train = {task.problem("train", i).prompt for i in range(2000)}
    heldout = {p.prompt for p in heldout_problems(task, 512)}
    assert len(heldout) == 512 and not shown & train and not shown & heldout and not train & heldout


def test_the_demonstrator_is_right_or_makes_the_one_slip(script: ModuleType, task: ReverseTask) -> None:
    right = 0
    for problem, ids in itertools.islice(script.demonstrations(task, seed=0), 2000):
        word = problem.prompt.removesuffix("=")
        answer = word[::-1]
        assert ids[-1] == script.EOS and len(ids) <= script.MAX_TOKENS
        assert task.tokenizer.decode(ids) in (answer, answer[1] + answer[0] + answer[2:])
        right += task.tokenizer.decode(ids) == answer
    # 0.35, and 1 in 26 of the slips exchanges equal characters
    assert right / 2000 == pytest.approx(0.35 + 0.65 / 26, abs=0.04)


def test_the_demonstrations_are_a_function_of_the_seed(script: ModuleType, task: ReverseTask) -> None:
    first, again = ([ids for _, ids in itertools.islice(script.demonstrations(task, seed=3), 50)] for _ in range(2))
    assert first == again
    assert script.demonstrated("fedcba", random.Random(0)) == script.demonstrated("fedcba", random.Random(0))


def test_the_learning_rate_rises_stays_and_falls(script: ModuleType) -> None:
    rates = [script.learning_rate(step, 550) for step in range(550)]
    peak = script.PEAK_LR
    assert rates[0] == peak / 20 and rates[19:220] == [peak] * 201
    assert rates[-1] == pytest.approx(0.02 * peak) and rates[220:] == sorted(rates[220:], reverse=True)


@pytest.mark.parametrize("options", [["--steps", "0"], ["--steps", "-3"]])
def test_no_steps_is_refused(script: ModuleType, options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        script.main([*options, "--out", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()


def test_the_script_makes_a_model_that_opens(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three small steps of the real script: the same files and names as the shipped model."""
    monkeypatch.setattr(script, "BATCH", 8)
    monkeypatch.setattr(script, "heldout_problems", lambda task, count: heldout_problems(task, 4))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    out = tmp_path / "model"
    script.main(["--steps", "3", "--seed", "1", "--out", str(out)])
    assert "held-out accuracy on 4 problems" in capsys.readouterr().out
    made, shipped = (dict(load_weights(open_checkpoint(path), torch.float32)) for path in (out, MODEL))
    assert made.keys() == shipped.keys()
    assert {f.name for f in out.iterdir()} == {f.name for f in MODEL.iterdir()} - {"README.md", "quickstart.toml"}
