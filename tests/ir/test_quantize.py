"""Weights to codes: the formulas in numpy, the policies for what formulas leave open, the errors."""

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir import quantize as quantize_module
from msmodelslim.ir.quantize import WeightCodes, dequantize_weight, quantize_weight, refuse_shape
from msmodelslim.ir.scheme import FLOAT, LinearScheme, QDType, QScheme, QScope
from tests.ir.oracle import E4M3, INTEGERS, dequantized, integer_codes, nearest_code

INT8, INT4, FP8, MXFP8, MXFP4 = QDType.INT8, QDType.INT4, QDType.FP8_E4M3, QDType.MXFP8, QDType.MXFP4
TENSOR, CHANNEL, GROUP, BLOCK = QScope.PER_TENSOR, QScope.PER_CHANNEL, QScope.PER_GROUP, QScope.PER_BLOCK
INTEGER_SCHEMES = [
    QScheme(dtype, scope, symmetric, group_size=16 if scope is GROUP else 0)
    for dtype in (INT8, INT4)
    for scope in (TENSOR, CHANNEL, GROUP)
    for symmetric in (True, False)
]
TWO_LEVEL = [QScheme(INT4, GROUP, symmetric, group_size=16, two_level=True) for symmetric in (True, False)]
FP8_SCHEMES = [QScheme(FP8, TENSOR), QScheme(FP8, CHANNEL), QScheme(FP8, BLOCK, block=(128, 128))]
MX_SCHEMES = [QScheme(MXFP8, BLOCK), QScheme(MXFP4, BLOCK), QScheme(MXFP4, QScope.DUAL_SCALE, dual_block=64)]
ALL = INTEGER_SCHEMES + TWO_LEVEL + FP8_SCHEMES + MX_SCHEMES


