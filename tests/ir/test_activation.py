"""Activations: what a token's features are rounded to, dynamic and static."""

import math

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from torch import Tensor

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quantize import act_qparam, fake_quantize_act
from msmodelslim.ir.scheme import FLOAT, QDType, QScheme, QScope
from tests.ir.oracle import E4M3, INTEGERS, integer_codes, mx_exponent, mx_value, nearest_code

INT8, INT4, FP8 = QDType.INT8, QDType.INT4, QDType.FP8_E4M3
TOKEN, TENSOR, BLOCK = QScope.PER_TOKEN, QScope.PER_TENSOR, QScope.PER_BLOCK
PER_TOKEN = [QScheme(dtype, TOKEN, symmetric) for dtype in (INT8, INT4) for symmetric in (True, False)]
DYNAMIC = [*PER_TOKEN, QScheme(FP8, TOKEN), QScheme(FP8, BLOCK, block=(1, 128))]
DYNAMIC += [QScheme(QDType.MXFP8, BLOCK), QScheme(QDType.MXFP4, BLOCK)]
DYNAMIC += [QScheme(QDType.MXFP4, QScope.DUAL_SCALE, dual_block=64)]
STATIC = [
    QScheme(INT8, TENSOR),
    QScheme(INT8, TENSOR, False),
    QScheme(INT8, QScope.PD_MIX, False),
    QScheme(FP8, TENSOR),
]


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Tokens of very different size, the first feature an outlier."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., 0] *= 30
    return x * torch.logspace(-3, 2, shape[0]).reshape(-1, *[1] * (len(shape) - 1))


@pytest.mark.parametrize("scheme", PER_TOKEN, ids=str)
def test_each_token_has_the_scale_of_its_own_features(scheme: QScheme) -> None:
    x = tokens(12, 40)
    found = fake_quantize_act(x, scheme)
    assert found.dtype is torch.float32
    for token, row in enumerate(x.numpy()):
        scale, offset, codes = integer_codes(row, scheme)
        assert np.array_equal(found[token].numpy(), (codes - np.float32(offset)) * scale)


def test_fp8_tokens_round_to_the_enumerated_grid() -> None:
    x = tokens(12, 40)
    found = fake_quantize_act(x, QScheme(FP8, TOKEN))
    for token, row in enumerate(x.numpy()):
        scale = np.abs(row).max() / np.float32(448)
        grid = [math.copysign(E4M3[nearest_code(float(v), E4M3)], v) for v in row / scale]
        assert np.array_equal(found[token].numpy(), np.array(grid, np.float32) * scale)


@pytest.mark.parametrize("columns", [100, 128, 300])
def test_fp8_blocks_are_128_features_of_one_token(columns: int) -> None:
    x = tokens(6, columns)
    for scheme in (QScheme(FP8, BLOCK, block=(1, 128)), QScheme(FP8, BLOCK)):
        found = fake_quantize_act(x, scheme)
        parts = [fake_quantize_act(part, QScheme(FP8, TOKEN)) for part in x.split(128, dim=1)]
        assert torch.equal(found, torch.cat(parts, 1))


@pytest.mark.parametrize("dtype", [QDType.MXFP8, QDType.MXFP4])
def test_mx_blocks_are_32_features_of_one_token(dtype: QDType) -> None:
    x = tokens(5, 72)
    found = fake_quantize_act(x, QScheme(dtype, BLOCK))
    for token, row in enumerate(x.tolist()):
        for start in (0, 32, 64):
            block = row[start : start + 32]
            exponent = mx_exponent(max(map(abs, block)), dtype)
            assert found[token, start : start + 32].tolist() == [mx_value(v, exponent, dtype) for v in block]


@pytest.mark.parametrize("scheme", DYNAMIC, ids=str)
def test_tokens_do_not_see_each_other_whatever_the_leading_axes(scheme: QScheme) -> None:
    x = tokens(6, 64)
    alone = torch.stack([fake_quantize_act(token, scheme) for token in x])
    assert torch.equal(fake_quantize_act(x, scheme), alone)
    assert torch.equal(fake_quantize_act(x.reshape(1, 2, 3, 64), scheme).reshape(6, 64), alone)
    assert torch.equal(fake_quantize_act(x.flip(0), scheme).flip(0), alone)


@pytest.mark.parametrize("scheme", DYNAMIC, ids=str)
def test_a_token_of_zeros_stays_zeros_and_no_token_stays_none(scheme: QScheme) -> None:
    x = tokens(3, 64)
    x[1] = 0
    found = fake_quantize_act(x, scheme)
    assert not found[1].any()
    assert found[0].any() and found[2].any()
    assert fake_quantize_act(x[:0], scheme).shape == (0, 64)


