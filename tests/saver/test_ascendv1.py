import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import LinearScheme, QDType, QScheme, QScope
from msmodelslim.saver.ascendv1 import TARGETS, AscendV1Saver, layer_kind
from tests import fixtures
from tests.saver import runs as r
from tests.saver.loader_emulation import OLDER, REGISTRY, Engine, LoaderError

CONFIG = fixtures.model_config("llama", torch.bfloat16)
SHAPES = {
    f"model.layers.{i}.{n}": s for i in range(2) for n, s in fixtures.layer_shapes(CONFIG, "x").items() for n in [n[2:]]
}
LINEARS = {name.removesuffix(".weight"): shape for name, shape in SHAPES.items() if name.endswith("_proj.weight")}

DENSE = {
    "W8A8": r.W8A8,
    "W8A8 symmetric": r.W8A8_SYM,
    "W8A8_DYNAMIC": r.W8A8_DYNAMIC,
    "W8A8_MIX": r.W8A8_MIX,
    "W8A16": r.W8A16,
    "W4A4_DYNAMIC": r.W4A4,
    "W8A8_MXFP8": LinearScheme(r.MXFP8, r.MXFP8),
    "W4A8_MXFP": LinearScheme(r.MXFP4, r.MXFP8),
    "W4A4_MXFP4": LinearScheme(r.MXFP4, r.MXFP4),
    "W8A8FP8_DYNAMIC": r.FP8_DYNAMIC,
}
OLD_DENSE = {"W4A8_DYNAMIC": r.W4A8, "W4A8_DYNAMIC two level": LinearScheme(r.TWO_LEVEL, r.A8)}
UNCHECKED = {
    "W8A16 group": LinearScheme(r.INT8_G32),
    "W8A16 asym": LinearScheme(r.INT8_ASYM),
    "W8A8_DYNAMIC group": LinearScheme(r.INT8_G32, r.A8),
    "W4A4_DYNAMIC group asym": LinearScheme(r.INT4_G32_ASYM, r.A4),
    "W4A8_DYNAMIC two level asym": LinearScheme(r.TWO_LEVEL_ASYM, r.A8),
    "W4A16": r.W4A16_G32,
    "WFP8AFP8_DYNAMIC": r.FP8_DYNAMIC,
}


def engine(directory: Path, bias: bool, **options: Any) -> Engine:
    return Engine(directory, {name: (*shape, bias) for name, shape in LINEARS.items()}, **options)


def description_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "quant_model_description.json").read_text())


@pytest.mark.parametrize(("word", "scheme"), DENSE.items(), ids=DENSE)
def test_the_engine_finds_all_it_asks_for(word: str, scheme: LinearScheme, t_bias: Path, tmp_path: Path) -> None:
    r.save(t_bias, tmp_path / "out", scheme)
    engine(tmp_path / "out", bias=True).load()
    assert description_of(tmp_path / "out")["model.layers.1.mlp.up_proj.weight"] == word.split()[0]


@pytest.mark.parametrize(("word", "scheme"), OLD_DENSE.items(), ids=OLD_DENSE)
def test_int4_weights_of_dense_layers_load_in_the_older_engine_only(
    word: str, scheme: LinearScheme, t_bias: Path, tmp_path: Path
) -> None:
    r.save(t_bias, tmp_path / "out", scheme, target="vllm-ascend-0.23")
    engine(tmp_path / "out", bias=True, registry=OLDER).load()
    with pytest.raises(LoaderError, match="doesn't support quant_type=W4A8_DYNAMIC for layer_type=linear"):
        engine(tmp_path / "out", bias=True).load()
    with pytest.raises(UnsupportedError, match=r"no reader of ascendV1 in vllm-ascend-0\.27 takes weight int4"):
        r.Run(t_bias, tmp_path / "new", r.only(scheme)).rehearse()


def test_float_layers_beside_quantized_ones_load(t_dense: Path, tmp_path: Path) -> None:
    r.save(t_dense, tmp_path / "out", r.only(r.W8A8_DYNAMIC, "*.0.mlp.*", "*.1.self_attn.o_proj"))
    engine(tmp_path / "out", bias=False).load()


