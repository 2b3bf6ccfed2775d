import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from msmodelslim.errors import EnvError
from msmodelslim.model.checkpoint import TensorInfo
from msmodelslim.saver import shards
from msmodelslim.saver.shards import DTYPE_WORDS, ShardPlan, ShardWriter, TensorSpec, canonical_order, spec_of

PATTERN = "model{suffix}.safetensors"


def values_of(spec: TensorSpec, seed: int = 0) -> torch.Tensor:
    raw = torch.randint(0, 255, (spec.nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if spec.dtype is torch.bool:
        raw &= 1
    return raw.view(spec.dtype).reshape(spec.shape)


def written(directory: Path, tensors: dict[str, torch.Tensor], part_file_bytes: int = 0) -> ShardPlan:
    plan = ShardPlan.make({name: spec_of(t) for name, t in tensors.items()}, part_file_bytes, PATTERN)
    writer = ShardWriter(plan, directory)
    for name in reversed(list(tensors)):
        writer.write(name, tensors[name])
    writer.sync()
    assert writer.missing() == []
    return plan


def test_a_file_has_the_bytes_that_safetensors_writes_for_every_type(tmp_path: Path) -> None:
    specs = {f"a.{word}.é": TensorSpec(dtype, (3, 5)) for dtype, word in DTYPE_WORDS.items()}
    specs |= {'quote"\\': TensorSpec(torch.float32, ()), "empty": TensorSpec(torch.int8, (0, 4))}
    tensors = {name: values_of(spec) for name, spec in specs.items()}
    written(tmp_path, tensors)
    save_file(tensors, tmp_path / "reference.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "reference.safetensors").read_bytes()


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.sampled_from(list(DTYPE_WORDS)), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 60),
)
def test_any_split_has_the_bytes_that_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, tuple[torch.dtype, list[int]]], part_file_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("split")
    tensors = {name: values_of(TensorSpec(dtype, tuple(shape))) for name, (dtype, shape) in content.items()}
    plan = written(directory, tensors, part_file_bytes)
    for file in plan.sizes:
        held = {name: tensors[name] for name, slot in plan.slots.items() if slot.file == file}
        save_file(held, directory / "reference", metadata={"format": "pt"})
        assert (directory / file).read_bytes() == (directory / "reference").read_bytes()
    assert set(plan.slots) == set(tensors)


def test_files_keep_the_limit_and_a_larger_tensor_gets_its_own() -> None:
    sizes = {"a": 40, "b": 70, "c": 300, "d": 60, "e": 40}
    specs = {name: TensorSpec(torch.uint8, (size,)) for name, size in sizes.items()}
    plan = ShardPlan.make(specs, 100, PATTERN)
    held: dict[str, list[str]] = {}
    for name, slot in plan.slots.items():
        held.setdefault(slot.file, []).append(name)
    assert [sum(sizes[name] for name in names) for names in held.values() if names != ["c"]] == [40, 70, 100]
    assert ["c"] in held.values()
    assert all(f"-of-0000{len(held)}" in file for file in held)
    assert plan.tensor_bytes == sum(sizes.values())
    assert plan.index()["metadata"] == {"total_size": 510}


def test_a_single_file_is_numbered_only_when_asked_and_limited() -> None:
    specs = {"a": TensorSpec(torch.uint8, (4,))}
    assert list(ShardPlan.make(specs, 100, PATTERN).sizes) == ["model.safetensors"]
    assert list(ShardPlan.make(specs, 100, PATTERN, numbered=True).sizes) == ["model-00001-of-00001.safetensors"]
    assert list(ShardPlan.make(specs, 0, PATTERN, numbered=True).sizes) == ["model.safetensors"]


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensors to plan files for"):
        ShardPlan.make({}, 0, PATTERN)
    with pytest.raises(ValueError, match=r"x: safetensors has no type for torch\.complex128"):
        ShardPlan.make({"x": TensorSpec(torch.complex128, (1,))}, 0, PATTERN)