@pytest.mark.parametrize("scheme", DYNAMIC, ids=str)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_infinity_or_a_nan_spoils_its_own_block_only(scheme: QScheme, bad: float) -> None:
    x = tokens(3, 64)
    clean = fake_quantize_act(x, scheme)
    x[1, 5] = bad
    found = fake_quantize_act(x, scheme)
    assert found[1, :32].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("scheme", [*DYNAMIC, *STATIC, FLOAT], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_result_is_float32_or_float64_and_the_input_is_left_alone(scheme: QScheme, dtype: torch.dtype) -> None:
    x = tokens(4, 64).to(dtype)
    before = x.clone()
    qparam = act_qparam(x.amin(), x.amax(), scheme) if scheme.is_static else (None, None)
    found = fake_quantize_act(x, scheme, *qparam)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert found.shape == x.shape
    assert torch.equal(x, before)


def test_float64_tokens_are_computed_in_float64() -> None:
    x = tokens(4, 64).double()
    scale = x.abs().amax(-1, keepdim=True) / 127
    assert torch.equal(fake_quantize_act(x, QScheme(INT8, TOKEN)), torch.round(x / scale) * scale)


@pytest.mark.parametrize("scheme", STATIC[:3], ids=str)
def test_static_integers_use_the_calibrated_range_and_saturate_outside(scheme: QScheme) -> None:
    seen = torch.tensor([-1.5, 4.0])
    scale, offset = act_qparam(seen.amin(), seen.amax(), scheme)
    assert scale.shape == (1,)
    expected_scale, expected_offset, _ = integer_codes(seen.numpy(), scheme)
    assert scale.item() == expected_scale
    assert (offset is None) == scheme.symmetric
    assert (0 if offset is None else offset.item()) == expected_offset
    x = torch.linspace(-10, 10, 1001)
    found = fake_quantize_act(x, scheme, scale, offset)
    low, high = INTEGERS[INT8]
    codes = np.clip(np.rint(x.numpy() / expected_scale + np.float32(expected_offset)), low, high)
    assert np.array_equal(found.numpy(), (codes - np.float32(expected_offset)) * expected_scale)


def test_static_fp8_uses_the_calibrated_range_and_saturates_outside() -> None:
    scale, offset = act_qparam(torch.tensor(-896.0), torch.tensor(100.0), QScheme(FP8, TENSOR))
    assert (scale.tolist(), offset) == ([2.0], None)
    x = torch.tensor([-2000.0, 896.0, 897.0, 34.0, 38.0])
    assert fake_quantize_act(x, QScheme(FP8, TENSOR), scale).tolist() == [-896, 896, 896, 32, 40]


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_codes_equal_those_of_compressed_tensors(symmetric: bool) -> None:
    x, scheme = tokens(6, 64), QScheme(INT8, TENSOR, symmetric)
    scale, offset = act_qparam(x.amin() / 2, x.amax() / 2, scheme)
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=symmetric)
    zero_point = torch.zeros(1) if offset is None else offset
    assert torch.equal(fake_quantize_act(x, scheme, scale, offset), fake_quantize(x, scale, zero_point, args))


def test_a_static_scale_is_rounded_to_the_type_it_is_stored_in() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        scale, offset = act_qparam(
            torch.tensor(-1.0), torch.tensor(3.3), QScheme(INT8, TENSOR, False), scale_dtype=dtype
        )
        assert scale.dtype is torch.float32
        assert torch.equal(scale.to(dtype).float(), scale)
        assert offset is not None and offset.item() == round(1 / scale.item()) - 128


def test_an_activation_that_was_always_zero_has_scale_one() -> None:
    for scheme in STATIC:
        scale, offset = act_qparam(torch.zeros(()), torch.zeros(()), scheme)
        assert scale.tolist() == [1]
        assert offset is None or offset.tolist() == [0]
        assert not fake_quantize_act(torch.zeros(3), scheme, scale, offset).any()


def test_a_range_that_was_never_seen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the calibrated range is \[inf, -inf\]; calibrate with at least one token"):
        act_qparam(torch.tensor(math.inf), torch.tensor(-math.inf), QScheme(INT8, TENSOR))


def test_a_dynamic_scheme_has_no_static_scale() -> None:
    with pytest.raises(
        UnsupportedError, match=r"activation of int8 per_token sym has no static scale; use scope per_tensor"
    ):
        act_qparam(torch.tensor(-1.0), torch.tensor(1.0), QScheme(INT8, TOKEN))


def test_a_static_scheme_without_its_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="int8 per_tensor sym is static; give the scale of its calibration"):
        fake_quantize_act(torch.ones(3), QScheme(INT8, TENSOR))
    with pytest.raises(ValueError, match="int8 per_tensor asym is static; give the offset of its calibration"):
        fake_quantize_act(torch.ones(3), QScheme(INT8, TENSOR, False), torch.ones(1))


def test_an_activation_scheme_without_a_quantizer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="activation: act int8 has no scope per_channel; use scope pd_mix or"):
        fake_quantize_act(torch.ones(3), QScheme(INT8, QScope.PER_CHANNEL))
