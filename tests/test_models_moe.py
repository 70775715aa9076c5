"""Experts in both forms, one by one and all in one tensor: the same model, and nothing of it left out in silence."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import config_of, random_weights, write_checkpoint
from cores import Driver, digests_of
from midstream.errors import ModelLoadError, WeightUpdateError
from midstream.models.config import ModelConfig
from midstream.models.loader import load_weights, open_checkpoint
from midstream.models.weights import Staging, fused_experts, parameter_shapes, stage_all
from midstream.weights.manifest import digest, weights_id

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "qwen3-moe"
W0, W1 = (random_weights(NAME, seed) for seed in (0, 1))
CONFIG = ModelConfig.from_hf(config_of(NAME))
Weights = dict[str, torch.Tensor]


def fuse(weights: Weights) -> Weights:
    """As transformers names the parameters of its model."""
    out = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for i in CONFIG.moe_layers:
        at = f"model.layers.{i}.mlp.experts."
        gates, ups, downs = (
            torch.stack([weights[f"{at}{e}.{part}_proj.weight"] for e in range(CONFIG.num_experts)])
            for part in ("gate", "up", "down")
        )
        out |= {at + "gate_up_proj": torch.cat((gates, ups), 1), at + "down_proj": downs}
    return out


def write(directory: pathlib.Path, weights: Weights) -> pathlib.Path:
    write_checkpoint(directory, NAME)
    save_file(weights, directory / "model.safetensors")
    return directory


def id_of(weights: Weights) -> str:
    return weights_id(digests_of(weights))


def manifest_of(weights: Weights) -> dict[str, list[Any]]:
    return {
        "names": list(weights),
        "dtype_names": ["float32"] * len(weights),
        "shapes": [list(t.shape) for t in weights.values()],
        "digests": [digest(t) for t in weights.values()],
    }


def one(driver: Driver) -> tuple[list[int], list[float]]:
    """What the model says now: tokens and their logprobs."""
    name = driver.add([3, 5, 7, 9])
    driver.run()
    out = driver.output(name).outputs[0]
    return out.token_ids, out.processed_logprobs


def refused(driver: Driver, weights: Weights, **start: Any) -> WeightUpdateError:
    with pytest.raises(WeightUpdateError) as caught:
        driver.begin_update(weights, **start)
        driver.settle()
        driver.steps(2)
        driver.result(driver.ops)  # of the chunk
        driver.now("finish_weight_update")
    driver.now("abort_weight_update")
    return caught.value


def test_transformers_own_names_are_the_fused_ones(tmp_path: pathlib.Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(write(tmp_path / "m", W0)), dtype=torch.float32)
    theirs = dict(model.named_parameters())
    assert theirs.keys() == fuse(W0).keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in fuse(W0).items())


def test_case_004_both_forms_load_as_the_same_weights(tmp_path: pathlib.Path) -> None:
    apart = dict(load_weights(open_checkpoint(write(tmp_path / "apart", W0)), torch.float32))
    fused = dict(load_weights(open_checkpoint(write(tmp_path / "fused", fuse(W0))), torch.float32))
    assert apart.keys() == fused.keys() == parameter_shapes(CONFIG).keys()
    assert all(torch.equal(apart[name], fused[name]) for name in apart)
    ids = []
    for name in ("apart", "fused"):
        driver = Driver(tmp_path / name)
        ids.append(driver.core.version()["weights_id"])
        driver.close()
    assert ids == [id_of(W0)] * 2


def test_case_004_experts_that_match_nothing_or_stay_unfilled_fail_the_load(tmp_path: pathlib.Path) -> None:
    at = "model.layers.1.mlp.experts."
    missing = f"{at}3.up_proj.weight"
    renamed = {n.replace(missing, f"{at}3.w3.weight"): t for n, t in W0.items()}
    with pytest.raises(ModelLoadError) as caught:
        list(load_weights(open_checkpoint(write(tmp_path / "renamed", renamed)), torch.float32))
    assert caught.value.details["names"] == [f"{at}3.w3.weight: unknown", f"{missing}: missing"]
    fused = fuse(W0)
    del fused[at + "down_proj"]
    with pytest.raises(ModelLoadError) as caught:
        list(load_weights(open_checkpoint(write(tmp_path / "unfilled", fused)), torch.float32))
    assert caught.value.details["names"] == [f"{at}{e}.down_proj.weight: missing" for e in range(8)]
    both = fuse(W0) | {missing: W0[missing]}
    with pytest.raises(ModelLoadError, match="given twice"):
        list(load_weights(open_checkpoint(write(tmp_path / "both", both)), torch.float32))
    wrong = fuse(W0) | {at + "down_proj": torch.zeros(8, 48, 64)}
    with pytest.raises(ModelLoadError, match=r"experts.down_proj: shape \(8, 48, 64\), expected \(8, 64, 48\)"):
        list(load_weights(open_checkpoint(write(tmp_path / "wrong", wrong)), torch.float32))


@pytest.mark.parametrize("manifest", [False, True])
def test_case_004_and_005_both_forms_update_again_and_again(tmp_path: pathlib.Path, manifest: bool) -> None:
    driver = Driver(write(tmp_path / "m", W0))
    wanted = {}
    for name, weights in (("W0", W0), ("W1", W1)):
        fresh = Driver(write(tmp_path / name, weights))
        wanted[name] = one(fresh)
        fresh.close()
    for form in (fuse, dict):
        for name, weights in (("W0", W0), ("W0", W0), ("W1", W1), ("W0", W0)):
            listed = {"manifest": manifest_of(form(weights))} if manifest else {}
            reply = driver.update(form(weights), **listed)
            assert reply["updated"] == reply["of"] == len(W0) and reply["weights_id"] == id_of(weights)
            assert reply["bytes"] == sum(t.nbytes for t in weights.values())
            assert driver.digests() == digests_of(weights)
            assert one(driver) == wanted[name]
    assert wanted["W0"] != wanted["W1"]
    driver.close()


def test_case_004_an_update_with_wrong_or_missing_experts_fails_with_the_list(tmp_path: pathlib.Path) -> None:
    driver = Driver(write(tmp_path / "m", W0))
    at = "model.layers.0.mlp.experts."
    error = refused(driver, {f"{at}w13": W1[f"{at}0.up_proj.weight"], f"{at}9.up_proj.weight": torch.zeros(48, 64)})
    assert error.tensors == [f"{at}w13", f"{at}9.up_proj.weight"]
    lacking = fuse(W1)
    del lacking[at + "gate_up_proj"]
    unfilled = [f"{at}{e}.{part}_proj.weight" for e in range(8) for part in ("gate", "up")]
    assert refused(driver, lacking).tensors == unfilled
    assert set(refused(driver, W1, manifest=manifest_of(lacking)).tensors) == set(unfilled)
    down = {at + "down_proj": fuse(W1)[at + "down_proj"]}
    assert "NaN" in refused(driver, {at + "down_proj": torch.full((8, 64, 48), torch.nan)}, mode="partial").message
    name = f"{at}2.down_proj.weight"
    error = refused(driver, down | {name: W0[name]}, mode="partial")
    assert "sent twice" in error.message and error.tensors == [name]
    torn = manifest_of(down) | {"digests": ["0" * 64]}
    assert refused(driver, down, mode="partial", manifest=torn).tensors == [at + "down_proj"]
    assert driver.digests() == digests_of(W0)
    some = driver.update(down, mode="partial")
    assert some["updated"] == 8 and some["weights_id"] == id_of(W0 | {n: W1[n] for n in W1 if at in n and "down" in n})
    driver.close()


class Counted(str):
    """A name that counts how often it is hashed or compared."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Counted.looks += 1
        return str.__hash__(self)


