"""Layouts against the hand-worked vectors and the formulas; what a kind writes, it reads back."""

import pytest
import torch
from torch import nn

from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import LinearScheme
from msmodelslim.saver.ascendv1_kinds import OLD_FP8_KIND, group_size_of, kind_of, linear_of, tensors_of
from tests.saver import runs as r

#: what `kind_of` must say, from the table of kinds in docs/formats.md
EVERY = {
    "W8A8 asym": (r.W8A8, "W8A8"),
    "W8A8 sym": (r.W8A8_SYM, "W8A8"),
    "W8A8_DYNAMIC": (r.W8A8_DYNAMIC, "W8A8_DYNAMIC"),
    "W8A8_DYNAMIC group": (LinearScheme(r.INT8_G32, r.A8), "W8A8_DYNAMIC"),
    "W8A8_MIX": (r.W8A8_MIX, "W8A8_MIX"),
    "W8A16": (r.W8A16, "W8A16"),
    "W8A16 asym": (LinearScheme(r.INT8_ASYM), "W8A16"),
    "W8A16 group": (LinearScheme(r.INT8_G32), "W8A16"),
    "W4A8": (r.W4A8, "W4A8_DYNAMIC"),
    "W4A8 two level": (LinearScheme(r.TWO_LEVEL, r.A8), "W4A8_DYNAMIC"),
    "W4A8 two level asym": (LinearScheme(r.TWO_LEVEL_ASYM, r.A8), "W4A8_DYNAMIC"),
    "W4A16": (r.W4A16_G32, "W4A16"),
    "W4A4": (r.W4A4, "W4A4_DYNAMIC"),
    "W4A4 group": (LinearScheme(r.INT4_G32, r.A4), "W4A4_DYNAMIC"),
    "W4A4 group asym": (LinearScheme(r.INT4_G32_ASYM, r.A4), "W4A4_DYNAMIC"),
    "fp8": (r.FP8_DYNAMIC, "W8A8FP8_DYNAMIC"),
    "mxfp8": (LinearScheme(r.MXFP8, r.MXFP8), "W8A8_MXFP8"),
    "mxfp4, mxfp8": (LinearScheme(r.MXFP4, r.MXFP8), "W4A8_MXFP"),
    "mxfp4": (LinearScheme(r.MXFP4, r.MXFP4), "W4A4_MXFP4"),
    "mxfp4 weight only": (LinearScheme(r.MXFP4), "W4A16_MXFP4"),
    "mxfp4 dual scale": (LinearScheme(r.DUAL_SCALE, r.DUAL_SCALE), "W4A4_MXFP4_DUALSCALE"),
}
NOTHING_FITS = {
    "weight-only dual scale": LinearScheme(r.DUAL_SCALE),
    "weight-only mxfp8": LinearScheme(r.MXFP8),
    "static fp8": LinearScheme(r.FP8, r.AFP8_STATIC),
    "one fp8 scale": LinearScheme(r.FP8_TENSOR, r.AFP8_STATIC),
    "fp8 tiles": LinearScheme(r.FP8_BLOCK, r.AFP8_BLOCK),
    "dynamic asymmetric inputs": LinearScheme(r.INT8, r.A8_ASYM),
    "asymmetric weights with static inputs": LinearScheme(r.INT8_ASYM, r.A8_STATIC),
    "W4A8 in one level of groups": LinearScheme(r.INT4_G32, r.A8),
    "W4A16 asymmetric": LinearScheme(r.INT4_G32_ASYM),
}


def linear(bias: bool = True, rows: int = 48, columns: int = 128) -> nn.Linear:
    generator = torch.Generator().manual_seed(3)
    made = nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return made.requires_grad_(False)


def stored(
    scheme: LinearScheme, kind: str, parts: int = 1, dtype: torch.dtype = torch.bfloat16
) -> tuple[QuantLinear, dict]:
    module = r.quantized(linear(), scheme, dtype)
    return module, tensors_of(kind, module, dtype, parts, "m")


