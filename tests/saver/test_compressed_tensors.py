"""The files by the facts of docs/formats.md, and transformers as their reader."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import LinearScheme, QDType, QScheme, QScope
from msmodelslim.saver.compressed_tensors import TARGETS, CompressedTensorsSaver, quantization_config
from tests import fixtures
from tests.saver import runs as r

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the library compiles its fp4 rounding, which takes longer than all tests here

INT4_ASYM = QScheme(QDType.INT4, QScope.PER_CHANNEL, False)
#: kinds whose loaded model must compute what our simulation computes, float32 rounding apart
EXACT = {
    "W8A8 static": r.W8A8_SYM,
    "W8A8 static act_asym": r.W8A8,
    "W8A16": r.W8A16,
    "W8A16 group": LinearScheme(r.INT8_G32),
    "W4A16": LinearScheme(r.INT4),
    "W4A16 group": r.W4A16_G32,
    "FP8_DYNAMIC": r.FP8_DYNAMIC,
    "FP8_STATIC": LinearScheme(r.FP8_TENSOR, r.AFP8_STATIC),
    "FP8_BLOCK": LinearScheme(r.FP8_BLOCK, r.AFP8_BLOCK),
}
#: the library divides dynamic integer ranges into 255 steps, engines and our simulation the larger half into 127, so
#: codes of inputs differ by one here and there
CLOSE = {
    "W8A8": r.W8A8_DYNAMIC,
    "W8A8 act_asym": LinearScheme(r.INT8, r.A8_ASYM),
    "W8A8 group": LinearScheme(r.INT8_G32, r.A8),
    "W4A8": r.W4A8,
    "W4A8 group": LinearScheme(r.INT4_G32, r.A8),
}
IDS = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, so that rounding of the computation does not hide differences; widths above an fp8 tile."""
    directory = tmp_path_factory.mktemp("float32")
    return fixtures.t_bias(directory, dtype=torch.float32, hidden_size=128, intermediate_size=256)


