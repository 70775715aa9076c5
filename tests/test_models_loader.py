"""Checkpoints are accounted for strictly: every fault is one clear error that lists every name at fault."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import VARIANTS, config_of, random_weights, write_checkpoint
from midstream.errors import ModelLoadError
from midstream.models.loader import load_weights, open_checkpoint, resolve_dtype
from midstream.models.shards import FileChanged, read_tensors
from midstream.models.weights import EMBEDDING, HEAD, parameter_shapes, stage_all
from midstream.weights.packing import DTYPES

Weights = dict[str, torch.Tensor]


def write_shards(
    directory: pathlib.Path, variant: str, shards: list[Weights], index: bool = True, **changes
) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(variant, **changes)))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name)
    if index:
        weight_map = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def load(path: pathlib.Path, dtype: torch.dtype = torch.float32) -> Weights:
    return dict(load_weights(open_checkpoint(path), dtype))


def refused(path: pathlib.Path, *words: str) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    return caught.value


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_file_and_any_shards_give_the_same_tensors_once_each(tmp_path: pathlib.Path, variant: str) -> None:
    weights = random_weights(variant)
    names = list(weights)
    assert equal(load(write_checkpoint(tmp_path / "one", variant)), weights)
    shards = [{n: weights[n] for n in names[i::3]} for i in range(3)]
    assert equal(load(write_shards(tmp_path / "three", variant, shards)), weights)
    assert equal(load(write_shards(tmp_path / "bare", variant, shards, index=False)), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_engine_holds_comes_back_bit_for_bit(tmp_path: pathlib.Path, variant: str, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", variant))
    held = stage_all(checkpoint.config, load_weights(checkpoint, dtype), dtype, torch.device("cpu"))
    assert equal(held.checkpoint(checkpoint.config), {n: t.to(dtype) for n, t in random_weights(variant).items()})


def test_files_beside_the_index_are_not_read(tmp_path: pathlib.Path) -> None:
    path = write_shards(tmp_path / "m", "llama", [random_weights("llama")])
    save_file({"stray": torch.zeros(1)}, path / "consolidated.safetensors")
    assert equal(load(path), random_weights("llama"))


def change(edit: Callable[[Weights], None], path: pathlib.Path, variant: str = "llama", **changes) -> pathlib.Path:
    weights = random_weights(variant, **changes)
    edit(weights)
    return write_shards(path, variant, [weights], **changes)


def test_every_fault_of_every_kind_is_listed_at_once(tmp_path: pathlib.Path) -> None:
    first, q, down = (
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    )
    weights = random_weights("llama")
    weights["model.layers.7.extra.weight"] = torch.zeros(2)
    weights["aaa.unknown"] = torch.zeros(2)
    del weights[q], weights["lm_head.weight"]
    weights[down] = weights[down].t().contiguous()
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int32)
    error = refused(
        write_shards(tmp_path / "m", "llama", [weights, {first: weights[first]}], index=False),
        "model.layers.7.extra.weight: unknown", "aaa.unknown: unknown", f"{q}: missing", "lm_head.weight: missing",
        f"{down}: shape (96, 64), expected (64, 96)", f"{first}: given twice", "up_proj.weight: dtype torch.int32",
    )  # fmt: skip
    assert len(error.details["names"]) == 7


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_every_architecture_is_missed(tmp_path: pathlib.Path, variant: str) -> None:
    path = change(lambda w: [w.pop(n) for n in list(w)[1:]] and None, tmp_path / "m", variant)
    error = refused(path)
    assert len(error.details["names"]) == len(random_weights(variant)) - 1
    assert all(f"{name}: missing" in str(error) for name in list(random_weights(variant))[1:])


def test_no_tensor_is_yielded_after_a_fault_was_seen(tmp_path: pathlib.Path) -> None:
    path = change(lambda w: w.update({"aaa": torch.zeros(1)}), tmp_path / "m")
    seen = []
    with pytest.raises(ModelLoadError):
        for name, _ in load_weights(open_checkpoint(path), torch.float32):
            seen.append(name)
    assert seen == []  # "aaa" is the first in the file


def test_old_rotary_tables_are_known_and_left_out(tmp_path: pathlib.Path) -> None:
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert equal(load(change(lambda w: w.update(table), tmp_path / "m")), random_weights("llama"))


def test_a_tied_head_may_be_there_and_must_be_equal(tmp_path: pathlib.Path) -> None:
    same = change(lambda w: w.update({HEAD: w[EMBEDDING].clone()}), tmp_path / "same", "llama-tied")
    assert equal(load(same), random_weights("llama-tied"))
    other = change(lambda w: w.update({HEAD: w[EMBEDDING] + 1}), tmp_path / "other", "llama-tied")
    refused(other, f"{HEAD} differs from {EMBEDDING}")
    shape = change(lambda w: w.update({HEAD: torch.zeros(3, 64)}), tmp_path / "shape", "llama-tied")
    refused(shape, HEAD)
    alone = change(lambda w: w.update({HEAD: w.pop(EMBEDDING)}), tmp_path / "alone", "llama-tied")
    refused(alone, f"{EMBEDDING}: missing")
    half = change(lambda w: w.update({HEAD: w[EMBEDDING].half()}), tmp_path / "half", "llama-tied")
    refused(half, HEAD)


def test_a_head_of_its_own_is_not_taken_from_the_embedding(tmp_path: pathlib.Path) -> None:
    refused(change(lambda w: w.__delitem__(HEAD), tmp_path / "m", "llama"), f"{HEAD}: missing")


def test_what_is_not_a_model_says_what_it_lacks(tmp_path: pathlib.Path) -> None:
    refused(tmp_path / "absent", "no model at")
    (tmp_path / "file.bin").write_bytes(b"x")
    refused(tmp_path / "file.bin", "not a .gguf")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(config_of("llama")))
    refused(tmp_path / "empty", "no *.safetensors")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(3))
    refused(tmp_path / "bad.gguf", "not a readable GGUF")


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "null", "\xff{"])
def test_a_broken_config_is_a_load_error(tmp_path: pathlib.Path, text: str) -> None:
    path = write_checkpoint(tmp_path / "m", "llama")
    (path / "config.json").write_bytes(text.encode("latin-1"))
    refused(path, "config")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}', "[]"])
def test_a_broken_index_is_a_load_error(tmp_path: pathlib.Path, text: str) -> None:
    path = write_checkpoint(tmp_path / "m", "llama")
    (path / "model.safetensors.index.json").write_text(text)
    refused(path, "model.safetensors.index.json")


def test_all_absent_shards_are_named(tmp_path: pathlib.Path) -> None:
    weights = random_weights("llama")
    names = list(weights)
    path = write_shards(tmp_path / "m", "llama", [{n: weights[n]} for n in names])
    gone = [f"model-{i:05}-of-{len(names):05}.safetensors" for i in (2, 5)]
    for name in gone:
        (path / name).unlink()
    refused(path, *gone)


@pytest.mark.parametrize("size", [0, 4, 100, -1, -100])
def test_a_truncated_file_is_named(tmp_path: pathlib.Path, size: int) -> None:
    path = write_checkpoint(tmp_path / "m", "llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(path, "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": []}, "(none; model_type 'llama')"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: pathlib.Path, changes: dict, word: str) -> None:
    path = write_checkpoint(tmp_path / "m", "llama")
    config = {k: v for k, v in {**config_of("llama"), **changes}.items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    refused(path, word)


def test_auto_takes_the_checkpoints_dtype_where_it_is_served(tmp_path: pathlib.Path) -> None:
    for held, wanted in [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]:
        path = write_checkpoint(tmp_path / held, "llama", dtype=getattr(torch, held))
        config = open_checkpoint(path).config
        assert resolve_dtype("auto", config) is getattr(torch, wanted)
        assert resolve_dtype("float32", config) is torch.float32


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_tensors_of_the_directory_it_was_made_of(tmp_path: pathlib.Path, variant: str) -> None:
    import gguf

    source = open_checkpoint(write_checkpoint(tmp_path / "m", variant))
    c, kind = source.config, source.config.architecture.removesuffix("ForCausalLM").lower()
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), kind)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_block_count(c.num_layers)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    architecture = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}[kind]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture), c.num_layers)
    weights = load(tmp_path / "m")
    for name, tensor in weights.items():
        heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads}.get(name.split(".")[-2])
        if kind == "llama" and heads:  # two halves → interleaved pairs, as converters do
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_checkpoint(tmp_path / "m.gguf")
    assert equal(load(tmp_path / "m.gguf"), weights)
    assert parameter_shapes(found.config) == parameter_shapes(c)
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (len(whole) // 2, 200, 30):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        refused(tmp_path / "cut.gguf", "cut.gguf")


def raw(path: pathlib.Path, header: object, data: bytes = b"") -> pathlib.Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: object, begin: object, end: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_our_reader_reads_what_their_writer_wrote(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    values = torch.arange(15).to(dtype)
    tensors = {"a": values.view(3, 5), "empty": values[:0].view(0, 7), "b": values[:1].view(()).clone(), "c": values}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = dict(read_tensors([tmp_path / "x.safetensors"]))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"[]", b"{", b"\xff\xfe", b"[" * 50_000, b'{"a": 1}', b'{"a": {}}', b'{"a": 1' + b"0" * 5000 + b"}"),
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        *({"a": entry([1], 0, 4, "F33")}, {"a": entry(1, 0, 4)}, {"a": entry([1.0], 0, 4)}, {"a": entry([-1], 0, -4)}),
        *({"a": entry([True], 0, 4)}, {"a": entry(["1"], 0, 4)}, {"a": {**entry([1], 0, 4), "data_offsets": [0]}}),
        *({"a": entry([2], 0, 4)}, {"a": entry([1], 4, 8)}, {"a": entry([2], 0, 8)}, {"a": entry([0], 0, 0)}),
        *({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, {"a": entry([1 << 62, 4], 0, 1 << 66)}, {}),
        {"a": entry([1], 0, 4), "b": entry([0, 1 << 62, 1 << 62, 1 << 70], 4, 4)},
    ],
    ids=lambda header: repr(header)[:60],
)
def test_a_header_that_lies_is_a_load_error(tmp_path: pathlib.Path, header: object) -> None:
    file = raw(tmp_path / "x.safetensors", {"a": entry([1], 0, 4)}, bytes(4))
    assert torch.equal(dict(read_tensors([file]))["a"], torch.zeros(1))
    with pytest.raises(ModelLoadError, match="x.safetensors"):
        list(read_tensors([raw(file, header, bytes(4))]))


def test_a_header_longer_than_its_file_takes_no_memory(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.safetensors"
    for nbytes in (1 << 63, 1 << 40, 100_000_001, 200):
        file.write_bytes(nbytes.to_bytes(8, "little") + bytes(100))
        with pytest.raises(ModelLoadError, match="no safetensors"):
            list(read_tensors([file]))
    file.write_bytes((1 << 39).to_bytes(8, "little"))
    os.truncate(file, 1 << 40)  # sparse: a header of that length fits
    with pytest.raises(ModelLoadError, match="no safetensors"):
        list(read_tensors([file]))


def cut(file: pathlib.Path) -> None:
    os.truncate(file, 1000)


def cut_all(file: pathlib.Path) -> None:
    os.truncate(file, 0)


def overwritten(file: pathlib.Path) -> None:
    size = file.stat().st_size
    with file.open("r+b") as out:
        out.seek(size - 100)
        out.write(bytes(100))
    os.utime(file, ns=(0, 0))  # whatever the clock's grain


def replaced(file: pathlib.Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    os.replace(other, file)


def removed(file: pathlib.Path) -> None:
    file.unlink()


def piped(file: pathlib.Path) -> None:
    file.unlink()
    os.mkfifo(file)


CHANGES = [cut, cut_all, overwritten, replaced, removed, piped]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("edit", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_told(
    tmp_path: pathlib.Path, edit: Callable[[pathlib.Path], None], which: int
) -> None:
    """Also one that was read already or is yet to be: tensors of two versions are no version."""
    files = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for file in files:
        save_file({f"{file.stem}.{n}": torch.ones(1000) for n in range(2)}, file)
    tensors = read_tensors(files)
    for _ in range(3):  # in the middle of the second file
        next(tensors)
    edit(files[which])
    with pytest.raises((FileChanged, ModelLoadError), match=f"{which}.safetensors") as caught:
        list(tensors)
    assert isinstance(caught.value, FileChanged) or edit is removed
    with pytest.raises(StopIteration):
        next(tensors)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (tmp_path / "device.safetensors").symlink_to("/dev/zero")
    for file in sorted(tmp_path.iterdir()):
        with pytest.raises(ModelLoadError, match=f"{file.name} can not be read"):
            list(read_tensors([file]))
