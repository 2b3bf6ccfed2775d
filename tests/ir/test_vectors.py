"""Vectors small enough to check by hand; the numbers were worked out on paper from the formulas."""

import pytest
import torch
from torch import Tensor

from msmodelslim.ir.mx import e4m3_round
from msmodelslim.ir.packing import deq_scale, pack_columns_int32, pack_rows_int4, quant_bias
from msmodelslim.ir.quantize import WeightCodes, act_qparam, dequantize_weight, fake_quantize_act, quantize_weight
from msmodelslim.ir.scheme import QDType, QScheme, QScope


def test_int8_asymmetric() -> None:
    weight = torch.tensor([[-0.6, -0.1, 0.0, 0.25, 1.95]])
    scheme = QScheme(QDType.INT8, QScope.PER_CHANNEL, symmetric=False)
    codes = quantize_weight(weight, scheme)
    assert codes.scale.item() == pytest.approx(0.01, rel=1e-6)
    assert codes.offset is not None and codes.offset.tolist() == [[-68]]
    assert codes.codes_OI.tolist() == [[-128, -78, -68, -43, 127]]
    assert torch.allclose(dequantize_weight(codes, scheme), weight, atol=1e-7)


def test_int4_symmetric() -> None:
    weight = torch.tensor([[0.7, -0.34, 0.05, -0.71, 0.21, 0.6]])
    scheme = QScheme(QDType.INT4, QScope.PER_CHANNEL)
    codes = quantize_weight(weight, scheme)
    assert codes.scale.item() == pytest.approx(0.71 / 7, rel=1e-6)
    assert codes.codes_OI.tolist() == [[7, -3, 0, -7, 2, 6]]
    assert (dequantize_weight(codes, scheme) - weight).square().sum().item() == pytest.approx(4.000e-3, rel=1e-3)


def test_mxfp4_block() -> None:
    weight = torch.tensor([[7.0, 0.26, -1.3, 2.5, 5.1, -0.7, 0.0, 3.4]])
    scheme = QScheme(QDType.MXFP4, QScope.PER_BLOCK)
    codes = quantize_weight(weight, scheme)
    assert codes.scale.tolist() == [[127]]
    assert codes.codes_OI.tolist() == [[7, 1, 11, 4, 7, 9, 0, 5]]
    assert dequantize_weight(codes, scheme).tolist() == [[6, 0.5, -1.5, 2, 6, -0.5, 0, 3]]
    assert (dequantize_weight(codes, scheme) - weight).square().sum().item() == pytest.approx(2.3576, rel=1e-4)


def test_e4m3_rounds_half_to_even_and_saturates() -> None:
    values = torch.tensor([0.3, 17, 18, 19, 449, 2**-10, 1.5 * 2**-9])
    assert e4m3_round(values).float().tolist() == [0.3125, 16, 18, 20, 448, 0, 2**-8]


def test_w4a8_bytes_hold_two_rows() -> None:
    packed = pack_rows_int4(torch.tensor([[1, -8], [-3, 7]], dtype=torch.int8))
    assert packed.tolist() == [[-47, 120]]
    assert packed.view(torch.uint8).tolist() == [[209, 120]]


def test_int32_words_hold_eight_offset_nibbles() -> None:
    codes = torch.tensor([[0, 1, -1, 7, -8, 3, -4, 5]], dtype=torch.int8)
    assert pack_columns_int32(codes, 4).tolist() == [[0xD4B0F798 - 2**32]] == [[-726599784]]


def test_static_w8a8_kernel_and_float_path_give_the_same_number() -> None:
    codes = torch.tensor([[10, -20, 30]], dtype=torch.int8)
    weight_scale, act_scale, act_offset = torch.tensor([[0.02]]), torch.tensor([0.05]), torch.tensor([-3.0])
    found = quant_bias(codes, weight_scale, act_scale, act_offset, torch.tensor([0.5]))
    assert found.dtype is torch.int32
    assert found.tolist() == [560]
    assert deq_scale(weight_scale, act_scale).tolist() == pytest.approx([0.001], rel=1e-6)
    x_codes = torch.tensor([5.0, -7.0, 100.0])
    x = (x_codes - act_offset) * act_scale
    scheme = QScheme(QDType.INT8, QScope.PER_TENSOR, symmetric=False)
    assert torch.allclose(fake_quantize_act(x, scheme, act_scale, act_offset), x)
    weight = dequantize_weight(WeightCodes(codes, weight_scale), QScheme(QDType.INT8, QScope.PER_CHANNEL))
    assert (weight @ x + 0.5).item() == pytest.approx(3.75, rel=1e-6)
    assert ((codes.long() @ x_codes.long()).item() + found.item()) * 0.001 == pytest.approx(3.75)


def test_two_level_w4a8() -> None:
    weight = torch.tensor([[1.19, -0.6, 0.3, -0.119]])
    scheme = QScheme(QDType.INT4, QScope.PER_GROUP, symmetric=False, group_size=4, two_level=True)
    codes = quantize_weight(weight, scheme)
    assert codes.scale.item() == pytest.approx(0.01, rel=1e-6)
    scale_second, offset_second = second_level(codes)
    assert (scale_second.tolist(), offset_second.tolist()) == ([[12]], [[-3]])
    assert codes.codes_OI.tolist() == [[7, -8, -1, -4]]
    assert ((codes.codes_OI - offset_second) * scale_second).tolist() == [[120, -60, 24, -12]]
    assert torch.allclose(dequantize_weight(codes, scheme), torch.tensor([[1.2, -0.6, 0.24, -0.12]]))


def second_level(codes: WeightCodes) -> tuple[Tensor, Tensor]:
    assert codes.scale_second is not None and codes.offset_second is not None
    return codes.scale_second, codes.offset_second


def test_act_range_of_the_int8_vector_gives_its_scale_and_offset() -> None:
    scheme = QScheme(QDType.INT8, QScope.PER_TENSOR, symmetric=False)
    scale, offset = act_qparam(torch.tensor(-0.6), torch.tensor(1.95), scheme)
    assert scale.tolist() == pytest.approx([0.01], rel=1e-6)
    assert offset is not None and offset.tolist() == [-68]