@pytest.mark.parametrize(("scheme", "kind"), EVERY.values(), ids=EVERY)
def test_what_is_written_is_read_back(scheme: LinearScheme, kind: str) -> None:
    assert kind_of(scheme) == kind
    module, tensors = stored(scheme, kind)
    again = linear_of(kind, tensors)
    assert torch.equal(again.dequantized_weight(), module.dequantized_weight())
    assert again.scheme.act == scheme.act
    assert again.bias is not None
    assert module.bias is not None
    assert torch.equal(again.bias.to(module.bias.dtype), module.bias)
    rewritten = tensors_of(kind, again, torch.bfloat16, 1, "m")
    assert rewritten.keys() == tensors.keys()
    assert all(r.same_bytes(rewritten[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("scheme", "kind"), EVERY.values(), ids=EVERY)
def test_a_rehearsal_on_meta_foresees_every_tensor(scheme: LinearScheme, kind: str) -> None:
    _, tensors = stored(scheme, kind)
    meta = tensors_of(kind, QuantLinear.on_meta(scheme, 48, 128, torch.bfloat16), torch.bfloat16, 1, "m")
    assert {n: (t.dtype, t.shape) for n, t in meta.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}


@pytest.mark.parametrize("scheme", NOTHING_FITS.values(), ids=NOTHING_FITS)
def test_a_scheme_that_no_layout_fits_has_no_kind(scheme: LinearScheme) -> None:
    assert kind_of(scheme) is None


@pytest.mark.parametrize("scheme", [r.W8A8, r.W8A8_SYM], ids=["asym", "sym"])
def test_the_static_kernel_formula_equals_the_simulated_forward(scheme: LinearScheme) -> None:
    module, tensors = stored(scheme, "W8A8")
    x = torch.randn(5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    codes = (
        (x / tensors["input_scale"].double() + tensors["input_offset"].double())
        .round()
        .clamp(-128, 127)
        .to(torch.int64)
    )
    product = codes @ tensors["weight"].to(torch.int64).T + tensors["quant_bias"].to(torch.int64)
    y = product.double() * tensors["deq_scale"].double()
    # quant_bias is a whole number, so the bias is off by at most half a unit of the product.
    unit = tensors["deq_scale"].double()
    assert ((y - module(x)).abs() <= 0.5 * unit + 1e-6).all()


def test_appendix_b_quant_bias() -> None:
    codes = WeightCodes(torch.tensor([[10, -20, 30]], dtype=torch.int8), torch.tensor([[0.02]]))
    act = {"act_scale": torch.tensor([0.05]), "act_offset": torch.tensor([-3.0])}
    module = QuantLinear(LinearScheme(r.INT8, r.A8_STATIC_ASYM), codes, bias=torch.tensor([0.5]), **act)
    tensors = tensors_of("W8A8", module, torch.bfloat16, 1, "m")
    assert tensors["quant_bias"].tolist() == [560]
    assert tensors["deq_scale"].item() == pytest.approx(0.001)
    assert tensors["bias"].dtype is torch.float32


def test_appendix_b_w4a8_packing() -> None:
    codes = WeightCodes(torch.tensor([[1, -8], [-3, 7]], dtype=torch.int8), torch.tensor([[0.5], [0.25]]))
    tensors = tensors_of("W4A8_DYNAMIC", QuantLinear(r.W4A8, codes), torch.bfloat16, 1, "m")
    assert tensors["weight"].tolist() == [[-47, 120]]
    assert tensors["scale_bias"].tolist() == [[8 * -7 * 0.5], [8 * 4 * 0.25]]


def test_deq_scale_is_a_bit_pattern_for_float16_and_a_number_for_bfloat16() -> None:
    _, bf16 = stored(r.W8A8, "W8A8")
    _, fp16 = stored(r.W8A8, "W8A8", dtype=torch.float16)
    assert bf16["deq_scale"].dtype is torch.float32
    assert fp16["deq_scale"].dtype is torch.int64
    numbers = (fp16["weight_scale"].squeeze(1) * fp16["input_scale"]).numpy().view("int32")
    assert fp16["deq_scale"].tolist() == numbers.tolist()


@pytest.mark.parametrize("scheme", [r.W4A8, LinearScheme(r.TWO_LEVEL_ASYM, r.A8)], ids=["per channel", "two level"])
def test_scale_bias_of_any_tensor_parallel_share_is_eight_times_its_weights(scheme: LinearScheme) -> None:
    module, tensors = stored(scheme, "W4A8_DYNAMIC", parts=16)
    weight = module.dequantized_weight().double()
    assert tensors["scale_bias"].shape == (48, 16)
    for degree in (1, 2, 4, 8, 16):
        shares = tensors["scale_bias"].double().unflatten(1, (degree, -1)).sum(2)
        wanted = 8 * weight.unflatten(1, (degree, -1)).sum(2)
        torch.testing.assert_close(shares, wanted, rtol=1e-5, atol=1e-5)


def test_two_level_weights_are_the_product_of_both_scales() -> None:
    _, tensors = stored(LinearScheme(r.TWO_LEVEL_ASYM, r.A8), "W4A8_DYNAMIC")
    low, high = (tensors["weight"].int() << 28) >> 28, tensors["weight"].int() >> 4
    codes = torch.stack((low, high), 1).flatten(0, 1).unflatten(1, (4, 32)).double()
    second, offset = tensors["weight_scale_second"].double(), tensors["weight_offset_second"].double()
    weight = (codes - offset[..., None]) * second[..., None] * tensors["weight_scale"].double()[..., None]
    again = linear_of("W4A8_DYNAMIC", tensors).dequantized_weight()
    torch.testing.assert_close(again.double(), weight.flatten(1), rtol=1e-6, atol=0)


def test_a_static_linear_without_the_spare_scales_is_still_readable() -> None:
    module, tensors = stored(r.W8A8, "W8A8")
    del tensors["weight_scale"], tensors["weight_offset"]
    torch.testing.assert_close(linear_of("W8A8", tensors).dequantized_weight(), module.dequantized_weight())


def test_the_old_name_of_fp8_has_the_same_layout() -> None:
    _, tensors = stored(r.FP8_DYNAMIC, OLD_FP8_KIND)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "weight": torch.float8_e4m3fn,
        "weight_scale": torch.float32,
        "weight_offset": torch.bfloat16,
        "bias": torch.bfloat16,
    }


def test_group_size_of_the_description() -> None:
    assert group_size_of("W8A8", r.INT8) is None
    assert group_size_of("W4A8_DYNAMIC", r.INT4) == 0
    assert group_size_of("W4A8_DYNAMIC", r.TWO_LEVEL) == 32
    assert group_size_of("W4A16", r.INT4_G32) == 32
    assert group_size_of("W8A8_MXFP8", r.MXFP8) == 32