def test_a_float16_model_has_deq_scale_as_bit_patterns(tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source", dtype=torch.float16)
    run = r.save(source, tmp_path / "out", r.W8A8)
    engine(tmp_path / "out", bias=False, served=torch.float16).load()
    with pytest.raises(LoaderError, match=r"deq_scale is torch\.int64"):
        engine(tmp_path / "out", bias=False, served=torch.bfloat16).load()
    assert any(
        "serve in float16: served in bfloat16 this model gives garbage" in note for note in run.context.record.warnings
    )


def test_a_tied_head_is_described_though_it_is_not_stored(t_tied: Path, tmp_path: Path) -> None:
    r.save(t_tied, tmp_path / "out", r.W8A8_DYNAMIC)
    engine(tmp_path / "out", bias=False).load()
    assert description_of(tmp_path / "out")["lm_head.weight"] == "FLOAT"
    assert not any(
        name.startswith("lm_head") for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)
    )


def test_the_emulated_engine_stops_where_the_real_one_does(t_dense: Path, tmp_path: Path) -> None:
    r.save(t_dense, tmp_path / "out", r.W8A8_DYNAMIC)
    path = tmp_path / "out" / "quant_model_description.json"
    known = description_of(tmp_path / "out")
    for key, value, error in [
        ("model.layers.0.self_attn.q_proj.weight", None, KeyError),
        ("lm_head.weight", None, KeyError),
        ("model.layers.0.self_attn.q_proj.weight", "FLOAT", "Detected some but not all shards"),
        ("model.layers.0.self_attn.q_proj.weight", "W8A16", "Not all shards"),
        ("model.layers.0.mlp.down_proj.weight", "W4A16", "doesn't support quant_type=W4A16 for layer_type=linear"),
    ]:
        changed = {k: v for k, v in {**known, key: value}.items() if v is not None}
        path.write_text(json.dumps(changed))
        with pytest.raises(
            error if isinstance(error, type) else LoaderError, match=key if error is KeyError else str(error)
        ):
            engine(tmp_path / "out", bias=False).load()


def test_labels_follow_the_modules_and_biases_are_float(t_bias: Path, tmp_path: Path) -> None:
    mixed = {"self_attn": r.W8A8, "mlp": r.W8A8_DYNAMIC}
    r.save(t_bias, tmp_path / "out", lambda name: mixed[name.split(".")[3]])
    found = description_of(tmp_path / "out")
    tensors = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    extra = {"version", "model_quant_type", "group_size", "metadata"}
    assert set(found) - extra == tensors
    for name in tensors:
        kind = "W8A8" if ".self_attn." in name else "W8A8_DYNAMIC" if "mlp" in name else "FLOAT"
        assert found[name] == ("FLOAT" if name.endswith(".bias") else kind)
    assert found["version"] == "1.0.0"
    assert found["model_quant_type"] == "W8A8"
    assert found["group_size"] == 0
    assert found["metadata"]["target"] == "vllm-ascend-0.27"
    assert found["metadata"]["served_dtype"] == "bfloat16"
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("schemes", "main", "group_size", "target"),
    [
        ((r.W8A16, r.W8A8_DYNAMIC), "W8A8_DYNAMIC", 0, "vllm-ascend-0.27"),
        ((r.W8A8_MIX, r.W8A8_DYNAMIC), "W8A8_MIX", 0, "vllm-ascend-0.27"),
        ((r.W4A8, r.W8A16), "W8A16", 0, "vllm-ascend-0.23"),
        ((r.W4A8, r.W4A8), "FLOAT", 0, "vllm-ascend-0.23"),
        ((LinearScheme(r.MXFP4, r.MXFP4), r.W8A8), "W4A4_MXFP4", 32, "vllm-ascend-0.27"),
        ((LinearScheme(r.TWO_LEVEL, r.A8), r.W8A8), "W8A8", 32, "vllm-ascend-0.23"),
    ],
)
def test_the_main_kind_and_the_group_size_of_a_mixed_model(
    schemes: tuple[LinearScheme, LinearScheme], main: str, group_size: int, target: str, t_dense: Path, tmp_path: Path
) -> None:
    r.save(t_dense, tmp_path / "out", lambda name: schemes["mlp" in name], target=target)
    found = description_of(tmp_path / "out")
    assert (found["model_quant_type"], found["group_size"]) == (main, group_size)


