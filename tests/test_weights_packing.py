from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from fakes_weights import DictSource
from midstream.errors import InvalidInput
from midstream.types import ParamMeta
from midstream.weights.manifest import digest, from_source, weights_id
from midstream.weights.packing import ALIGNMENT, aligned, dtype_name, num_bytes, plan, read, torch_dtype, write
from midstream.weights.source import ModuleSource, paired


def meta(name: str, tensor: torch.Tensor) -> ParamMeta:
    return ParamMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape))


MIXED = {
    "bf16": torch.randn(3).bfloat16(),
    "fp32": torch.randn(5),
    "int8": torch.tensor([-7], dtype=torch.int8),
    "fp16": torch.randn(7).half(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "matrix": torch.randn(3, 5, dtype=torch.float64),
}


@pytest.mark.parametrize("order", range(20))
@pytest.mark.parametrize("buffer_bytes", [128, 320, 4096])
def test_case_014_mixed_dtypes_round_trip_in_place(order: int, buffer_bytes: int) -> None:
    names = list(MIXED)
    random.Random(order).shuffle(names)
    chunks = plan([meta(name, MIXED[name]) for name in names], buffer_bytes)
    assert [slot.meta.name for chunk in chunks for slot in chunk] == names
    for chunk in chunks:
        buffer = torch.full((buffer_bytes,), 0xAB, dtype=torch.uint8)
        for slot in chunk:
            write(buffer, MIXED[slot.meta.name], slot)
        for slot in chunk:
            got = read(buffer, slot)
            assert got.dtype == MIXED[slot.meta.name].dtype and torch.equal(got, MIXED[slot.meta.name])
            if got.numel():
                assert got.data_ptr() == buffer.data_ptr() + slot.offset
            assert slot.offset % ALIGNMENT == 0 and slot.offset + slot.nbytes <= buffer_bytes
        ends = [(slot.offset, slot.offset + slot.nbytes) for slot in chunk]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_a_tensor_as_large_as_the_buffer_fits_and_one_more_byte_does_not() -> None:
    assert len(plan([ParamMeta("a", "uint8", (100,)), ParamMeta("b", "uint8", (100,))], 100)) == 2
    with pytest.raises(InvalidInput, match="a has 101 bytes, a buffer 100: raise packed_buffer_size_bytes to 101"):
        plan([ParamMeta("a", "uint8", (101,))], 100)
    assert plan([], 100) == []
    assert aligned(0) == 0 and aligned(1) == 64 and aligned(64) == 64


def test_write_casts_once_and_equals_to() -> None:
    tensor = torch.randn(6, 4).t()  # not contiguous either
    (chunk,) = plan([ParamMeta("w", "bfloat16", (4, 6))], 1024)
    buffer = torch.zeros(1024, dtype=torch.uint8)
    write(buffer, tensor, chunk[0])
    assert torch.equal(read(buffer, chunk[0]), tensor.to(torch.bfloat16))


def test_write_refuses_another_shape_and_another_kind() -> None:
    (chunk,) = plan([ParamMeta("w", "bfloat16", (4,))], 64)
    buffer = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(InvalidInput, match=r"w has shape \[5\], declared was \[4\]"):
        write(buffer, torch.zeros(5), chunk[0])
    with pytest.raises(InvalidInput, match="int64"):
        write(buffer, torch.zeros(4, dtype=torch.int64), chunk[0])


def test_dtype_names() -> None:
    for tensor in MIXED.values():
        assert torch_dtype(dtype_name(tensor.dtype)) == tensor.dtype
    with pytest.raises(InvalidInput, match="unknown dtype 'float31'"):
        torch_dtype("float31")
    assert num_bytes(ParamMeta("x", "float8_e4m3fn", (3, 5))) == 15


def test_digest_is_of_dtype_shape_and_elements() -> None:
    tensor = torch.arange(6.0)
    distinct = [tensor, tensor.view(2, 3), tensor.bfloat16(), tensor.view(torch.int32), tensor.flip(0), tensor[:0]]
    assert len({digest(t) for t in distinct}) == len(distinct)
    matrix = tensor.view(2, 3)
    assert digest(matrix.t().contiguous()) == digest(matrix.t())
    assert digest(nn.Parameter(tensor)) == digest(tensor)
    flipped = tensor.clone()
    flipped.view(torch.uint8)[0] ^= 1
    assert digest(flipped) != digest(tensor)
    assert digest(torch.tensor(1.0)) != digest(torch.tensor([1.0]))


def test_weights_id_does_not_depend_on_order_but_on_every_name() -> None:
    digests = {name: digest(tensor) for name, tensor in MIXED.items()}
    assert weights_id(digests) == weights_id(dict(reversed(digests.items())))
    swapped = {**digests, "bf16": digests["fp32"], "fp32": digests["bf16"]}
    assert weights_id(swapped) != weights_id(digests)


def test_module_source_casts_floats_gives_tied_once_and_can_be_read_again() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    source = ModuleSource(module, torch.bfloat16)
    assert source.metadata() == [ParamMeta("embed.weight", "bfloat16", (5, 3))]
    assert [name for name, _ in source] == [name for name, _ in source] == ["embed.weight"]
    weight = module["embed"].weight
    assert from_source(source)["digests"] == [digest(weight.to(torch.bfloat16))]
    assert from_source(ModuleSource(module))["digests"] == [digest(weight)]
    assert from_source(source)["names"] == [meta.name for meta in source.metadata()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": torch.zeros(2)}, "ended before b"),
        ({"b": torch.zeros(2), "a": torch.zeros(2)}, r"gave b \[2\] where its metadata announces a \[2\]"),
        ({"a": torch.zeros(3), "b": torch.zeros(2)}, r"gave a \[3\]"),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, "gave c, which"),
    ],
)
def test_a_source_that_does_not_keep_to_its_metadata(given: dict[str, torch.Tensor], message: str) -> None:
    source = DictSource(given)
    announced = [ParamMeta("a", "float32", (2,)), ParamMeta("b", "float32", (2,))]
    source.metadata = lambda: announced  # type: ignore[method-assign]
    with pytest.raises(InvalidInput, match=message):
        list(paired(source))
