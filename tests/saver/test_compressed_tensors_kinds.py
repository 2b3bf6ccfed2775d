"""Layouts against compressed-tensors' own compressors; what a kind writes, it reads back."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from torch import nn

from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import LinearScheme, QDType, QScheme, QScope
from msmodelslim.saver.compressed_tensors_kinds import args_of, kind_of, linear_of, scheme_of, tensors_of
from tests.saver import runs as r

INT4_ASYM = QScheme(QDType.INT4, QScope.PER_CHANNEL, False)
INT8_G32_ASYM = QScheme(QDType.INT8, QScope.PER_GROUP, False, group_size=32)
EVERY = {
    "W8A8": r.W8A8_DYNAMIC,
    "W8A8 act_asym": LinearScheme(r.INT8, r.A8_ASYM),
    "W8A8 static": r.W8A8_SYM,
    "W8A8 static act_asym": r.W8A8,
    "W8A8 group": LinearScheme(r.INT8_G32, r.A8),
    "W8A8 group asym": LinearScheme(INT8_G32_ASYM, r.A8),
    "W8A16": r.W8A16,
    "W8A16 asym": LinearScheme(r.INT8_ASYM),
    "W8A16 group": LinearScheme(r.INT8_G32),
    "W8A16 group asym": LinearScheme(INT8_G32_ASYM),
    "W4A16": LinearScheme(r.INT4),
    "W4A16 asym": LinearScheme(INT4_ASYM),
    "W4A16 group": r.W4A16_G32,
    "W4A16 group asym": LinearScheme(r.INT4_G32_ASYM),
    "W4A8": r.W4A8,
    "W4A8 act_asym": LinearScheme(r.INT4, r.A8_ASYM),
    "W4A8 group": LinearScheme(r.INT4_G32, r.A8),
    "W4A8 group act_asym": LinearScheme(r.INT4_G32, r.A8_ASYM),
    "W4A4": r.W4A4,
    "W4A4 asym": LinearScheme(INT4_ASYM, r.A4),
    "W4A4 group": LinearScheme(r.INT4_G32, r.A4),
    "W4A4 group asym": LinearScheme(r.INT4_G32_ASYM, r.A4),
    "FP8_DYNAMIC": r.FP8_DYNAMIC,
    "FP8_STATIC": LinearScheme(r.FP8, r.AFP8_STATIC),
    "FP8_STATIC ": LinearScheme(r.FP8_TENSOR, r.AFP8_STATIC),
    "FP8_BLOCK": LinearScheme(r.FP8_BLOCK, r.AFP8_BLOCK),
    "MXFP4A16": LinearScheme(r.MXFP4),
    "MXFP4": LinearScheme(r.MXFP4, r.MXFP4),
    "MXFP8A16": LinearScheme(r.MXFP8),
    "MXFP8": LinearScheme(r.MXFP8, r.MXFP8),
}


def linear(rows: int = 44, columns: int = 160) -> nn.Linear:
    """Sizes that are no multiple of a tile and fill the last packed zero point only partly."""
    generator = torch.Generator().manual_seed(3)
    made = nn.Linear(columns, rows, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8 + 0.02)
    return made.requires_grad_(False)


def stored(scheme: LinearScheme) -> tuple[QuantLinear, dict[str, torch.Tensor]]:
    module = r.quantized(linear(), scheme, torch.bfloat16)
    return module, tensors_of(module, torch.bfloat16)


@pytest.mark.parametrize("word", EVERY)
def test_what_is_written_is_read_back(word: str) -> None:
    scheme = EVERY[word]
    assert kind_of(scheme) == word.strip()
    args = args_of(scheme, ["Linear"])
    assert scheme_of(args) == scheme
    module, tensors = stored(scheme)
    again = linear_of(args, tensors)
    assert torch.equal(again.dequantized_weight(), module.dequantized_weight())
    rewritten = tensors_of(again, torch.bfloat16)
    assert rewritten.keys() == tensors.keys()
    assert all(r.same_bytes(rewritten[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("word", EVERY)
def test_the_library_decompresses_to_our_weight(word: str) -> None:
    args = args_of(EVERY[word], ["Linear"])
    module, tensors = stored(EVERY[word])
    compressor = BaseCompressor.get_value_from_registry(args.format)
    # Scales in float32 keep the comparison free of the library's rounding to the type of the scale.
    given = {
        name: t.float() if name == "weight_scale" and t.dtype is torch.bfloat16 else t for name, t in tensors.items()
    }
    weight = compressor.decompress(given, args)["weight"]
    exact = weight.dtype is torch.float32
    torch.testing.assert_close(weight.float(), module.dequantized_weight(), rtol=1e-6 if exact else 2**-8, atol=0)


@pytest.mark.parametrize("word", EVERY)
def test_the_library_stores_the_same_tensors_under_the_same_names(word: str) -> None:
    args = args_of(EVERY[word], ["Linear"])
    _, tensors = stored(EVERY[word])
    compressor = BaseCompressor.get_value_from_registry(args.format)
    own = {name for name in tensors if not name.startswith(("input_", "bias"))}
    assert own == set(compressor.compression_param_names(args)) - {"weight_global_scale"}


@pytest.mark.parametrize("word", EVERY)
def test_a_rehearsal_on_meta_foresees_every_tensor(word: str) -> None:
    _, tensors = stored(EVERY[word])
    meta = tensors_of(QuantLinear.on_meta(EVERY[word], 44, 160, torch.bfloat16), torch.bfloat16)
    assert {n: (t.dtype, t.shape) for n, t in meta.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}


@pytest.mark.parametrize("word", EVERY)
def test_the_schema_survives_its_json(word: str) -> None:
    args = args_of(EVERY[word], ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": args})
    again = QuantizationConfig.model_validate_json(config.model_dump_json())
    assert scheme_of(again.config_groups["group_0"]) == EVERY[word]


@pytest.mark.parametrize(
    ("preset", "word"),
    [
        *(("W8A8", "W8A8"), ("FP8", "FP8_STATIC "), ("FP8_DYNAMIC", "FP8_DYNAMIC"), ("FP8_BLOCK", "FP8_BLOCK")),
        *(("MXFP4", "MXFP4"), ("MXFP4A16", "MXFP4A16"), ("MXFP8", "MXFP8"), ("MXFP8A16", "MXFP8A16")),
    ],
)
def test_a_scheme_equals_the_library_s_preset(preset: str, word: str) -> None:
    known, ours = preset_name_to_scheme(preset, ["Linear"]), args_of(EVERY[word], ["Linear"])
    for side in ("weights", "input_activations"):
        wanted, found = getattr(known, side), getattr(ours, side)
        skip = {"observer", "observer_kwargs"}
        assert (wanted and wanted.model_dump(exclude=skip)) == (found and found.model_dump(exclude=skip))


def test_packing_equals_the_library_s() -> None:
    module, tensors = stored(LinearScheme(r.INT4_G32_ASYM))
    assert torch.equal(tensors["weight_packed"], pack_to_int32(module.codes, 4))
    assert module.weight_offset is not None
    assert torch.equal(
        tensors["weight_zero_point"], pack_to_int32(module.weight_offset.to(torch.int8), 4, packed_dim=0)
    )
    assert tensors["weight_shape"].tolist() == [44, 160]


@pytest.mark.parametrize(
    "scheme",
    [r.W8A8_MIX, LinearScheme(r.TWO_LEVEL, r.A8), LinearScheme(r.MXFP4, r.MXFP8), LinearScheme(r.FP8)],
    ids=["pd_mix", "two_level", "mxfp4 with mxfp8", "weight-only fp8"],
)
def test_what_the_format_cannot_express_has_no_kind(scheme: LinearScheme) -> None:
    assert kind_of(scheme) is None


def test_scales_are_in_the_type_of_the_model_and_those_of_tiles_in_float32() -> None:
    assert stored(r.W8A8)[1]["weight_scale"].dtype is torch.bfloat16
    assert stored(r.W8A8)[1]["input_scale"].dtype is torch.bfloat16
    assert stored(r.W8A8)[1]["input_zero_point"].dtype is torch.int8
    assert stored(LinearScheme(r.FP8_BLOCK, r.AFP8_BLOCK))[1]["weight_scale"].dtype is torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "4-bit floats with scales of"),
        ({"num_bits": 6, "type": "int", "strategy": "channel"}, "6-bit integers are not known here"),
        ({"num_bits": 8, "type": "int", "strategy": "attn_head"}, "strategy attn_head is not known here"),
    ],
)
def test_a_scheme_of_another_writer_is_named(change: dict, message: str) -> None:
    config = QuantizationConfig(config_groups={"g": {"targets": ["Linear"], "weights": change}})
    with pytest.raises(ValueError, match=message):
        scheme_of(config.config_groups["g"])
    empty = QuantizationConfig(config_groups={"g": {"targets": ["Linear"]}})
    with pytest.raises(ValueError, match="the scheme does not quantize weights"):
        scheme_of(empty.config_groups["g"])
