"""The simulated forward against integer arithmetic, and the module's tensors as a saver finds them."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.packing import deq_scale, quant_bias
from msmodelslim.ir.quant_linear import QuantLinear, held_weights
from msmodelslim.ir.quantize import act_qparam, fake_quantize_act, quantize_weight
from msmodelslim.ir.scheme import FLOAT, LinearScheme, QDType, QScheme, QScope
from tests.ir.oracle import dequantized, float_values, integer_codes

INT8, INT4, FP8, MXFP8, MXFP4 = QDType.INT8, QDType.INT4, QDType.FP8_E4M3, QDType.MXFP8, QDType.MXFP4
TENSOR, CHANNEL, GROUP, TOKEN = QScope.PER_TENSOR, QScope.PER_CHANNEL, QScope.PER_GROUP, QScope.PER_TOKEN
BLOCK, PD_MIX = QScope.PER_BLOCK, QScope.PD_MIX

W8, W4 = QScheme(INT8, CHANNEL), QScheme(INT4, CHANNEL)
W8_GROUPS = [QScheme(INT8, GROUP, symmetric, group_size=32) for symmetric in (True, False)]
W4_GROUPS = [QScheme(INT4, GROUP, symmetric, group_size=32) for symmetric in (True, False)]
A8, A4 = QScheme(INT8, TOKEN), QScheme(INT4, TOKEN)
FP8_W, MX8, MX4 = QScheme(FP8, CHANNEL), QScheme(MXFP8, BLOCK), QScheme(MXFP4, BLOCK)
DUAL = QScheme(MXFP4, QScope.DUAL_SCALE, dual_block=64)
W4_TWO_LEVEL = QScheme(INT4, GROUP, False, group_size=32, two_level=True)
SCHEMES = [
    *[LinearScheme(W8, QScheme(INT8, TENSOR, symmetric)) for symmetric in (True, False)],
    *[LinearScheme(weight, A8) for weight in (W8, *W8_GROUPS, W4, *W4_GROUPS, W4_TWO_LEVEL)],
    *[LinearScheme(weight) for weight in (W8, QScheme(INT8, CHANNEL, False), *W8_GROUPS)],
    *[LinearScheme(weight) for weight in (W4, QScheme(INT4, CHANNEL, False), *W4_GROUPS, W4_TWO_LEVEL)],
    *[LinearScheme(weight, A4) for weight in (W4, QScheme(INT4, CHANNEL, False), *W4_GROUPS)],
    LinearScheme(W8, QScheme(INT8, PD_MIX, False)),
    LinearScheme(W8, QScheme(INT8, TOKEN, False)),
    LinearScheme(FP8_W, QScheme(FP8, TOKEN)),
    LinearScheme(FP8_W, QScheme(FP8, TENSOR)),
    LinearScheme(QScheme(FP8, TENSOR), QScheme(FP8, TENSOR)),
    LinearScheme(QScheme(FP8, BLOCK, block=(128, 128)), QScheme(FP8, BLOCK, block=(1, 128))),
    *[LinearScheme(weight, act) for weight, act in ((MX8, MX8), (MX4, MX8), (MX4, MX4), (DUAL, DUAL))],
]


def make(scheme: LinearScheme, x: Tensor, rows: int = 24, bias: Tensor | None = None) -> QuantLinear:
    """A linear of random weights, calibrated on x where its activation is static."""
    weight = torch.randn(rows, x.shape[-1], generator=torch.Generator().manual_seed(9)) * 0.05
    scale, offset = act_qparam(x.amin(), x.amax(), scheme.act) if scheme.act.is_static else (None, None)
    codes = quantize_weight(weight, scheme.weight)
    return QuantLinear(scheme, codes, bias=bias, act_scale=scale, act_offset=offset)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4)) + 0.5


def assert_equal_to_1e5(found: Tensor, expected: np.ndarray) -> None:
    assert np.abs(found.double().numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_forward_is_the_product_of_both_dequantized_sides_in_float64(scheme: LinearScheme) -> None:
    x, bias = tokens(2, 5, 160), torch.linspace(-1, 1, 24)
    linear = make(scheme, x, bias=bias)
    weight = dequantized(linear.weight_codes, scheme.weight)
    assert np.allclose(linear.dequantized_weight().numpy(), weight, rtol=1e-6, atol=0)
    act = A8 if scheme.act.scope is PD_MIX else scheme.act
    x_quantized = fake_quantize_act(x, act, linear.act_scale, linear.act_offset).double().numpy()
    found = linear(x)
    assert found.shape == (2, 5, 24)
    assert_equal_to_1e5(found, x_quantized @ weight.T + bias.double().numpy())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_scope", [TENSOR, PD_MIX])
def test_static_w8a8_kernel_form_equals_the_forward(symmetric: bool, act_scope: QScope) -> None:
    x = tokens(64, 512)
    linear = make(LinearScheme(W8, QScheme(INT8, act_scope, symmetric)), x)
    assert linear.act_scale is not None
    offset = np.float32(0) if linear.act_offset is None else linear.act_offset.numpy()
    x_codes = np.clip(np.rint(x.numpy() / linear.act_scale.numpy() + offset), -128, 127).astype(np.int64)
    scale_O = deq_scale(linear.weight_scale, linear.act_scale).double().numpy()
    constant_O = quant_bias(linear.codes, linear.weight_scale, linear.act_scale, linear.act_offset, None).numpy()
    kernel = (x_codes @ linear.codes.numpy().astype(np.int64).T + constant_O) * scale_O
    forward = torch.cat([linear(token[None]) for token in x])  # one token at a time: the static half of pd_mix
    assert_equal_to_1e5(forward, kernel)


def test_a_static_kernels_bias_is_a_whole_number_of_units() -> None:
    x, bias = tokens(64, 512), torch.linspace(-3, 3, 24)
    linear = make(LinearScheme(W8, QScheme(INT8, TENSOR, False)), x, bias=bias)
    assert linear.act_scale is not None and linear.act_offset is not None
    x_codes = (x / linear.act_scale + linear.act_offset).round().clamp(-128, 127).long()
    scale_O = deq_scale(linear.weight_scale, linear.act_scale)
    constant_O = quant_bias(linear.codes, linear.weight_scale, linear.act_scale, linear.act_offset, bias)
    kernel = (x_codes @ linear.codes.long().t() + constant_O).double() * scale_O.double()
    forward = linear(x).double()
    assert ((forward - kernel).abs() <= 0.5 * scale_O + 1e-5 * forward.abs().max()).all()


@pytest.mark.parametrize("weight", [W8, W4], ids=str)
@pytest.mark.parametrize("act", [A8, A4, QScheme(INT8, TOKEN, False)], ids=str)
def test_dynamic_integer_kernel_form_equals_the_forward(weight: QScheme, act: QScheme) -> None:
    x = tokens(16, 256)
    linear = make(LinearScheme(weight, act), x)
    codes_IO = linear.codes.numpy().astype(np.int64).T
    kernel = []
    for row in x.numpy():
        scale, offset, codes = integer_codes(row, act)
        kernel.append(((codes.astype(np.int64) - offset) @ codes_IO) * np.float64(scale))
    assert_equal_to_1e5(linear(x), np.array(kernel) * linear.weight_scale.double().numpy().T)


def test_two_level_int8_kernel_form_equals_the_forward() -> None:
    x = tokens(16, 256)
    linear = make(LinearScheme(W4_TWO_LEVEL, A8), x)
    second, offset = linear.weight_scale_second, linear.weight_offset_second
    assert second is not None and offset is not None
    inner = (linear.codes.long() - offset.long().repeat_interleave(32, 1)) * second.long().repeat_interleave(32, 1)
    int8_OI = inner.to(torch.int8)
    assert torch.equal(int8_OI.long(), inner)
    kernel = []
    for row in x.numpy():
        scale, _, codes = integer_codes(row, A8)
        kernel.append((codes.astype(np.int64) @ int8_OI.long().numpy().T) * np.float64(scale))
    assert_equal_to_1e5(linear(x), np.array(kernel) * linear.weight_scale.double().numpy().T)


def test_fp8_kernel_form_equals_the_forward() -> None:
    x = tokens(16, 256)
    linear = make(LinearScheme(FP8_W, QScheme(FP8, TENSOR)), x)
    assert linear.act_scale is not None
    x_codes = (x / linear.act_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale_O = linear.act_scale.double().numpy() * linear.weight_scale.double().numpy().T
    assert_equal_to_1e5(linear(x), float_values(x_codes) @ float_values(linear.codes).T * scale_O)


def test_pd_mix_is_dynamic_for_a_prefill_and_static_for_one_token() -> None:
    x = tokens(1, 6, 64)
    linear = make(LinearScheme(W8, QScheme(INT8, PD_MIX, False)), x / 2)  # so that the static range clips
    dynamic = QuantLinear(LinearScheme(W8, A8), linear.weight_codes)
    static_scheme = LinearScheme(W8, QScheme(INT8, TENSOR, False))
    static = QuantLinear(static_scheme, linear.weight_codes, act_scale=linear.act_scale, act_offset=linear.act_offset)
    assert torch.equal(linear(x), dynamic(x))
    token = x[:, :1]
    assert torch.equal(linear(token), static(token))
    assert not torch.equal(static(token), dynamic(token))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_output_has_the_type_of_the_input(dtype: torch.dtype) -> None:
    x = tokens(3, 64).to(dtype)
    linear = make(LinearScheme(W8), x, bias=torch.ones(24, dtype=torch.bfloat16))
    found = linear(x)
    assert found.dtype is dtype
    expected = x.double() @ torch.from_numpy(dequantized(linear.weight_codes, W8)).t() + 1
    accuracy = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, 1e-5)  # of one rounding at the end
    assert torch.allclose(found.double(), expected, rtol=accuracy, atol=accuracy)


def test_a_float_activation_and_a_fine_weight_come_close_to_the_float_linear() -> None:
    x, float_linear = tokens(10, 64), nn.Linear(64, 24)
    codes = quantize_weight(float_linear.weight, W8)
    linear = QuantLinear(LinearScheme(W8), codes, bias=float_linear.bias)
    expected = float_linear(x)
    assert (linear(x) - expected).norm() < 0.01 * expected.norm()
    assert linear.bias is not None and not linear.bias.requires_grad


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16])
def test_the_module_on_meta_has_the_shapes_and_types_of_the_real_one(
    scheme: LinearScheme, bias_dtype: torch.dtype | None
) -> None:
    x = tokens(3, 160)
    bias = None if bias_dtype is None else torch.zeros(150, dtype=bias_dtype)
    real = make(scheme, x, rows=150, bias=bias)
    meta = QuantLinear.on_meta(scheme, 150, 160, bias_dtype)
    assert (meta.out_features, meta.in_features, meta.scheme) == (150, 160, scheme)
    assert {name: (b.dtype, b.shape) for name, b in meta.named_buffers()} == {
        name: (b.dtype, b.shape) for name, b in real.named_buffers()
    }
    assert all(buffer.is_meta for buffer in meta.buffers())
    assert meta(x.to("meta")).shape == (3, 150)


def test_what_is_absent_is_none_and_not_a_buffer() -> None:
    linear = make(LinearScheme(W8, A8), tokens(2, 64))
    assert sorted(name for name, _ in linear.named_buffers()) == ["codes", "weight_scale"]
    absent = (linear.bias, linear.weight_offset, linear.weight_scale_second, linear.act_scale, linear.act_offset)
    assert absent == (None,) * 5
    assert not list(linear.parameters())


def test_a_copy_and_a_loaded_state_compute_the_same() -> None:
    x = tokens(4, 64)
    linear = make(LinearScheme(W8, QScheme(INT8, TENSOR, False)), x, bias=torch.ones(24))
    blank = QuantLinear.on_meta(linear.scheme, 24, 64, torch.float32).to_empty(device="cpu")
    blank.load_state_dict(linear.state_dict())
    assert torch.equal(blank(x), linear(x))
    assert torch.equal(copy.deepcopy(linear)(x), linear(x))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_held_weights_are_made_once_and_compute_the_same(scheme: LinearScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(4, 160)
    linear, made = make(scheme, x, rows=150), 0
    expected, whole = linear(x), QuantLinear.dequantized_weight

    def counted(self: QuantLinear) -> Tensor:
        nonlocal made
        made += 1
        return whole(self)

    monkeypatch.setattr(QuantLinear, "dequantized_weight", counted)
    with held_weights(nn.Sequential(linear)):
        assert torch.equal(linear(x), expected)
        assert torch.equal(linear(x), expected)
    assert made == 1
    assert torch.equal(linear(x), expected)
    assert made == 2


def test_a_held_weight_multiplies_a_float_input_in_its_own_type() -> None:
    x = tokens(4, 64).bfloat16()
    linear = make(LinearScheme(W4_GROUPS[0]), x.float())
    with held_weights(linear):
        found = linear(x)
    assert torch.equal(found, x @ linear.dequantized_weight().bfloat16().T)
    assert not torch.equal(found, linear(x))


def test_its_representation_names_sizes_and_scheme() -> None:
    linear = make(LinearScheme(W4_GROUPS[0], A8), tokens(2, 64))
    assert repr(linear) == "QuantLinear(64 -> 24, weight int4 per_group_32 sym, act int8 per_token sym, bias=False)"


def test_static_parameters_that_are_missing_or_useless_are_refused() -> None:
    codes, one = quantize_weight(torch.ones(2, 4), W8), torch.ones(1)
    static, asymmetric = QScheme(INT8, TENSOR), QScheme(INT8, TENSOR, False)
    with pytest.raises(ValueError, match="act int8 per_tensor sym needs act_scale"):
        QuantLinear(LinearScheme(W8, static), codes)
    with pytest.raises(ValueError, match="act int8 per_tensor asym needs act_offset"):
        QuantLinear(LinearScheme(W8, asymmetric), codes, act_scale=one)
    with pytest.raises(ValueError, match="act int8 per_tensor sym has no use for act_offset"):
        QuantLinear(LinearScheme(W8, static), codes, act_scale=one, act_offset=one)
    with pytest.raises(ValueError, match="act float has no use for act_scale"):
        QuantLinear(LinearScheme(W8, FLOAT), codes, act_scale=one)


def test_a_group_that_does_not_divide_is_refused_on_meta_too() -> None:
    with pytest.raises(UnsupportedError, match="down_proj: 100 input features do not divide into groups of 32; set"):
        QuantLinear.on_meta(LinearScheme(W4_GROUPS[0]), 8, 100, None, name="down_proj")
