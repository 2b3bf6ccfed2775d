import json
import mmap
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from msmodelslim.errors import InvalidModelError
from msmodelslim.model import block_fp8
from msmodelslim.model.checkpoint import Checkpoint, read_config
from tests import fixtures

SHARD = "model-{:05d}-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def broken(t_dense, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(t_dense, tmp_path / "broken"))


def edit(path: Path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))


def refusal(path) -> str:
    with pytest.raises(InvalidModelError) as error:
        Checkpoint(path)
    return str(error.value)


def test_tensors_are_those_that_safetensors_itself_reads(t_dense):
    checkpoint = Checkpoint(t_dense)
    stored = {name: value for number in (1, 2, 3) for name, value in load_file(t_dense / SHARD.format(number)).items()}
    assert checkpoint.files == [SHARD.format(number) for number in (1, 2, 3)]
    assert checkpoint.tensors.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(checkpoint.tensor(name), value)
        assert checkpoint.tensors[name].shape == value.shape
    assert checkpoint.total_bytes == sum(value.numel() * 2 for value in stored.values())


def test_every_stored_type_is_read(tmp_path):
    values = {
        str(dtype): torch.arange(6).to(dtype).reshape(2, 3)
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32)
    }
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    values |= {str(dtype): torch.arange(6).to(dtype).reshape(2, 3) for dtype in (torch.int64, torch.uint64, *floats)}
    values |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    fixtures.write_checkpoint(tmp_path, fixtures.model_config("llama", torch.bfloat16), values, shards=1)
    checkpoint = Checkpoint(tmp_path)
    for name, value in values.items():
        found = checkpoint.tensor(name)
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert torch.equal(found, value)


def test_a_tensor_may_start_at_an_odd_byte(tmp_path):
    fixtures.write_checkpoint(
        tmp_path, fixtures.model_config("llama", torch.bfloat16), {"x": torch.arange(4.0)}, shards=1
    )
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    header += b" " * (1 - (8 + len(header)) % 2)
    assert (8 + len(header)) % 4
    data = torch.arange(4.0).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert torch.equal(Checkpoint(tmp_path).tensor("x"), torch.arange(4.0))


def test_a_changed_tensor_does_not_change_the_file(t_dense):
    checkpoint = Checkpoint(t_dense)
    before = checkpoint.tensor("model.norm.weight").clone()
    checkpoint.tensor("model.norm.weight").add_(1)
    assert torch.equal(checkpoint.tensor("model.norm.weight"), before)


