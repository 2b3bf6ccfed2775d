"""What all formats share, driven through both of them on the tiny checkpoints."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import LinearScheme
from msmodelslim.model.structure import LayerStructure
from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.saver.ascendv1 import AscendV1Saver
from msmodelslim.saver.base import BaseSaver
from msmodelslim.saver.compressed_tensors import CompressedTensorsSaver
from tests import fixtures
from tests.saver import runs as r

SAVERS = {"ascendv1": AscendV1Saver, "compressed-tensors": CompressedTensorsSaver}
savers = pytest.mark.parametrize("saver", SAVERS.values(), ids=SAVERS)
MLP_ONLY = r.only(r.W8A8_DYNAMIC, "*.mlp.*")


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


@savers
def test_keys_are_those_of_the_source_plus_additions(saver: type[BaseSaver], t_mtp: Path, tmp_path: Path) -> None:
    r.save(t_mtp, tmp_path / "out", r.W8A8_DYNAMIC, saver)
    source, found = tensors_of(t_mtp), tensors_of(tmp_path / "out")
    quantized = {f"model.layers.{i}.{name}" for i in (0, 1) for name in fixtures.layer_shapes(fixtures.model_config(
        "llama", torch.bfloat16), "x") if name.endswith("_proj.weight")}  # fmt: skip
    quantized = {name.replace("x.", "", 1) for name in quantized}
    added = {"weight_scale", "weight_offset"} if saver is AscendV1Saver else {"weight_scale"}
    assert set(found) == set(source) | {
        f"{name.removesuffix('weight')}{suffix}" for name in quantized for suffix in added
    }
    # What the module tree has no place for (an extra prediction block, an unknown prefix) comes along as it is.
    assert all(r.same_bytes(found[name], source[name]) for name in set(source) - quantized)


@savers
def test_an_excluded_linear_keeps_its_bytes(saver: type[BaseSaver], t_bias: Path, tmp_path: Path) -> None:
    r.save(t_bias, tmp_path / "out", MLP_ONLY, saver)
    source, found = tensors_of(t_bias), tensors_of(tmp_path / "out")
    kept = [name for name in source if ".mlp." not in name]
    assert len(kept) == 3 + 2 * (2 + 8)
    assert all(r.same_bytes(found[name], source[name]) for name in kept)


@savers
def test_float32_tensors_of_a_bfloat16_model_keep_their_bytes(saver: type[BaseSaver], tmp_path: Path) -> None:
    config = fixtures.model_config("llama", torch.bfloat16)
    tensors = fixtures.dense_tensors(config, 0, torch.float32)
    source = fixtures.write_checkpoint(tmp_path / "source", config, tensors)
    r.save(source, tmp_path / "out", MLP_ONLY, saver)
    found = tensors_of(tmp_path / "out")
    name = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(tensors[name], tensors[name].bfloat16().float())
    assert all(r.same_bytes(found[name], tensor) for name, tensor in tensors.items() if ".mlp." not in name)


def test_a_value_that_a_processor_changed_is_written_in_the_source_s_type(tmp_path: Path) -> None:
    config = fixtures.model_config("llama", torch.bfloat16)
    tensors = fixtures.dense_tensors(config, 0, torch.float32)
    source = fixtures.write_checkpoint(tmp_path / "source", config, tensors)
    run = r.Run(source, tmp_path / "out", MLP_ONLY)

    def double(name: str, layer: nn.Module) -> None:
        norm = layer.get_submodule("input_layernorm")
        norm.weight = nn.Parameter(norm.weight * 2, requires_grad=False)

    run.rehearse()
    run.write(double)
    run.saver.commit()
    name = "model.layers.0.input_layernorm.weight"
    found = tensors_of(tmp_path / "out")[name]
    assert found.dtype is torch.float32
    assert torch.equal(found, tensors[name].bfloat16().float() * 2)


def test_a_parameter_that_the_source_lacks_is_added_in_its_own_type(t_dense: Path, tmp_path: Path) -> None:
    run = r.Run(t_dense, tmp_path / "out", MLP_ONLY)

    def shift(name: str, layer: nn.Module) -> None:
        layer.get_submodule("input_layernorm").register_parameter("bias", nn.Parameter(torch.ones(64)))

    for name in run.adapter.layer_names:
        shift(name, run.context.model.get_submodule(name).to("meta"))
    run.rehearse()
    run.write(shift)
    run.saver.commit()
    found = tensors_of(tmp_path / "out")["model.layers.1.input_layernorm.bias"]
    assert torch.equal(found, torch.ones(64))
    description = json.loads((tmp_path / "out" / "quant_model_description.json").read_text())
    assert description["model.layers.1.input_layernorm.bias"] == "FLOAT"


@savers
def test_three_shards_become_one_and_one_becomes_many(saver: type[BaseSaver], tmp_path: Path) -> None:
    whole = fixtures.t_dense(tmp_path / "whole", shards=1)
    parts = fixtures.t_dense(tmp_path / "parts", shards=3)
    r.save(parts, tmp_path / "one", r.W8A8_DYNAMIC, saver, part_file_size=0)
    run = r.Run(whole, tmp_path / "many", r.only(r.W8A8_DYNAMIC), saver)
    run.saver.part_file_bytes = 30_000
    plan = run.rehearse()
    run.write()
    run.saver.commit()
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(r.same_bytes(one[name], tensor) for name, tensor in many.items())
    files = {path.name for path in (tmp_path / "many").glob("*.safetensors")}
    assert files == set(plan.files)
    assert len(files) > 3
    held = {file: load_file(tmp_path / "many" / file) for file in files}
    sizes = [
        sum(t.numel() * t.element_size() for t in tensors.values()) for tensors in held.values() if len(tensors) > 1
    ]
    assert max(sizes) <= 30_000
    index = json.loads((tmp_path / "many" / saver.reader.index_name).read_text())
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in many.values())
    stray = {path.name for path in (tmp_path / "one").glob("*.index.json")} - {saver.reader.index_name}
    assert not stray


@savers
def test_the_plan_foresees_files_and_bytes(saver: type[BaseSaver], t_bias: Path, tmp_path: Path) -> None:
    run = r.Run(t_bias, tmp_path / "out", r.only(r.W8A8), saver)
    plan = run.rehearse()
    assert not list(tmp_path.iterdir())
    run.write()
    run.saver.commit()
    on_disk = {path: path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert plan.total_bytes == sum(on_disk.values())
    assert plan.files == {path.name: size for path, size in on_disk.items() if path.suffix == ".safetensors"}
    assert set(plan.tensors) == set(tensors_of(tmp_path / "out"))
    assert len(set(plan.kinds.values())) == 1
    assert len(plan.kinds) == 14


@savers
def test_side_files_and_config_stay_as_they_are(saver: type[BaseSaver], tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source")
    # Spelled as no serializer would: the text must survive, not only its meaning.
    text = (
        (source / "config.json")
        .read_text()
        .replace("1e-06", "1.0E-6")
        .replace('"use_cache": true', '"use_cache" :true')
    )
    (source / "config.json").write_text(text)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    r.save(source, tmp_path / "out", r.W8A8_DYNAMIC, saver)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "additional_chat_templates/tool.jinja",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    written = (tmp_path / "out" / "config.json").read_text()
    if saver is AscendV1Saver:
        assert written == text
    else:
        assert written.startswith(text.rstrip("}\n"))
        assert json.loads(written) == {
            **json.loads(text),
            "quantization_config": json.loads(written)["quantization_config"],
        }


@savers
@pytest.mark.parametrize("equal", [True, False])
def test_a_stored_head_of_a_tied_model_is_judged_by_its_values(
    saver: type[BaseSaver], equal: bool, t_tied: Path, tmp_path: Path
) -> None:
    config = json.loads((t_tied / "config.json").read_text())
    tensors = tensors_of(t_tied)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if equal else embedding + 1
    source = fixtures.write_checkpoint(tmp_path / "source", config, tensors)
    run = r.save(source, tmp_path / "out", r.W8A8_DYNAMIC, saver)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is equal
    kept = "lm_head.weight" in tensors_of(tmp_path / "out")
    assert kept == (saver is AscendV1Saver or not equal)
    told = [note for note in run.context.record.warnings if "tie_word_embeddings is false now" in note]
    assert bool(told) is not equal
    if kept:
        assert r.same_bytes(tensors_of(tmp_path / "out")["lm_head.weight"], tensors["lm_head.weight"])


@savers
def test_a_tied_model_without_a_stored_head_stays_so(saver: type[BaseSaver], t_tied: Path, tmp_path: Path) -> None:
    r.save(t_tied, tmp_path / "out", r.W8A8_DYNAMIC, saver)
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


@savers
def test_parts_of_a_fused_linear_need_one_scheme(saver: type[BaseSaver], t_dense: Path, tmp_path: Path) -> None:
    def but_k(name: str) -> LinearScheme | None:
        return None if name.endswith("k_proj") else r.W8A8_DYNAMIC

    with pytest.raises(UnsupportedError, match=r"self_attn\.q_proj and .*k_proj and .*v_proj as one .*k_proj is float"):
        r.Run(t_dense, tmp_path / "out", but_k, saver).rehearse()

    def mixed(name: str) -> LinearScheme:
        return r.W8A8 if name.endswith("up_proj") else r.W8A8_DYNAMIC

    with pytest.raises(
        UnsupportedError, match=r"gate_proj is weight .* per_token sym, .*up_proj is weight .*per_tensor asym"
    ):
        r.Run(t_dense, tmp_path / "out", mixed, saver).rehearse()


@savers
def test_parts_of_a_fused_linear_need_one_activation_scale(
    saver: type[BaseSaver], t_dense: Path, tmp_path: Path
) -> None:
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A8), saver)
    run.rehearse()

    def shift(name: str, layer: nn.Module) -> None:
        linear = layer.get_submodule("mlp.up_proj")
        assert isinstance(linear, QuantLinear)
        assert linear.act_scale is not None
        linear.act_scale = linear.act_scale * 2

    with pytest.raises(UnsupportedError, match=r"input of .*gate_proj and .*up_proj once.*gate_proj has \(0\.029"):
        run.write(shift)
    run.saver.abort()
    assert not list(tmp_path.iterdir())


def test_a_layer_that_was_never_written_fails_the_run(t_dense: Path, tmp_path: Path) -> None:
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A8_DYNAMIC))
    run.rehearse()
    run.saver.pre_run()
    with pytest.raises(
        RuntimeError, match=r"42 planned tensors were never written: model\.layers\.0\.mlp\.down_proj\.weight"
    ):
        run.saver.post_run()
    run.saver.abort()
    assert not list(tmp_path.iterdir())


def test_a_linear_that_became_another_scheme_fails_the_run(t_dense: Path, tmp_path: Path) -> None:
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A8_DYNAMIC))
    run.rehearse()
    run.pick = r.only(LinearScheme(r.INT4, r.A4))
    run.write()  # the same tensors, so nothing to see here
    run.saver.abort()
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A8_DYNAMIC))
    run.rehearse()
    run.pick = r.only(LinearScheme(r.MXFP8, r.MXFP8))
    with pytest.raises(ValueError, match=r"q_proj\.weight is float8_e4m3fn \[64, 64\], planned as int8 \[64, 64\]"):
        run.write()
    run.saver.abort()


def test_nothing_is_visible_before_commit_and_abort_takes_it_back(t_dense: Path, tmp_path: Path) -> None:
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A8_DYNAMIC))
    run.rehearse()
    run.saver.abort()  # before anything was opened
    run.write()
    assert run.saver.directory.name == f".out.partial-{os.getpid()}"
    assert [path.name for path in tmp_path.iterdir()] == [run.saver.directory.name]
    run.saver.abort()
    assert not list(tmp_path.iterdir())


def test_a_second_run_replaces_the_first_as_a_whole(t_dense: Path, tmp_path: Path) -> None:
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A16))
    run.saver.part_file_bytes = 30_000
    run.rehearse()
    run.write()
    run.saver.commit()
    r.save(t_dense, tmp_path / "out", r.W8A8_DYNAMIC)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == [
        "quant_model_weights-00001-of-00001.safetensors"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_source_is_only_read(tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()}
    r.save(source, tmp_path / "out", r.W8A8)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()} == before


def test_files_that_stay_behind_are_told(tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source")
    save_file({"x": torch.zeros(1)}, source / "adapter.safetensors")
    run = r.save(source, tmp_path / "out", r.W8A16)
    assert "files of the source that were not copied: adapter.safetensors" in run.context.record.warnings
    assert not (tmp_path / "out" / "adapter.safetensors").exists()


def test_the_record_says_how_each_module_is_stored(t_dense: Path, tmp_path: Path) -> None:
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A8))
    run.rehearse()
    entry: dict[str, Any] = {"scheme": "x"}
    run.context.record.modules["model.layers.0.mlp.up_proj"] = entry
    run.write()
    run.saver.abort()
    assert entry == {"scheme": "x", "kind": "W8A8"}


def test_a_saver_needs_no_data_and_says_so(t_dense: Path, tmp_path: Path) -> None:
    saver = r.Run(t_dense, tmp_path / "out", MLP_ONLY).saver
    assert saver.is_data_free()
    assert not saver.support_distributed()


def test_a_router_that_is_no_linear_is_left_float_by_name(t_dense: Path, tmp_path: Path) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 64, device="meta"))

    run = r.Run(t_dense, tmp_path / "out", MLP_ONLY, CompressedTensorsSaver)
    layer = nn.ModuleDict({"gate": Router(), "norm": nn.RMSNorm(8), "table": nn.Embedding(2, 2)})
    run.adapter.structure = lambda layer: LayerStructure()  # type: ignore[method-assign]
    run.saver.rehearse(BatchProcessRequest("model.layers.0", layer))
    assert run.saver.float_linears == ["model.layers.0.gate"]