def logits(path: Path, dtype: torch.dtype, scheme: LinearScheme | None = None) -> torch.Tensor:
    """What transformers computes from a directory; with a scheme, its linears replaced by our simulation."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for name, module in list(model.named_modules()):
        if scheme is not None and isinstance(module, torch.nn.Linear) and ".layers." in name:
            model.set_submodule(name, r.quantized(module, scheme, dtype, name))
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.float()
    return found


@pytest.mark.parametrize(("word", "scheme"), EXACT.items(), ids=EXACT)
def test_transformers_computes_what_the_simulation_computes(
    word: str, scheme: LinearScheme, source: Path, tmp_path: Path
) -> None:
    run = r.save_ct(source, tmp_path / "out", scheme, target="transformers-5.24")
    assert set(run.saver.kinds.values()) == {word}
    loaded, simulated = logits(tmp_path / "out", torch.float32), logits(source, torch.float32, scheme)
    torch.testing.assert_close(loaded, simulated, rtol=0, atol=2e-4)
    assert (simulated - logits(source, torch.float32)).abs().max() > 0.01


@pytest.mark.parametrize(("word", "scheme"), CLOSE.items(), ids=CLOSE)
def test_transformers_is_close_to_the_simulation_of_dynamic_integers(
    word: str, scheme: LinearScheme, source: Path, tmp_path: Path
) -> None:
    run = r.save_ct(source, tmp_path / "out", scheme, target="transformers-5.24")
    assert set(run.saver.kinds.values()) == {word}
    loaded, simulated = logits(tmp_path / "out", torch.float32), logits(source, torch.float32, scheme)
    int8 = logits(source, torch.float32, r.W8A8_DYNAMIC) - logits(source, torch.float32)
    assert (loaded - simulated).std() < 2 * int8.std()  # one more rounding of the inputs, no more


@pytest.mark.parametrize(
    "scheme",
    [LinearScheme(r.MXFP4), LinearScheme(r.MXFP8), LinearScheme(r.MXFP8, r.MXFP8)],
    ids=["MXFP4A16", "MXFP8A16", "MXFP8"],
)
def test_transformers_loads_microscaling_weights_of_a_bfloat16_model(
    scheme: LinearScheme, t_dense: Path, tmp_path: Path
) -> None:
    r.save_ct(t_dense, tmp_path / "out", scheme)
    loaded, simulated = logits(tmp_path / "out", torch.bfloat16), logits(t_dense, torch.bfloat16, scheme)
    if scheme.act.is_float:
        assert torch.equal(loaded, simulated)
    plain = logits(t_dense, torch.bfloat16)
    assert (loaded - simulated).std() < (simulated - plain).std()


def test_transformers_loads_a_mixed_model(source: Path, tmp_path: Path) -> None:
    def pick(name: str) -> LinearScheme | None:
        if "layers.0.mlp" in name:
            return None
        return r.W8A16 if "self_attn" in name else r.FP8_DYNAMIC

    r.save_ct(source, tmp_path / "out", pick)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, module in list(model.named_modules()):
        scheme = pick(name) if isinstance(module, torch.nn.Linear) and ".layers." in name else None
        if scheme is not None:
            model.set_submodule(name, r.quantized(module, scheme, torch.float32, name))
    with torch.no_grad():
        torch.testing.assert_close(logits(tmp_path / "out", torch.float32), model(IDS).logits, rtol=0, atol=2e-4)
    block = block_of(tmp_path / "out")
    assert block["format"] == "mixed-precision"
    assert {group["format"] for group in block["config_groups"].values()} == {"pack-quantized", "float-quantized"}


def test_transformers_loads_a_sharded_tied_model(tmp_path: Path) -> None:
    source = fixtures.t_tied(tmp_path / "source", dtype=torch.float32)
    run = r.Run(source, tmp_path / "out", r.only(r.W8A8), CompressedTensorsSaver)
    run.saver.part_file_bytes = 60_000
    run.rehearse()
    run.write()
    run.saver.commit()
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    loaded, simulated = logits(tmp_path / "out", torch.float32), logits(source, torch.float32, r.W8A8)
    torch.testing.assert_close(loaded, simulated, rtol=0, atol=2e-4)


def block_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def test_the_block_of_config_json(t_dense: Path, tmp_path: Path) -> None:
    r.save_ct(t_dense, tmp_path / "out", r.W8A8)
    block = block_of(tmp_path / "out")
    assert block["quant_method"] == "compressed-tensors"
    assert block["quantization_status"] == "compressed"
    assert block["format"] == "int-quantized"
    assert block["ignore"] == ["lm_head"]
    (group,) = block["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"] == {
        **{
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel",
            "group_size": None,
            "dynamic": False,
        },
    }
    assert group["input_activations"]["strategy"] == "tensor"
    assert group["input_activations"]["symmetric"] is False
    QuantizationConfig.model_validate(block)


def test_every_float_matrix_is_ignored_by_name(t_mtp: Path, tmp_path: Path) -> None:
    r.save_ct(t_mtp, tmp_path / "out", r.only(r.W8A8_DYNAMIC, "*.1.*"))
    block, mtp = block_of(tmp_path / "out"), "model.layers.2"
    names = [
        name for name in fixtures.layer_shapes(fixtures.model_config("llama", torch.bfloat16), "x") if "proj" in name
    ]
    linears = [name.removeprefix("x.").removesuffix(".weight") for name in names]
    wanted = {"lm_head", f"{mtp}.eh_proj"} | {
        f"{layer}.{name}" for layer in ("model.layers.0", mtp) for name in linears
    }
    assert set(block["ignore"]) == wanted


def test_targets_of_a_mixed_model_are_full_names(t_dense: Path, tmp_path: Path) -> None:
    r.save_ct(t_dense, tmp_path / "out", lambda name: r.W8A16 if "mlp" in name else r.W8A8)
    targets = {target for group in block_of(tmp_path / "out")["config_groups"].values() for target in group["targets"]}
    assert r"re:^model\.layers\.(?:0|1)\.mlp\.down_proj$" in targets
    assert r"re:^model\.layers\.(?:0|1)\.self_attn\.k_proj$" in targets
    assert len(targets) == 7


def test_groups_of_one_format_share_it() -> None:
    block = quantization_config({"a": r.W8A8_DYNAMIC, "b": r.W4A8}, ["lm_head"])
    assert block["format"] == "int-quantized"
    assert len(block["config_groups"]) == 2


def test_a_block_fp8_source_gets_a_new_block(t_fp8: Path, t_fp8_plain: Path, tmp_path: Path) -> None:
    r.save_ct(t_fp8, tmp_path / "out", r.only(r.W8A8_DYNAMIC, "*.mlp.*"))
    assert block_of(tmp_path / "out")["quant_method"] == "compressed-tensors"
    text = (tmp_path / "out" / "config.json").read_text()
    assert text.count("quantization_config") == 1
    assert "weight_block_size" not in text
    found = load_file(tmp_path / "out" / "model.safetensors")
    plain = {name: tensor for file in t_fp8_plain.glob("*.safetensors") for name, tensor in load_file(file).items()}
    name = "model.layers.0.self_attn.o_proj.weight"
    assert r.same_bytes(found[name], plain[name])


@pytest.mark.parametrize(
    ("scheme", "target", "message"),
    [
        (r.W8A8_MIX, "any", r"act int8 pd_mix asym \(the format cannot express it\); it has FP8_BLOCK"),
        (LinearScheme(r.TWO_LEVEL, r.A8), "any", r"two_level sym.* \(the format cannot express it\)"),
        (LinearScheme(r.INT4_G32_ASYM), "transformers-5.24", r"for transformers-5\.24 .*\(W4A16 group asym\)"),
        (LinearScheme(INT4_ASYM), "any", r"for any .*\(W4A16 asym\)"),
        (r.W8A16, "vllm-0.32", r"for vllm-0\.32 .*\(W8A16\); it has FP8_DYNAMIC, W4A16 group, W4A16 group asym"),
    ],
)
def test_what_the_target_does_not_load_is_refused(
    scheme: LinearScheme, target: str, message: str, t_dense: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn\.q_proj: compressed-tensors .*" + message):
        r.Run(t_dense, tmp_path / "out", r.only(scheme), CompressedTensorsSaver, target=target).rehearse()


def test_any_takes_what_one_engine_loads() -> None:
    assert TARGETS["any"] == TARGETS["transformers-5.24"] | TARGETS["vllm-0.32"]
    assert "W4A16 group asym" in TARGETS["any"]


def test_sizes_and_types_that_an_engine_cannot_take_are_refused(tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source", dtype=torch.float16, intermediate_size=144)
    with pytest.raises(
        UnsupportedError, match=r"MXFP8 of compressed-tensors is decompressed to bfloat16, .*is float16"
    ):
        r.Run(source, tmp_path / "out", r.only(LinearScheme(r.MXFP8, r.MXFP8)), CompressedTensorsSaver).rehearse()
    pick = r.only(r.W4A16_G32, "*.gate_proj", "*.up_proj")
    run = r.Run(source, tmp_path / "out", pick, CompressedTensorsSaver, target="vllm-0.32")
    with pytest.raises(
        UnsupportedError, match=r"gate_proj: the W4A16 group kernel of vllm-0\.32 .* multiples of 32, not 144 x 64"
    ):
        run.rehearse()


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (LinearScheme(r.FP8_BLOCK, r.AFP8_BLOCK), "FP8_BLOCK .* inputs in blocks of 128, and 64 input features"),
        (LinearScheme(r.MXFP4), "MXFP4A16 .* inputs in blocks of 32, and 144 input features"),
    ],
)
def test_blocks_of_the_input_must_divide_it(scheme: LinearScheme, message: str, tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source", intermediate_size=144)
    with pytest.raises(UnsupportedError, match=message):
        r.Run(source, tmp_path / "out", r.only(scheme), CompressedTensorsSaver).rehearse()


def test_transformers_has_no_reader_for_experts_in_int8(t_dense: Path, tmp_path: Path) -> None:
    expert = "model.layers.0.mlp.experts.3.up_proj"
    module = QuantLinear.on_meta(r.W8A8_DYNAMIC, 32, 64, None)
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A8_DYNAMIC), CompressedTensorsSaver, target="transformers-5.24")
    with pytest.raises(UnsupportedError, match=f"{expert}: compressed-tensors for transformers-5.24 has no reader"):
        run.saver.export(expert, module)
    assert run.saver.export(expert, QuantLinear.on_meta(r.W4A16_G32, 32, 64, None))[1] == "W4A16 group"
    run = r.Run(t_dense, tmp_path / "out", r.only(r.W8A8_DYNAMIC), CompressedTensorsSaver)
    assert run.saver.export(expert, module)[1] == "W8A8"