def test_a_tensor_costs_no_memory_until_it_is_read_and_none_after_it_is_gone(tmp_path):
    size = 64 << 20
    fixtures.write_checkpoint(
        tmp_path, fixtures.model_config("llama", torch.bfloat16), {"big": torch.ones(size // 2).bfloat16()}, shards=1
    )
    checkpoint = Checkpoint(tmp_path)

    def mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    before = resident()
    tensor = checkpoint.tensor("big")
    assert mapped()
    assert resident() - before < size // 4
    assert float(tensor[:: mmap.PAGESIZE].sum()) == len(range(0, size // 2, mmap.PAGESIZE))
    del tensor
    assert not mapped()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_weight_is_cast_and_an_integer_is_not(t_mtp):
    checkpoint = Checkpoint(t_mtp)
    name = "model.norm.weight"
    assert torch.equal(checkpoint.weight(name, torch.float32), checkpoint.tensor(name).float())
    assert checkpoint.weight("visual.steps", torch.float32).tolist() == [3, 1, 4]


def test_prefetch_asks_for_every_byte_in_steps_that_linux_honours(t_fp8, monkeypatch):
    asked = {file.name: bytearray(file.stat().st_size) for file in t_fp8.glob("*.safetensors")}

    def note(descriptor, start, size, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        assert 0 < size <= 128 << 10
        asked[Path(f"/proc/self/fd/{descriptor}").resolve().name][start : start + size] = b"\1" * size

    monkeypatch.setattr(os, "posix_fadvise", note)
    checkpoint = Checkpoint(t_fp8)
    layer = [info for name, info in checkpoint.tensors.items() if name.startswith("model.layers.0.")]
    checkpoint.prefetch([*(info.name for info in layer if not info.name.endswith("_scale_inv")), "no.such.tensor"])
    assert len({info.file for info in layer}) > 1
    assert all(min(asked[info.file][info.start : info.stop]) for info in layer)
    assert sum(map(sum, asked.values())) < sum(info.nbytes for info in layer) + mmap.PAGESIZE * len(layer)


# --- block FP8


def test_fp8_weights_are_their_codes_times_the_scale_of_their_block(t_fp8, t_fp8_plain):
    checkpoint, plain = Checkpoint(t_fp8), Checkpoint(t_fp8_plain)
    coded = [name for name in plain.tensors if checkpoint.is_fp8_block(name)]
    assert len(coded) == 14
    assert {name for name in checkpoint.tensors if name not in plain.tensors} == set(map(checkpoint.scale_name, coded))
    for name in plain.tensors:
        assert torch.equal(checkpoint.weight(name, torch.bfloat16), plain.tensor(name)), name


def test_fp8_is_decoded_to_hand_worked_values(tmp_path):
    # 300 x 200 in blocks of 128: codes are 1, so each value is the scale of its block.
    scale = torch.arange(1.0, 7.0).reshape(3, 2)
    values = {"x.weight": torch.ones(300, 200).to(torch.float8_e4m3fn), "x.weight_scale_inv": scale}
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fixtures.write_checkpoint(
        tmp_path, fixtures.model_config("llama", torch.bfloat16, quantization_config=how), values, shards=1
    )
    weight_OI = Checkpoint(tmp_path).weight("x.weight", torch.float32)
    assert weight_OI[[0, 127, 128, 255, 256, 299], 0].tolist() == [1, 1, 3, 3, 5, 5]
    assert weight_OI[[0, 0, 0, 299], [127, 128, 199, 199]].tolist() == [1, 2, 2, 6]


def test_fp8_of_more_rows_than_are_decoded_at_once_has_every_scale_in_its_place():
    # 4096 columns of float32 fill 16 MiB with 1024 rows.
    scale = torch.arange(1.0, 11 * 32 + 1).reshape(11, 32)
    weight_OI = block_fp8.decode(torch.ones(1300, 4096).to(torch.float8_e4m3fn), scale, (128, 128), torch.float32)
    assert torch.equal(weight_OI[::128, ::128], scale)
    assert torch.equal(weight_OI[127::128, 127::128], scale[:10])
    assert torch.equal(weight_OI[-1, ::128], scale[10])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"x.weight_scale_inv": None}, "x.weight is float8, but there is no x.weight_scale_inv"),
        ({"x.weight_scale_inv": torch.ones(2, 2)}, "(2, 2), but (300, 200) in blocks of (128, 128) needs (3, 2)"),
        ({"x.weight": torch.ones(300).to(torch.float8_e4m3fn)}, "not a float8_e4m3fn matrix"),
        ({"x.weight": torch.ones(300, 200).to(torch.float8_e5m2)}, "not a float8_e4m3fn matrix"),
    ],
)
def test_fp8_without_fitting_scales_is_refused(tmp_path, changed, sentence):
    values = {"x.weight": torch.ones(300, 200).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(3, 2)}
    values = {name: value for name, value in (values | changed).items() if value is not None}
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fixtures.write_checkpoint(
        tmp_path, fixtures.model_config("llama", torch.bfloat16, quantization_config=how), values, shards=1
    )
    assert sentence in refusal(tmp_path)


def test_fp8_that_the_config_does_not_know_of_is_refused(t_fp8, tmp_path):
    path = Path(shutil.copytree(t_fp8, tmp_path / "fp8"))
    edit(path / "config.json", quantization_config=None)
    assert "q_proj.weight is float8, but config.json has no quantization_config" in refusal(path)


@pytest.mark.parametrize(
    ("key", "how", "named"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ("quantization_config", {"load_in_4bit": True}, "'load_in_4bit'"),
        ("quantization_config", {"quant_method": "fp8"}, "'fp8' with weight_block_size None"),
        (
            "quantization_config",
            {"quant_method": "fp8", "weight_block_size": [0, 128]},
            "'fp8' with weight_block_size [0, 128]",
        ),
        ("compression_config", {"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ("text_config", {"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ("quantization_config", "awq", "'awq'"),
    ],
)
def test_a_quantized_source_is_refused_by_its_method_before_a_shard_is_opened(broken, key, how, named):
    for shard in broken.glob("*.safetensors"):
        shard.unlink()  # so that opening one would end in another error
    edit(broken / "config.json", **{key: how})
    message = refusal(broken)
    assert f"already quantized by {named}" in message
    assert "give the original checkpoint" in message


# --- damage


def test_all_missing_shards_are_named_at_once(broken):
    (broken / SHARD.format(1)).unlink()
    (broken / SHARD.format(2)).unlink()
    message = refusal(broken)
    assert f"{SHARD.format(1)}: is missing; the index places 7 tensors there" in message
    assert f"{SHARD.format(2)}: is missing" in message
    assert SHARD.format(3) not in message


def test_damage_of_different_kinds_is_told_at_once(broken):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4711\n"
    (broken / SHARD.format(1)).write_text(pointer)
    (broken / SHARD.format(2)).unlink()
    third = broken / SHARD.format(3)
    whole = third.read_bytes()
    third.write_bytes(whole[:-10])
    message = refusal(broken)
    assert f"{SHARD.format(1)}: is a git-lfs pointer of {len(pointer)} bytes, not the weights of 4711 bytes" in message
    assert f"{SHARD.format(2)}: is missing" in message
    assert (
        f"{SHARD.format(3)}: {len(whole) - 10} bytes, but its header needs {len(whole)} (10 bytes are missing)"
        in message
    )
    assert "fetch these files again" in message


def test_bytes_behind_the_last_tensor_are_damage(broken):
    with (broken / SHARD.format(3)).open("ab") as stream:
        stream.write(b"xyz")
    assert "(3 bytes too many)" in refusal(broken)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "0 bytes, and they do not begin with a safetensors header"),
        (b"\xff" * 40, "40 bytes, and they do not begin with a safetensors header"),
        ((500).to_bytes(8, "little") + b"{}", "cut off inside its header, 10 bytes of at least 508"),
        ((3).to_bytes(8, "little") + b"{x}", "its safetensors header is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its safetensors header is a list, not an object"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named(broken, content, sentence):
    (broken / SHARD.format(2)).write_bytes(content)
    assert f"{SHARD.format(2)}: {sentence}" in refusal(broken)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "type F4 is not known here"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "do not hold F32 of shape [2] (8 bytes)"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 4]}, "shape [-2] is not a list of sizes"),
        ({"dtype": "F32"}, "not dtype, shape and data_offsets"),
    ],
)
def test_a_header_that_contradicts_itself_is_named(broken, entry, sentence):
    header = json.dumps({"x": entry}).encode()
    (broken / SHARD.format(2)).write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    message = refusal(broken)
    assert f"{SHARD.format(2)}: x: " in message
    assert sentence in message