def random_weight(rows: int = 24, columns: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size, some of one sign only."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 1, rows)[:, None]
    weight[1], weight[2] = weight[1].abs(), -weight[2].abs()
    return weight.to(dtype)


def blocks_of(weight: Tensor, scheme: QScheme) -> list[tuple[tuple[int, ...], Any]]:
    """(index of the scale, index of the elements) of each block."""
    rows, columns = weight.shape
    if scheme.scope is TENSOR:
        return [((0,), np.s_[:, :])]
    width = scheme.group_size or columns
    return [((r, g), np.s_[r, g * width : (g + 1) * width]) for r in range(rows) for g in range(columns // width)]


def assert_codes_follow_numpy(weight: Tensor, scheme: QScheme, scale_dtype: torch.dtype) -> None:
    codes = quantize_weight(weight, scheme, scale_dtype=scale_dtype)
    values = weight.float().numpy()
    for scale_index, elements in blocks_of(weight, scheme):
        scale, offset, expected = integer_codes(values[elements], scheme)
        rounded = torch.tensor(scale).to(scale_dtype).float().numpy()
        scale, offset, expected = integer_codes(values[elements], scheme, rounded)
        assert codes.scale[scale_index] == scale
        assert offset == (0 if codes.offset is None else codes.offset[scale_index])
        assert np.array_equal(codes.codes_OI.numpy()[elements], expected)


@pytest.mark.parametrize("scheme", INTEGER_SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_integer_codes_follow_the_formulas_in_float32_whatever_the_weight(scheme: QScheme, dtype: torch.dtype) -> None:
    assert_codes_follow_numpy(random_weight(dtype=dtype), scheme, torch.float32)


@pytest.mark.parametrize("scheme", INTEGER_SCHEMES, ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_codes_are_chosen_with_the_scale_as_it_will_be_stored(scheme: QScheme, scale_dtype: torch.dtype) -> None:
    assert_codes_follow_numpy(100 * random_weight(), scheme, scale_dtype)  # all scales normal in float16


def test_a_bf16_scale_rounded_first_costs_less_than_one_rounded_last() -> None:
    weight, scheme = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)), QScheme(INT8, CHANNEL)
    first = quantize_weight(weight, scheme, scale_dtype=torch.bfloat16)
    late = quantize_weight(weight, scheme)
    late = WeightCodes(late.codes_OI, late.scale.bfloat16().float())
    error_first, error_late = ((dequantize_weight(c, scheme) - weight).square().mean() for c in (first, late))
    assert error_first < 0.97 * error_late


def test_halves_round_to_even_with_the_offset_inside() -> None:
    # s = 1 and o = −128 + 1 = −127: 0.5 − 127 = −126.5 → −126, where rounding first would give 0 − 127.
    weight = torch.tensor([[-1.0, 254.0, 0.5, 1.5, 2.5]])
    codes = quantize_weight(weight, QScheme(INT8, CHANNEL, symmetric=False))
    assert codes.scale.tolist() == [[1]]
    assert codes.codes_OI.tolist() == [[-128, 127, -126, -126, -124]]
    symmetric = quantize_weight(torch.tensor([[127.0, 0.5, 1.5, -2.5]]), QScheme(INT8, CHANNEL))
    assert symmetric.codes_OI.tolist() == [[127, 0, 2, -2]]


@pytest.mark.parametrize("scheme", FP8_SCHEMES, ids=str)
def test_fp8_codes_are_the_nearest_of_the_enumerated_ones(scheme: QScheme) -> None:
    weight = random_weight(40, 50)
    codes = quantize_weight(weight, scheme)
    values = weight.numpy()
    for r in range(40):
        block = values[r] if scheme.scope is CHANNEL else values
        scale = np.abs(block).max() / np.float32(448)
        assert codes.scale.flatten()[r if scheme.scope is CHANNEL else 0] == scale
        expected = [nearest_code(float(x), E4M3) + 128 * (x < 0) for x in values[r] / scale]
        assert codes.codes_OI[r].view(torch.uint8).tolist() == expected


def test_fp8_tiles_have_a_scale_each_and_smaller_ones_at_the_edges() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(3)).bfloat16()
    scheme = QScheme(FP8, BLOCK, block=(128, 128))
    codes = quantize_weight(weight, scheme, scale_dtype=torch.bfloat16)  # a tile's scale stays float32 all the same
    assert codes.scale.shape == (3, 2)
    for r in range(3):
        for c in range(2):
            tile = weight[128 * r : 128 * r + 128, 128 * c : 128 * c + 128].float()
            scale = tile.abs().max().numpy() / np.float32(448)
            assert codes.scale[r, c] == scale
            expected = (tile / torch.tensor(scale)).to(torch.float8_e4m3fn)
            found = codes.codes_OI[128 * r : 128 * r + 128, 128 * c : 128 * c + 128]
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_fp8_saturates_where_a_scale_was_rounded_down() -> None:
    weight = torch.tensor([[448 * 1.003, 1.0]])  # 1.003 is 1.0 in bfloat16
    codes = quantize_weight(weight, QScheme(FP8, CHANNEL), scale_dtype=torch.bfloat16)
    assert codes.scale.tolist() == [[1.0]]
    assert codes.codes_OI.float().tolist() == [[448, 1]]


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_dequantized_weight_is_what_the_definition_of_the_scheme_says(scheme: QScheme) -> None:
    weight = random_weight(150, 160)
    codes = quantize_weight(weight, scheme)
    found = dequantize_weight(codes, scheme)
    assert found.dtype is torch.float32
    assert np.allclose(found.numpy(), dequantized(codes, scheme), rtol=1e-6, atol=0)


def test_every_weight_is_within_half_a_step() -> None:
    for scheme in INTEGER_SCHEMES:
        weight = random_weight()
        codes = quantize_weight(weight, scheme)
        step = codes.scale.repeat_interleave(16, 1) if scheme.scope is GROUP else codes.scale
        # An asymmetric offset is rounded too, which can push an extremum up to half a step out of range.
        limit = 0.5 if scheme.symmetric else 1.0
        assert ((dequantize_weight(codes, scheme) - weight).abs() <= limit * step * (1 + 1e-5)).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_two_level_intermediate_fits_int8_for_every_pair_of_extrema(symmetric: bool) -> None:
    low, high = torch.meshgrid(torch.arange(-119, 1), torch.arange(120), indexing="ij")
    groups = torch.stack((low.flatten(), high.flatten()), 1).float()
    weight = torch.cat((torch.tensor([[119.0, 0.0]]).expand(len(groups), 2), groups), 1)  # 119 makes the outer scale 1
    scheme = QScheme(INT4, GROUP, symmetric, group_size=2, two_level=True)
    codes = quantize_weight(weight, scheme)
    assert (codes.scale == 1).all()
    assert codes.scale_second is not None and codes.offset_second is not None
    assert torch.equal(codes.scale_second, codes.scale_second.round())
    assert (codes.scale_second >= 1).all()
    assert torch.equal(codes.offset_second, codes.offset_second.round())
    assert dequantize_weight(codes, scheme).abs().max() <= 121


def test_two_level_follows_its_formulas_in_numpy() -> None:
    weight, scheme = random_weight(), QScheme(INT4, GROUP, False, group_size=16, two_level=True)
    codes = quantize_weight(weight, scheme, scale_dtype=torch.bfloat16)
    assert codes.scale_second is not None and codes.offset_second is not None
    assert codes.scale.shape == (24, 1)
    assert codes.scale_second.shape == codes.offset_second.shape == (24, 4)
    for r, row in enumerate(weight.numpy()):
        outer_scale = torch.tensor(np.abs(row).max() / np.float32(119)).bfloat16().float().numpy()
        assert codes.scale[r] == outer_scale
        outer = np.clip(np.rint(row / outer_scale), -119, 119)
        for g in range(4):
            group = outer[16 * g : 16 * g + 16]
            low, high = min(group.min(), 0), max(group.max(), 0)
            scale = max(np.rint((high - low) / 15), 1)
            offset = np.rint(-low / scale) - 8
            assert (codes.scale_second[r, g], codes.offset_second[r, g]) == (scale, offset)
            expected = np.clip(np.rint(group / scale) + offset, -8, 7)
            assert codes.codes_OI[r, 16 * g : 16 * g + 16].tolist() == expected.tolist()


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("factor", [2.0**-10, 1.0, 2.0**10])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_codes_do_not_change_when_the_weight_is_scaled(
    scheme: QScheme, factor: float, scale_dtype: torch.dtype
) -> None:
    weight = random_weight(150, 160, dtype=torch.bfloat16)
    plain = quantize_weight(weight, scheme, scale_dtype=scale_dtype)
    scaled = quantize_weight(weight * factor, scheme, scale_dtype=scale_dtype)
    assert torch.equal(scaled.codes_OI.view(torch.uint8), plain.codes_OI.view(torch.uint8))
    if not scheme.is_mx:
        assert torch.equal(scaled.scale, plain.scale * factor)
    for field in ("offset", "scale_second", "offset_second"):
        found, expected = getattr(scaled, field), getattr(plain, field)
        if scheme.dual_block and expected is not None:
            expected = expected * factor
        assert found is expected is None or torch.equal(found, expected)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_a_weight_of_zeros_has_scale_one_and_codes_zero(scheme: QScheme) -> None:
    codes = quantize_weight(torch.zeros(4, 64), scheme, scale_dtype=torch.bfloat16)
    assert not codes.codes_OI.float().any()
    assert (codes.scale == (0 if scheme.is_mx else 1)).all()
    assert codes.offset is None or not codes.offset.any()
    assert not dequantize_weight(codes, scheme).any()


def test_a_row_of_zeros_among_others_has_scale_one() -> None:
    weight = random_weight()
    weight[5] = 0
    for symmetric in (True, False):
        codes = quantize_weight(weight, QScheme(INT8, CHANNEL, symmetric))
        assert codes.scale[5] == 1
        assert not codes.codes_OI[5].any()
        assert codes.codes_OI[4].any()


def test_tiny_rows_keep_their_resolution() -> None:
    weight = torch.tensor([[1e-30, -5e-31, 2.5e-31]])
    codes = quantize_weight(weight, QScheme(INT8, CHANNEL), scale_dtype=torch.bfloat16)
    assert codes.codes_OI[0, 0] in (126, 127)  # the bfloat16 scale may be half a percent too large
    assert torch.allclose(dequantize_weight(codes, QScheme(INT8, CHANNEL)), weight, rtol=0.02)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scale_too_small_for_its_type_is_the_smallest_normal(scale_dtype: torch.dtype) -> None:
    smallest = torch.finfo(scale_dtype).smallest_normal
    for weight in (torch.full((1, 4), smallest), torch.full((1, 4), 1e-44)):
        codes = quantize_weight(weight, QScheme(INT8, CHANNEL), scale_dtype=scale_dtype)
        assert codes.scale.item() == smallest
        assert codes.codes_OI.tolist() == [[round(weight[0, 0].item() / smallest)] * 4]


def test_a_scale_too_large_for_float16_is_its_largest_number() -> None:
    weight = torch.tensor([[1e9, -1e9, 65504.0]])
    for symmetric, expected in ((True, [127, -128, 1]), (False, [127, -128, 127])):
        codes = quantize_weight(weight, QScheme(INT8, CHANNEL, symmetric), scale_dtype=torch.float16)
        assert codes.scale.item() == 65504
        assert codes.offset is None or codes.offset.item() == 127
        assert codes.codes_OI.tolist() == [expected]


def test_the_largest_float32_weight_has_a_finite_scale_in_every_type() -> None:
    weight = torch.tensor([[torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]])
    for scale_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scheme in (QScheme(INT8, CHANNEL), QScheme(INT8, CHANNEL, False), QScheme(FP8, CHANNEL)):
            assert quantize_weight(weight, scheme, scale_dtype=scale_dtype).scale.isfinite().all()


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_infinity_or_a_nan_is_refused_with_module_and_count(scheme: QScheme, bad: float) -> None:
    weight = random_weight(dtype=torch.bfloat16)
    weight[3, 5] = weight[20, 63] = bad
    with pytest.raises(InvalidModelError, match=r"^model\.layers\.7\.o_proj: 2 of 1536 weights are infinite or NaN; "):
        quantize_weight(weight, scheme, name="model.layers.7.o_proj")


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_chunks_change_nothing(scheme: QScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(300, 160)
    whole = quantize_weight(weight, scheme)
    dense = dequantize_weight(whole, scheme)
    monkeypatch.setattr(quantize_module, "_CHUNK_ELEMENTS", 1000)
    parts = quantize_weight(weight, scheme)
    for field in ("codes_OI", "scale", "offset", "scale_second", "offset_second"):
        found, expected = getattr(parts, field), getattr(whole, field)
        assert found is expected is None or torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(dequantize_weight(parts, scheme), dense)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_a_transposed_view_and_a_parameter_quantize_like_a_plain_tensor(scheme: QScheme) -> None:
    weight = random_weight(64, 64)
    plain = quantize_weight(weight, scheme)
    for other in (weight.t().contiguous().t(), torch.nn.Parameter(weight)):
        codes = quantize_weight(other, scheme)
        assert torch.equal(codes.codes_OI.view(torch.uint8), plain.codes_OI.view(torch.uint8))
        assert codes.codes_OI.is_contiguous()
        assert not codes.scale.requires_grad and not codes.codes_OI.requires_grad


@pytest.mark.parametrize("scheme", [s for s in ALL if s.scope is not GROUP], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1, 33), (129, 130)])
def test_odd_shapes_quantize(scheme: QScheme, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = dequantize_weight(quantize_weight(weight, scheme), scheme)
    worst = 0.5 if scheme.dtype in (INT4, MXFP4) else 0.07
    assert (found - weight).norm() <= worst * weight.norm()


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype is not torch.bfloat16:  # views of the weight itself
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return result


@pytest.mark.parametrize("scheme", [INTEGER_SCHEMES[2], TWO_LEVEL[1], *FP8_SCHEMES, *MX_SCHEMES], ids=str)
def test_no_temporary_is_larger_than_the_codes(scheme: QScheme) -> None:
    weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        quantize_weight(weight, scheme)
    assert largest.nbytes == 4096 * 4096


def test_a_4096_square_weight_takes_less_than_half_a_second_of_one_core() -> None:
    weight = torch.ones(4096, 4096, dtype=torch.bfloat16)
    start_s = time.process_time()
    quantize_weight(weight, QScheme(INT8, CHANNEL))
    assert time.process_time() - start_s < 0.5


ARGS = {
    "int8 channel": (QScheme(INT8, CHANNEL), QuantizationArgs(num_bits=8, strategy="channel")),
    "int8 channel asym": (
        QScheme(INT8, CHANNEL, False),
        QuantizationArgs(num_bits=8, strategy="channel", symmetric=False),
    ),
    "int4 group": (QScheme(INT4, GROUP, group_size=16), QuantizationArgs(num_bits=4, strategy="group", group_size=16)),
    "int4 group asym": (
        QScheme(INT4, GROUP, False, group_size=16),
        QuantizationArgs(num_bits=4, strategy="group", group_size=16, symmetric=False),
    ),
    "fp8 channel": (QScheme(FP8, CHANNEL), QuantizationArgs(num_bits=8, type="float", strategy="channel")),
    "fp8 block": (
        QScheme(FP8, BLOCK, block=(16, 16)),
        QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[16, 16]),
    ),
}


@pytest.mark.parametrize("what", ARGS)
def test_codes_equal_those_of_compressed_tensors_for_the_same_scale(what: str) -> None:
    scheme, args = ARGS[what]
    weight = random_weight()
    codes = quantize_weight(weight, scheme)
    zero_point = torch.zeros_like(codes.scale) if codes.offset is None else codes.offset
    expected = quantize(weight, codes.scale, zero_point, args, dtype=codes.codes_OI.dtype)
    assert torch.equal(codes.codes_OI.view(torch.uint8), expected.view(torch.uint8))
    expected = fake_quantize(weight, codes.scale, zero_point, args)
    assert torch.allclose(dequantize_weight(codes, scheme), expected, rtol=1e-6, atol=0)


def test_asymmetric_scale_and_offset_equal_those_of_compressed_tensors() -> None:
    weight, (scheme, args) = random_weight(), ARGS["int8 channel asym"]
    codes = quantize_weight(weight, scheme)
    scale, zero_point = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
    assert torch.allclose(codes.scale, scale, rtol=1e-6, atol=0)
    assert codes.offset is not None and torch.equal(codes.offset, zero_point.float())


REFUSED = [
    (
        QScheme(INT4, GROUP, group_size=48),
        FLOAT,
        "64 input features do not divide into groups of 48; set group_size to 16",
    ),
    (QScheme(INT4, GROUP, group_size=3), FLOAT, "64 input features do not divide into groups of 3; exclude the module"),
    (QScheme(INT4, GROUP), FLOAT, "weight scope per_group with group_size 0; set group_size"),
    (QScheme(INT8, CHANNEL, group_size=32), FLOAT, "weight scope per_channel with group_size 32; set group_size"),
    (
        QScheme(INT8, BLOCK),
        FLOAT,
        "weight int8 has no scope per_block; use scope per_channel or per_group or per_tensor",
    ),
    (QScheme(FP8, GROUP, group_size=32), FLOAT, "weight fp8_e4m3 has no scope per_group; use scope per_block or"),
    (QScheme(MXFP4, CHANNEL), FLOAT, "weight mxfp4 has no scope per_channel; use scope dual_scale or per_block"),
    (QScheme(FP8, CHANNEL, False), FLOAT, "weight fp8_e4m3 has no offset; set symmetric to true"),
    (
        QScheme(INT8, CHANNEL, two_level=True),
        FLOAT,
        "weight int8 per_channel_two_level sym cannot be two_level; use int4",
    ),
    (
        QScheme(MXFP4, QScope.DUAL_SCALE),
        FLOAT,
        "weight scope dual_scale with dual_block 0; set dual_block to a multiple of 32 for scope dual_scale",
    ),
    (QScheme(MXFP4, QScope.DUAL_SCALE, dual_block=48), FLOAT, "weight scope dual_scale with dual_block 48; set dual"),
    (QScheme(MXFP4, BLOCK, dual_block=64), FLOAT, "weight scope per_block with dual_block 64; set dual_block to a"),
    (FLOAT, FLOAT, "a float weight has no codes; exclude the module or name a weight dtype"),
    (
        QScheme(INT8, CHANNEL),
        QScheme(INT8, CHANNEL),
        "act int8 has no scope per_channel; use scope pd_mix or per_tensor",
    ),
    (QScheme(INT8, CHANNEL), QScheme(MXFP8, BLOCK, False), "act mxfp8 has no offset; set symmetric to true"),
]


@pytest.mark.parametrize(("weight", "act", "message"), REFUSED)
def test_what_cannot_work_is_refused_by_name_before_a_weight_is_read(
    weight: QScheme, act: QScheme, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"mlp.down_proj: {message}")):
        refuse_shape(LinearScheme(weight, act), 32, 64, "mlp.down_proj")
    if act is FLOAT:
        with pytest.raises(UnsupportedError, match=re.escape(f"mlp.down_proj: {message}")):
            quantize_weight(torch.ones(32, 64), weight, name="mlp.down_proj")


def test_an_empty_weight_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^q: a weight of 0 x 64 has nothing to quantize; exclude it$"):
        quantize_weight(torch.ones(0, 64), QScheme(INT8, CHANNEL), name="q")


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_shapes_that_fit_are_not_refused(scheme: QScheme) -> None:
    refuse_shape(LinearScheme(scheme), 7, 48, "q")


def test_codes_use_the_whole_range_of_their_type() -> None:
    for scheme in [s for s in INTEGER_SCHEMES if s.scope is not TENSOR]:
        codes = quantize_weight(random_weight(64, 256), scheme).codes_OI
        low, high = INTEGERS[scheme.dtype]
        assert codes.max() == high
        assert codes.min() == (-high if scheme.symmetric else low)
