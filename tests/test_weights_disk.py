"""Weights through a directory: the two halves of backend disk, and ``weight_dir`` under any other backend."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import random_weights, write_checkpoint
from cores import TINY, digests_of
from fakes_weights import DictSource
from midstream.errors import InvalidInput, UpdateConflict, WeightUpdateError
from midstream.models.weights import EMBEDDING, HEAD
from midstream.serving.llm import LLM
from midstream.types import SamplingParams
from midstream.weights.base import trainer_engines, worker_engines
from midstream.weights.disk import DiskTrainerWeightTransferEngine, DiskWeightTransferEngine

torch.set_num_threads(1)

W0, W1 = (random_weights("llama", seed, **TINY) for seed in range(2))
PARAMS = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_checkpoint(root / f"w{seed}", "llama", seed, **TINY)
        write_checkpoint(root / f"tied{seed}", "qwen3", seed, **TINY)
    write_checkpoint(root / "bf16", "llama", 1, torch.bfloat16, **TINY)
    return root


def ask(llm: LLM) -> Any:
    out = llm.generate([[5, 6, 7, 8]], PARAMS, use_tqdm=False)[0].outputs[0]
    return out.token_ids, out.token_logprobs


def held(llm: LLM) -> dict[str, str]:
    return llm._call("weight_digests")["digests"]  # type: ignore[no-any-return]


def test_a_directory_is_a_whole_update_under_any_backend(models: pathlib.Path) -> None:
    with LLM(str(models / "w0"), num_blocks=64) as llm, LLM(str(models / "w1"), num_blocks=64) as other:
        before, expected = ask(llm), ask(other)
        for number, name in enumerate(("w1", "w1", "w0", "w1"), 1):
            reply = llm.update_weights({"weight_dir": str(models / name), "weight_version": f"step-{number}"})
            assert (reply["updated"], reply["of"], reply["number"]) == (12, 12, number)
            assert reply["version"] == f"step-{number}" and llm.status()["update"] is None
            assert ask(llm) == (before if name == "w0" else expected)
        # within a session it is one chunk; a commit by keep-pause keeps the KV
        llm.start_weight_update()
        assert llm.update_weights({"weight_dir": str(models / "w0")})["received"] == 12
        assert llm.finish_weight_update()["number"] == 5 and ask(llm) == before
        llm.pause_generation(mode="keep", clear_cache=False)
        assert llm.update_weights({"weight_dir": str(models / "w1")})["kv_policy"] == "keep"
        llm.resume_generation()
        assert ask(llm) == expected


def test_it_is_read_as_a_start_would_read_it(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another float dtype is cast, a table of an old export is left out, a tied head may be there if it is the same."""
    bf16 = random_weights("llama", 1, torch.bfloat16, **TINY)
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        llm.update_weights({"weight_dir": str(models / "bf16")})
        assert held(llm) == digests_of({n: t.float() for n, t in bf16.items()})
        llm.start_weight_update()  # a session that was started says itself what may be cast
        with pytest.raises(WeightUpdateError, match="bfloat16"):
            llm.update_weights({"weight_dir": str(models / "bf16")})
    tied = random_weights("qwen3", 1, **TINY)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**tied, **table, HEAD: tied[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    with LLM(str(models / "tied0"), num_blocks=64) as llm, LLM(str(models / "tied1"), num_blocks=64) as other:
        llm.update_weights({"weight_dir": str(tmp_path)})
        assert ask(llm) == ask(other)
        save_file({**tied, HEAD: tied[EMBEDDING] * 2}, tmp_path / "model.safetensors")
        with pytest.raises(WeightUpdateError, match="tied"):
            llm.update_weights({"weight_dir": str(tmp_path)})
        assert ask(llm) == ask(other)


def test_shards_and_what_is_wrong_with_a_directory(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    names = list(W1)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, some in parts.items():
        save_file({n: W1[n] for n in some}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: file for file, some in parts.items() for n in some}}))
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        before = ask(llm)

        def refused(match: str, kind: type[Exception] = InvalidInput, **request: Any) -> None:
            with pytest.raises(kind, match=match):
                llm.update_weights({"weight_dir": str(tmp_path), **request})
            assert ask(llm) == before and llm.status()["update"] is None and llm.status()["number"] == 0

        refused("is no directory", weight_dir=str(tmp_path / "nowhere"))
        refused("must be the path", weight_dir=5)
        refused("must be the path", weight_dir="a\0b")
        (tmp_path / "empty").mkdir()
        refused("has no", weight_dir=str(tmp_path / "empty"))
        refused("kv_policy must be", kv_policy="some")
        refused("weight_version must be a string", weight_version=5)
        whole = index.read_text()
        index.write_text("{}")
        refused("is not an index of shards")
        index.write_text(whole.replace("b.safetensors", "c.safetensors"))
        refused("lacks the shards c.safetensors")
        index.write_text(whole)
        sparse = b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (1 << 38, 1 << 40)
        (tmp_path / "b.safetensors").write_bytes(len(sparse).to_bytes(8, "little") + sparse)
        os.truncate(tmp_path / "b.safetensors", 8 + len(sparse) + (1 << 40))
        refused("larger than any tensor of the model")
        (tmp_path / "b.safetensors").write_bytes(b"no tensors")
        refused("can not be read")
        save_file({n: W1[n] for n in names[5:-1]}, tmp_path / "b.safetensors")
        refused(f"never received: {names[-1]}", WeightUpdateError)
        save_file({**{n: W1[n] for n in names[5:]}, "nobody": torch.zeros(2)}, tmp_path / "b.safetensors")
        refused("nobody is no tensor", WeightUpdateError)
        save_file({n: W1[n] for n in names[5:]}, tmp_path / "b.safetensors")
        llm.update_weights({"weight_dir": str(tmp_path)})
        assert held(llm) == digests_of(W1)