@pytest.mark.parametrize("experts", [None, range(64, 128)])
def test_case_020_names_are_looked_up_not_searched(experts: range | None) -> None:
    """As many looks for each of 18,000 as for each of few. A search through all for each takes minutes."""
    looks: list[float] = []
    for layers in (2, 4, 48):
        config = ModelConfig.from_hf(config_of(NAME, num_hidden_layers=layers, num_experts=128))
        staging = Staging(config, torch.float32, torch.device("meta"), experts)
        shapes = {Counted(name): shape for name, shape in parameter_shapes(config).items()}
        assert len(shapes) > 375 * layers and len(fused_experts(config)) == 2 * layers
        one = {shape: torch.empty(shape, device="meta") for shape in set(shapes.values())}
        Counted.looks = 0
        for name, shape in shapes.items():
            staging.put(name, one[shape])
        assert len(staging._filled) == len(staging._places)
        looks.append(Counted.looks / len(shapes))
        assert looks[-1] == pytest.approx(looks[0], rel=0.05) and looks[-1] < 12, looks


def test_a_config_says_what_is_wrong_and_comes_back_from_what_it_writes() -> None:
    data = config_of(NAME, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3])
    config = ModelConfig.from_hf(data)
    assert config.moe_layers == (1,) and config.qk_norm and config.head_dim == 32
    assert ModelConfig.from_hf(config.to_hf()) == config
    local = {**data, "num_local_experts": 8}
    del local["num_experts"]
    assert ModelConfig.from_hf(local) == config
    for bad in (
        {"num_experts_per_tok": 9},
        {"num_experts": 0},
        {"moe_intermediate_size": None},
        {"mlp_only_layers": ["x"]},
    ):
        with pytest.raises(ModelLoadError, match="num_experts_per_tok <= num_experts"):
            ModelConfig.from_hf(data | bad)


def test_a_rank_holds_its_own_experts_alone() -> None:
    whole = stage_all(CONFIG, W0.items(), torch.float32, torch.device("cpu"))
    part = stage_all(CONFIG, W0.items(), torch.float32, torch.device("cpu"), range(2, 5))
    assert list(part.layers[0].experts) == [2, 3, 4] and len(whole.layers[0].experts) == 8
    held = part.checkpoint(CONFIG)
    assert held.keys() == {n for n in W0 if ".experts." not in n or int(n.split(".experts.")[1][0]) in (2, 3, 4)}
    assert all(torch.equal(tensor, W0[name]) for name, tensor in held.items())