def test_kinds_that_want_different_group_sizes_are_refused_together(t_dense: Path, tmp_path: Path) -> None:
    schemes = (LinearScheme(r.MXFP8, r.MXFP8), r.W4A8)
    run = r.Run(t_dense, tmp_path / "out", lambda name: schemes["mlp" in name], target="vllm-ascend-0.23")
    with pytest.raises(
        UnsupportedError, match=r"the modules need 0 \(model.*W4A8_DYNAMIC\) and 32 \(model.*W8A8_MXFP8\)"
    ):
        run.rehearse()


@pytest.mark.parametrize(("word", "scheme"), UNCHECKED.items(), ids=UNCHECKED)
def test_a_layout_that_nothing_reads_is_written_only_unchecked(
    word: str, scheme: LinearScheme, t_dense: Path, tmp_path: Path
) -> None:
    r.save(t_dense, tmp_path / "out", scheme, target="unchecked")
    assert word.split()[0] in description_of(tmp_path / "out").values()
    if word != "WFP8AFP8_DYNAMIC":  # the same tensors have a reader under their newer name
        for target in ("vllm-ascend-0.27", "vllm-ascend-0.23"):
            with pytest.raises(UnsupportedError, match=f"no reader of ascendV1 in {target}"):
                r.Run(t_dense, tmp_path / "no", r.only(scheme), target=target).rehearse()


def test_a_refusal_names_module_scheme_format_target_and_the_kinds_there_are(t_dense: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        r.Run(t_dense, tmp_path / "out", r.only(LinearScheme(r.INT8, r.A8_ASYM))).rehearse()
    assert str(caught.value) == (
        "model.layers.0.self_attn.q_proj: no reader of ascendV1 in vllm-ascend-0.27 takes weight int8 per_channel sym, "
        "act int8 per_token asym (no kind fits); for linears it has W4A4_DYNAMIC, W4A4_MXFP4, W4A8_MXFP, W8A16, W8A8, "
        "W8A8FP8_DYNAMIC, W8A8_DYNAMIC, W8A8_MIX, W8A8_MXFP8; choose a scheme of one of these, exclude the module, or "
        "set the saver's target"
    )


def test_the_targets_agree_with_the_engines() -> None:
    for target, registry in (("vllm-ascend-0.27", REGISTRY), ("vllm-ascend-0.23", OLDER)):
        ours = {
            kind: " ".join(layer for layer in ("linear", "moe") if kind in TARGETS[target][layer]) for kind in registry
        }
        assert ours == registry
        assert set().union(*TARGETS[target].values()) == set(registry)


def test_a_routed_expert_has_readers_of_its_own() -> None:
    assert layer_kind("model.layers.3.mlp.experts.12.up_proj") == "moe"
    assert layer_kind("model.layers.3.mlp.shared_experts.up_proj") == "linear"


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (r.W4A8, "W4A8_DYNAMIC"),
        (r.W4A16_G32, "W4A16"),
        (LinearScheme(r.MXFP4), "W4A16_MXFP4"),
        (r.W8A8_DYNAMIC, "W8A8_DYNAMIC"),
    ],
)
def test_experts_have_kinds_that_dense_layers_lack(
    scheme: LinearScheme, kind: str, t_dense: Path, tmp_path: Path
) -> None:
    saver = r.Run(t_dense, tmp_path / "out", r.only(scheme)).saver
    module = QuantLinear.on_meta(scheme, 128, 64, None)
    tensors, found = saver.export("model.layers.0.mlp.experts.7.up_proj", module)
    assert found == kind
    assert all(
        name.startswith("model.layers.0.mlp.experts.7.up_proj.weight") for name in tensors if "scale_bias" not in name
    )
    with pytest.raises(UnsupportedError, match=r"for routed experts it has .*W4A16 per_group"):
        saver.export("model.layers.0.mlp.experts.7.up_proj", QuantLinear.on_meta(r.W8A8, 128, 64, None))


