"""Element grids and shared exponents against a scalar oracle: `math.frexp` and a search for the nearest code."""

import math
from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from torch import Tensor

from msmodelslim.ir.mx import (
    dual_quantize,
    e2m1_round,
    e2m1_values,
    e4m3_round,
    floor_log2,
    mx_dequantize,
    mx_quantize,
    power_of_two,
    shared_exponent,
)
from msmodelslim.ir.packing import pack_columns_fp4
from msmodelslim.ir.quantize import dequantize_weight, fake_quantize_act, quantize_weight
from msmodelslim.ir.scheme import QDType, QScheme, QScope
from tests.ir.oracle import E2M1, E4M3, float_values, halfway_points, mx_exponent, mx_value, nearest_code

MX = [QDType.MXFP8, QDType.MXFP4]


def every_finite_bfloat16() -> Tensor:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", MX)
def test_a_block_of_one_element_matches_the_oracle_for_every_bfloat16(dtype: QDType) -> None:
    values = every_finite_bfloat16()
    codes = quantize_weight(values[:, None], QScheme(dtype, QScope.PER_BLOCK))
    exponents = [mx_exponent(abs(value), dtype) for value in values.tolist()]
    assert (codes.scale[:, 0].int() - 127).tolist() == exponents
    expected = [mx_value(value, exponent, dtype) for value, exponent in zip(values.tolist(), exponents, strict=True)]
    found = dequantize_weight(codes, QScheme(dtype, QScope.PER_BLOCK))[:, 0]
    assert found.double().tolist() == expected
    assert torch.equal(found.signbit(), values.signbit())


@pytest.mark.parametrize(("dtype", "largest"), [(QDType.MXFP4, 4.0), (QDType.MXFP8, 256.0)])
def test_every_bfloat16_beside_a_larger_one_matches_the_oracle(dtype: QDType, largest: float) -> None:
    values = every_finite_bfloat16()
    values = values[values.abs() < 2 * largest]  # the same octave: E stays 0
    codes, exponent = mx_quantize(torch.stack((torch.full_like(values, largest), values), 1).float(), dtype)
    assert (exponent == 127).all()
    assert mx_dequantize(codes, exponent)[:, 1].tolist() == [mx_value(value, 0, dtype) for value in values.tolist()]