def test_a_tensor_that_its_shard_lacks_is_named(broken):
    values = load_file(broken / SHARD.format(2))
    name = sorted(values)[0]
    del values[name]
    save_file(values, broken / SHARD.format(2))
    assert f"{SHARD.format(2)}: lacks {name}, which the index places there" in refusal(broken)


def test_a_stray_file_changes_nothing(broken, t_dense):
    save_file({"model.norm.weight": torch.zeros(64)}, broken / "extra.safetensors")
    checkpoint = Checkpoint(broken)
    assert checkpoint.stray_files == ["extra.safetensors"]
    assert torch.equal(checkpoint.tensor("model.norm.weight"), Checkpoint(t_dense).tensor("model.norm.weight"))


def test_the_index_decides_between_two_shards_with_one_name(broken, t_dense):
    values = load_file(broken / SHARD.format(1))
    save_file({**values, "model.norm.weight": torch.zeros(64)}, broken / SHARD.format(1))
    checkpoint = Checkpoint(broken)
    assert checkpoint.tensors["model.norm.weight"].file == SHARD.format(3)
    assert torch.equal(checkpoint.tensor("model.norm.weight"), Checkpoint(t_dense).tensor("model.norm.weight"))


def test_a_tensor_outside_the_index_is_listed_and_not_read(broken):
    values = load_file(broken / SHARD.format(1))
    save_file({**values, "new.weight": torch.zeros(64)}, broken / SHARD.format(1))
    checkpoint = Checkpoint(broken)
    assert checkpoint.stray_tensors == {"new.weight": SHARD.format(1)}
    assert "new.weight" not in checkpoint.tensors


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", f"{INDEX}: is not JSON"),
        ("[1]", f"{INDEX}: is a list, not a JSON object"),
        ("{}", f"{INDEX}: has no weight_map"),
        ('{"weight_map": {"x": "../other.safetensors"}}', "x: '../other.safetensors' is not the name of a file"),
    ],
)
def test_an_unreadable_index_is_named(broken, content, sentence):
    (broken / INDEX).write_text(content)
    assert sentence in refusal(broken)