def test_layer_2_comes_before_layer_10() -> None:
    names = ["model.layers.10.a", "model.layers.2.b", "model.layers.2.a", "lm_head", "h2.x", "h10.x"]
    assert canonical_order(names) == [
        "h2.x",
        "h10.x",
        "lm_head",
        "model.layers.2.a",
        "model.layers.2.b",
        "model.layers.10.a",
    ]


def test_a_view_that_is_not_contiguous_is_written_row_by_row(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    written(tmp_path, {"x": tensor})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], tensor)


def test_writing_in_chunks_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 24)
    tensor = torch.arange(50.0)
    written(tmp_path, {"x": tensor})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], tensor)


@pytest.mark.parametrize("in_kernel", [True, False])
def test_bytes_are_copied_from_a_source_file_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_kernel: bool
) -> None:
    if not in_kernel:

        def refuse(*_: object) -> int:
            raise OSError(errno.EXDEV, "another file system")

        monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    values = torch.arange(8, dtype=torch.int16)
    (tmp_path / "source.bin").write_bytes(b"head" + values.numpy().tobytes() + b"tail")
    plan = ShardPlan.make({"x": spec_of(values), "y": TensorSpec(torch.int8, (1,))}, 0, PATTERN)
    writer = ShardWriter(plan, tmp_path)
    writer.write_bytes_from("x", TensorInfo("x", torch.int16, (8,), "source.bin", 4, 20), tmp_path)
    assert writer.missing() == ["y"]
    assert writer.written == {"x"}
    writer.write("y", torch.zeros(1, dtype=torch.int8))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], values)


def test_two_writers_fill_one_plan(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    plan = ShardPlan.make({name: spec_of(t) for name, t in tensors.items()}, 0, PATTERN)
    first, second = ShardWriter(plan, tmp_path), ShardWriter(plan, tmp_path, create=False)
    second.write("b", tensors["b"])
    first.write("a", tensors["a"])
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert all(torch.equal(opened.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_a_tensor_that_is_not_as_planned_is_refused(tmp_path: Path) -> None:
    plan = ShardPlan.make({"x": TensorSpec(torch.float32, (2, 2))}, 0, PATTERN)
    writer = ShardWriter(plan, tmp_path)
    with pytest.raises(ValueError, match="y is not in the plan"):
        writer.write("y", torch.zeros(1))
    with pytest.raises(ValueError, match=r"x is bfloat16 \[2, 2\], planned as float32 \[2, 2\]"):
        writer.write("x", torch.zeros(2, 2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="x is on meta"):
        writer.write("x", torch.zeros(2, 2, device="meta"))
    with pytest.raises(ValueError, match="x: 4 bytes in f, planned 16"):
        writer.write_bytes_from("x", TensorInfo("x", torch.float32, (2, 2), "f", 0, 4), tmp_path)
    writer.write("x", torch.zeros(2, 2))
    with pytest.raises(ValueError, match="x is written twice"):
        writer.write("x", torch.zeros(2, 2))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ShardPlan.make({"x": TensorSpec(torch.int8, (4,))}, 0, PATTERN)
    writer = ShardWriter(plan, tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(EnvError, match=r"no space left while writing .*model\.safetensors; free space"):
        writer.write("x", torch.zeros(4, dtype=torch.int8))


def test_a_source_that_shrank_is_named(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"ab")
    writer = ShardWriter(ShardPlan.make({"x": TensorSpec(torch.int8, (4,))}, 0, PATTERN), tmp_path)
    with pytest.raises(EnvError, match="source ends at byte 2, expected 4; copy the model again"):
        writer.write_bytes_from("x", TensorInfo("x", torch.int8, (4,), "source", 0, 4), tmp_path)


def test_the_index_names_every_tensor_once_and_in_order() -> None:
    specs = {name: TensorSpec(torch.int8, (60,)) for name in ("b", "a", "c")}
    index = ShardPlan.make(specs, 100, PATTERN).index()
    assert json.dumps(index["weight_map"]) == json.dumps(
        {
            "a": "model-00002-of-00003.safetensors",
            "b": "model-00001-of-00003.safetensors",
            "c": "model-00003-of-00003.safetensors",
        }
    )