@pytest.mark.parametrize("dtype", MX)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 96, 100])
def test_blocks_of_many_elements_match_the_oracle(dtype: QDType, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(20, columns, generator=generator) * torch.logspace(-44, 37, 20)[:, None]
    codes, exponent = mx_quantize(x, dtype)
    assert codes.shape == x.shape
    assert exponent.shape == (20, math.ceil(columns / 32))
    found = mx_dequantize(codes, exponent)
    for row, values in enumerate(x.tolist()):
        for start in range(0, columns, 32):
            block = values[start : start + 32]
            e = mx_exponent(max(map(abs, block)), dtype)
            assert exponent[row, start // 32] == e + 127
            assert found[row, start : start + 32].tolist() == [mx_value(value, e, dtype) for value in block]


@pytest.mark.parametrize("float_type", [torch.float32, torch.float64])
def test_exponent_of_powers_of_two_and_of_their_neighbours_is_exact(float_type: torch.dtype) -> None:
    powers = torch.tensor([2.0**e for e in range(-125, 128)], dtype=float_type)
    for x in (powers, powers.nextafter(torch.tensor(0.0).to(float_type)), powers * 1.5):
        assert floor_log2(x).tolist() == [math.frexp(value)[1] - 1 for value in x.tolist()]


def test_float64_blocks_are_not_rounded_to_float32_first() -> None:
    below_two = torch.tensor([[2.0 - 2.0**-50]], dtype=torch.float64)
    assert mx_quantize(below_two, QDType.MXFP4)[1].tolist() == [[127 - 2]]  # float32 would see 2.0
    assert mx_quantize(below_two.float(), QDType.MXFP4)[1].tolist() == [[127 - 1]]


def test_a_block_of_zeros_has_the_smallest_exponent_and_codes_zero() -> None:
    for dtype in MX:
        codes, exponent = mx_quantize(torch.zeros(2, 40), dtype)
        assert exponent.tolist() == [[0, 0]] * 2
        assert not codes.view(torch.uint8).any()
        assert not mx_dequantize(codes, exponent).any()


def test_a_block_with_an_infinity_or_a_nan_is_nan_and_its_neighbours_are_not() -> None:
    for dtype in MX:
        for bad in (math.inf, -math.inf, math.nan):
            x = torch.ones(1, 64)
            x[0, 3] = bad
            codes, exponent = mx_quantize(x, dtype)
            assert exponent.tolist() == [[255, 127 - (8 if dtype is QDType.MXFP8 else 2)]]
            found = mx_dequantize(codes, exponent)
            assert found[0, :32].isnan().all()
            assert torch.equal(found[0, 32:], torch.ones(32))


def test_shared_exponents_stay_within_their_byte() -> None:
    extremes = torch.tensor([1e-45, 2.0**-126, 3.4e38])
    assert shared_exponent(extremes, QDType.MXFP8).tolist() == [0, 0, 127 + 127 - 8]
    assert shared_exponent(torch.tensor([1e300], dtype=torch.float64), QDType.MXFP4).tolist() == [254]


def test_e8m0_bytes_are_powers_of_two() -> None:
    found = power_of_two(torch.arange(256).to(torch.uint8), torch.float64)
    assert found[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert found[255].isnan()


def test_e4m3_agrees_with_the_enumeration_of_all_256_codes() -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    values = torch.from_numpy(float_values(codes))
    assert torch.equal(values.isnan(), (torch.arange(256) & 127) == 127)
    finite = ~values.isnan()
    assert codes.double()[finite].tolist() == values[finite].tolist()
    assert torch.equal(e4m3_round(values.float())[finite].view(torch.uint8), codes[finite].view(torch.uint8))
    assert e4m3_round(torch.tensor([math.nan])).float().isnan()


@pytest.mark.parametrize(("table", "round_to_codes"), [(E4M3, e4m3_round), (E2M1, e2m1_round)])
def test_ties_and_their_neighbours_round_to_the_nearest_code(
    table: list[float], round_to_codes: Callable[[Tensor], Tensor]
) -> None:
    ties = torch.tensor([*halfway_points(table), table[-1], 2 * table[-1], math.inf])
    up, down = torch.tensor(math.inf), torch.tensor(0.0)
    x = torch.cat((ties, ties.nextafter(up), ties.nextafter(down)))
    x = torch.cat((x, -x))
    sign = 8 if table is E2M1 else 128
    expected = [nearest_code(value, table) + (sign if value < 0 else 0) for value in x.tolist()]
    assert round_to_codes(x).view(torch.uint8).tolist() == expected


def test_dual_blocks_bring_their_largest_to_6_and_then_are_blocks_of_32() -> None:
    x = torch.randn(3, 150, generator=torch.Generator().manual_seed(5)) * torch.tensor([[1e-3], [1.0], [1e30]])
    x[1, 64:128] = 0
    codes, exponents, outers = dual_quantize(x, 64)
    assert (outers.shape, exponents.shape) == ((3, 3), (3, 5))
    assert outers[1, 1] == 1
    for row in range(3):
        for start in range(0, 150, 32):
            outer = outers[row, start // 64]
            wide = x[row, start // 64 * 64 : start // 64 * 64 + 64].abs().max()
            assert wide == 0 or outer == wide / torch.tensor(6.0)
            block = (x[row, start : start + 32] / outer).tolist()
            exponent = mx_exponent(max(map(abs, block)), QDType.MXFP4)
            assert exponents[row, start // 32] == exponent + 127
            found = mx_dequantize(codes[row, start : start + 32], exponents[row, start // 32, None]).tolist()
            assert found == [mx_value(value, exponent, QDType.MXFP4) for value in block]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_value_that_is_not_finite_spoils_its_own_wide_block_only(bad: float) -> None:
    x = torch.ones(1, 128)
    x[0, 3] = bad
    found = fake_quantize_act(x, QScheme(QDType.MXFP4, QScope.DUAL_SCALE, dual_block=64))
    assert found[0, :64].isnan().all()
    assert torch.equal(found[0, 64:], x[0, 64:])


def test_fp4_codes_stand_for_what_another_library_reads_from_the_packed_bytes() -> None:
    codes = torch.arange(16).to(torch.uint8).reshape(2, 8)
    assert torch.equal(e2m1_values(codes), unpack_fp4_from_uint8(pack_columns_fp4(codes), 2, 8, torch.float32))