def test_shards_without_an_index_are_refused(broken):
    (broken / INDEX).unlink()
    assert f"has 3 safetensors files but no {INDEX}; fetch the index" in refusal(broken)


def test_one_file_needs_no_index_whatever_its_name(tmp_path):
    fixtures.t_dense(tmp_path, shards=1)
    assert Checkpoint(tmp_path).files == ["model.safetensors"]
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert Checkpoint(tmp_path).files == ["weights.safetensors"]


def test_model_safetensors_wins_over_other_files(tmp_path):
    fixtures.t_dense(tmp_path, shards=1)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert (checkpoint.files, checkpoint.stray_files) == (["model.safetensors"], ["consolidated.safetensors"])


def test_pickles_alone_are_refused(broken):
    for path in [*broken.glob("*.safetensors"), broken / INDEX]:
        path.unlink()
    (broken / "pytorch_model.bin").write_bytes(b"x")
    message = refusal(broken)
    assert "has its weights only as pickles (pytorch_model.bin)" in message
    assert "convert them with save_pretrained" in message


def test_a_directory_without_weights_is_named(broken):
    for path in [*broken.glob("*.safetensors"), broken / INDEX]:
        path.unlink()
    assert "has no safetensors file" in refusal(broken)


def test_a_path_that_is_no_directory_is_named(tmp_path, t_dense):
    assert f"model path {tmp_path / 'none'} does not exist" in refusal(tmp_path / "none")
    assert "is a file, not a directory" in refusal(t_dense / "config.json")
    assert f"{tmp_path} has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize(("content", "sentence"), [("{,}", "is not JSON"), ("3", "is a int, not a JSON object")])
def test_an_unreadable_config_is_named(broken, content, sentence):
    (broken / "config.json").write_text(content)
    with pytest.raises(InvalidModelError, match=f"config.json: {sentence}"):
        read_config(broken)


# --- the type


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "float16"}, torch.float32),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({"text_config": {"torch_dtype": "float32"}}, torch.float32),
        ({"dtype": "float32", "text_config": {"dtype": "float16"}}, torch.float32),
        ({"dtype": "auto"}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
)
def test_the_type_stands_under_either_key_outside_or_inside(broken, keys, dtype):
    edit(broken / "config.json", **{"dtype": None, **keys})
    assert Checkpoint(broken).dtype == dtype


def test_types_that_disagree_warn(broken, caplog):
    edit(broken / "config.json", dtype="float32", torch_dtype="float16", text_config={"dtype": "bfloat16"})
    Checkpoint(broken)
    assert "dtype float32 is used; torch_dtype float16, text_config.dtype bfloat16 disagrees" in caplog.text


def test_types_that_agree_do_not_warn(broken, caplog):
    edit(broken / "config.json", torch_dtype="bfloat16")
    Checkpoint(broken)
    assert not caplog.records


def test_a_type_that_is_none_is_refused(broken):
    edit(broken / "config.json", dtype="int4")
    assert "config.json: dtype: 'int4' is not a type; write bfloat16 or float16 or float32" in refusal(broken)


def test_without_a_word_the_type_is_that_of_most_bytes(tmp_path):
    values = {"a": torch.zeros(3), "b": torch.zeros(100).half(), "c": torch.zeros(100, dtype=torch.int64)}
    config = fixtures.model_config("llama", torch.bfloat16)
    del config["dtype"]
    fixtures.write_checkpoint(tmp_path, config, values, shards=1)
    assert Checkpoint(tmp_path).dtype == torch.float16