def test_sizes_that_a_kind_cannot_pack_are_refused(tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source", hidden_size=72, head_dim=16)
    with pytest.raises(
        UnsupportedError, match="W4A4_MXFP4 of ascendV1 needs input features in multiples of 32, not 72"
    ):
        r.Run(source, tmp_path / "out", r.only(LinearScheme(r.MXFP4, r.MXFP4))).rehearse()
    narrow = QScheme(QDType.INT4, QScope.PER_GROUP, group_size=4)
    source = fixtures.t_dense(tmp_path / "narrow", hidden_size=68, head_dim=16)
    with pytest.raises(UnsupportedError, match="W4A16 of ascendV1 needs input features in multiples of 8, not 68"):
        r.Run(source, tmp_path / "out", r.only(LinearScheme(narrow)), target="unchecked").rehearse()
    with pytest.raises(UnsupportedError, match=r"mlp\.down_proj: 136 columns do not divide into 16 parts"):
        source = fixtures.t_dense(tmp_path / "odd", intermediate_size=136)
        r.Run(source, tmp_path / "out", r.only(r.W4A8), target="vllm-ascend-0.23").rehearse()


def test_row_parallel_linears_have_sixteen_columns_of_scale_bias(t_dense: Path, tmp_path: Path) -> None:
    r.save(t_dense, tmp_path / "out", r.W4A8, target="vllm-ascend-0.23")
    tensors = load_file(next((tmp_path / "out").glob("*.safetensors")))
    columns = {name.split(".")[4]: tensor.shape[1] for name, tensor in tensors.items() if name.endswith("scale_bias")}
    assert columns == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1),
        **dict.fromkeys(("o_proj", "down_proj"), 16),
    }


def test_quantization_config_of_a_block_fp8_source_is_gone_and_its_weights_decoded(
    t_fp8: Path, t_fp8_plain: Path, tmp_path: Path
) -> None:
    run = r.Run(t_fp8, tmp_path / "out", r.only(r.W8A8_DYNAMIC, "*.mlp.*"))
    plan = run.rehearse()
    run.write()
    run.saver.commit()
    tensors = load_file(next((tmp_path / "out").glob("*.safetensors")))
    plain = {name: tensor for file in t_fp8_plain.glob("*.safetensors") for name, tensor in load_file(file).items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    assert r.same_bytes(tensors[name], plain[name])
    assert not any("scale_inv" in tensor for tensor in tensors)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert f"{name}_scale_inv" in plan.removed
    assert len(plan.decoded) == 8
    assert "8 block-FP8 weights that stay float are written in bfloat16" in run.context.record.warnings


def test_the_file_is_numbered_unless_one_file_is_asked_for(t_dense: Path, tmp_path: Path) -> None:
    r.save(t_dense, tmp_path / "a", r.W8A16)
    r.save(t_dense, tmp_path / "b", r.W8A16, part_file_size=0)
    assert [path.name for path in (tmp_path / "a").glob("*.safetensors")] == [
        "quant_model_weights-00001-of-00001.safetensors"
    ]
    assert [path.name for path in (tmp_path / "b").glob("*.safetensors")] == ["quant_model_weights.safetensors"]
    for directory in ("a", "b"):
        assert (tmp_path / directory / "quant_model_weights.safetensors.index.json").is_file()


def test_the_config_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"vllm-ascend-0\.27"):
        AscendV1Saver.Config(target="mindie")
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        AscendV1Saver.Config(part_file_size=-1)
    with pytest.raises(ValueError, match="at most 0"):
        AscendV1Saver.Config(ext={"x": 1})
