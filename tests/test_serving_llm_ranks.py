"""LLM over several ranks is LLM over one."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from checkpoints import write_checkpoint
from midstream.errors import Conflict, EngineDead, EnginePaused, InvalidInput
from midstream.serving.llm import LLM
from midstream.types import SamplingParams

torch.set_num_threads(1)
OPTIONS: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 8, "num_threads": 1, "dtype": "float32"}
PROMPTS: list[Any] = [[5, 6, 7], [9] * 20, [3], [40, 41]]
PARAMS = [
    SamplingParams(max_tokens=n, seed=n, n=1 + n % 2, ignore_eos=True, detokenize=False, logprobs=2)
    for n in (5, 9, 12, 4)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_checkpoint(tmp_path_factory.mktemp("m") / "w0", "qwen3-moe")


@pytest.fixture(scope="module", params=[True, False], ids=["experts", "replicas"])
def llm(model: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model), data_parallel_size=2, enable_expert_parallel=request.param, **OPTIONS) as found:
        yield found


def test_the_same_tokens(llm: LLM, model: pathlib.Path) -> None:
    with LLM(str(model), **OPTIONS) as one:
        expected = one.generate(PROMPTS, PARAMS)
    found = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs for o in found] == [o.outputs for o in expected]
    assert [o.prompt_token_ids for o in found] == PROMPTS


def test_verbs(llm: LLM, tmp_path: pathlib.Path) -> None:
    assert llm.pause_generation("keep")["paused"] and llm.is_paused()
    with pytest.raises(Conflict):
        llm.generate(PROMPTS, PARAMS)
    new = write_checkpoint(tmp_path / "w1", "qwen3-moe", 1)
    done = llm.update_weights({"weight_dir": str(new), "weight_version": "one"})
    assert (done["version"], done["number"]) == ("one", llm.status()["number"])
    assert llm.resume_generation() == {"was_paused": True}
    with LLM(str(new), **OPTIONS) as one:
        expected = one.generate(PROMPTS, PARAMS)
    found = llm.generate(PROMPTS, PARAMS)
    assert [[c.token_ids for c in o.outputs] for o in found] == [[c.token_ids for c in o.outputs] for o in expected]
    assert {s.version for o in found for c in o.outputs for s in c.weight_versions} == {"one"}
    llm.pause_generation("abort")
    with pytest.raises(EnginePaused):
        llm.generate(PROMPTS, PARAMS)
    llm.resume_generation()


def test_refusals(llm: LLM) -> None:
    with pytest.raises(InvalidInput, match="prompt token id 99999"):
        llm.generate([[5], [99999]], PARAMS[0])
    with pytest.raises(InvalidInput, match="on_step"):
        llm.generate(PROMPTS, PARAMS, on_step=print)
    assert llm.status()["running"] == 0


def test_closed(model: pathlib.Path) -> None:
    llm = LLM(str(model), data_parallel_size=2, **OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(EngineDead):
        llm.status()