@pytest.mark.parametrize("edit", ["cut", "overwritten", "replaced"])
def test_a_directory_that_changes_while_it_is_read_is_no_update(
    models: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    """A file cut short under its reader, and one that would be committed as half of the old and half of the new."""
    file = tmp_path / "model.safetensors"
    save_file(W1, file)
    whole, preadv = file.read_bytes(), os.preadv
    num_reads = itertools.count()

    def read(fd: int, buffers: Any, offset: int) -> int:
        if next(num_reads) == 6:
            if edit == "replaced":
                file.unlink()
            file.write_bytes(whole[:1000] if edit == "cut" else whole)
        return preadv(fd, buffers, offset)

    with LLM(str(models / "w0"), num_blocks=64) as llm:
        before = ask(llm)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", read)
            with pytest.raises(WeightUpdateError, match="while it was read"):
                llm.update_weights({"weight_dir": str(tmp_path)})
        assert next(num_reads) > 6
        assert ask(llm) == before and llm.status()["update"] is None and llm.status()["number"] == 0
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(InvalidInput, match="no regular file"):
            llm.update_weights({"weight_dir": str(tmp_path)})
        file.unlink()
        file.write_bytes(whole)
        llm.update_weights({"weight_dir": str(tmp_path)})
        assert held(llm) == digests_of(W1)


@pytest.mark.parametrize("shard_bytes", [1, 1 << 14, 1 << 30])
def test_the_two_halves_move_weights_and_leave_nothing(
    models: pathlib.Path, tmp_path: pathlib.Path, shard_bytes: int
) -> None:
    assert worker_engines.lookup("disk") is DiskWeightTransferEngine
    trainer_cls = trainer_engines.lookup("disk")
    assert trainer_cls is DiskTrainerWeightTransferEngine
    with LLM(str(models / "w0"), num_blocks=64, weight_transfer_backend="disk") as llm:
        info = {"directory": str(tmp_path), "shard_bytes": shard_bytes}
        doubles = DictSource({n: t.double() for n, t in W1.items()}, torch.float32)
        trainer = trainer_cls.trainer_init(info, client=llm, source=doubles)
        for number in (1, 2):
            assert trainer.send_weights(f"v{number}")["version"] == f"v{number}"
            assert held(llm) == digests_of(W1) and list(tmp_path.iterdir()) == []
        view = {**W0, EMBEDDING: W0[EMBEDDING].t().contiguous().t()}
        trainer.source = DictSource(view)
        trainer.send_weights(manifest=False)
        assert held(llm) == digests_of(W0)
        trainer.source = DictSource({n: t for n, t in W1.items() if n != EMBEDDING})
        with pytest.raises(WeightUpdateError, match="never received"):
            trainer.send_weights(manifest=False)
        assert held(llm) == digests_of(W0) and list(tmp_path.iterdir()) == []
        with pytest.raises(UpdateConflict):
            llm.update_weights({"update_info": {"weight_dir": str(models / "w1"), "update": "update-1"}})
        trainer.shutdown()
    bad_ones = [({"directory": str(tmp_path / "no")}, "does not exist"), ({**info, "shard_bytes": 0}, "shard_bytes")]
    for bad, match in bad_ones:
        with pytest.raises(InvalidInput, match=match):
            trainer_cls.trainer_init(bad, client=llm, source=doubles)
