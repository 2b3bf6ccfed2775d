"""The least-squares scale against brute force, and what any search must leave unchanged."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.quantize import dequantize_weight, quantize_weight
from msmodelslim.ir.scheme import QScheme
from msmodelslim.weight.base import Gram
from msmodelslim.weight.exact_scale import descending_order
from msmodelslim.weight.scale_search import Algo
from msmodelslim.weight.ssz import Ssz
from tests.ir.oracle import INTEGERS
from tests.weight.weights import (
    CHANNEL,
    FP8,
    GROUP,
    INT4,
    INT8,
    correlated_gram,
    generator,
    integer_schemes,
    normal_weight,
    odd_weights,
    squares,
)

SYM4, ASYM4 = QScheme(INT4, CHANNEL), QScheme(INT4, CHANNEL, symmetric=False)


def ssz(**options: object) -> Ssz:
    return Ssz(Ssz.Ext(**options))


def least_error(w: NDArray[np.float64], h: NDArray[np.float64], low: int, high: int) -> float:
    """Brute force: the codes of a scale in every interval between breakpoints, each with its own best scale."""
    size, cap = np.abs(w), np.where(w < 0, -low, high)
    breaks = [size[i] / (k - 0.5) for i in range(len(w)) for k in range(1, int(cap[i]) + 1) if size[i]]
    breaks = np.array(sorted({*breaks, 1e-3 * min(breaks, default=1)}))
    best = float((h * w * w).sum())
    for s in np.sqrt(breaks[1:] * breaks[:-1]):
        q = np.clip(np.rint(w / s), low, high)
        if (energy := (h * q * q).sum()) > 0:
            best = min(best, float((h * (w - (h * w * q).sum() / energy * q) ** 2).sum()))
    return best


def block_of(draw_seed: int, size: int, tail: float) -> Tensor:
    """Normal numbers, from light to heavy tails."""
    weight = torch.randn(1, size, generator=generator(draw_seed))
    return weight * weight.abs() ** tail


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.integers(2, 24), st.sampled_from([0.0, 1.0, 3.0]), st.booleans())
def test_exact_reaches_the_optimum_of_brute_force(seed: int, size: int, tail: float, weighted: bool) -> None:
    weight = block_of(seed, size, tail)
    gram = Gram(torch.rand(size, generator=generator(seed + 1)) ** 4 + 1e-3, tokens=7)
    h = (gram.sum_II / gram.sum_II.mean()).double() if weighted else torch.ones(size).double()
    rounded = ssz(importance=weighted).quantize(weight, SYM4, gram=gram)
    best = least_error(weight[0].double().numpy(), h.numpy(), -8, 7)
    assert squares(weight, rounded.codes, SYM4, h) <= best * (1 + 1e-5) + 1e-9


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.integers(2, 16), st.sampled_from([0.0, 2.0]))
def test_exact_reaches_the_optimum_with_an_offset(seed: int, size: int, tail: float) -> None:
    weight = block_of(seed, size, tail) + 0.5
    start = quantize_weight(weight, ASYM4).offset
    assert start is not None
    offsets = {min(max(int(start) + shift, -8), 7) for shift in (-2, -1, 0, 1, 2)}
    values = weight[0].double().numpy()
    best = min(least_error(values, np.ones(size), -8 - o, 7 - o) for o in offsets)
    assert squares(weight, ssz().quantize(weight, ASYM4).codes, ASYM4) <= best * (1 + 1e-5) + 1e-9


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.integers(2, 16))
def test_a_scale_below_zero_turns_the_extra_code_round(seed: int, size: int) -> None:
    weight = block_of(seed, size, 1.0)
    values, ones = weight[0].double().numpy(), np.ones(size)
    best = min(least_error(values, ones, -8, 7), least_error(-values, ones, -8, 7))
    assert squares(weight, ssz(negative_scale=True).quantize(weight, SYM4).codes, SYM4) <= best * (1 + 1e-5) + 1e-9


def test_the_hand_worked_row() -> None:
    weight = torch.tensor([[0.7, -0.34, 0.05, -0.71, 0.21, 0.6]])
    rounded = ssz().quantize(weight, SYM4)
    assert rounded.codes.codes_OI.tolist() == [[6, -3, 0, -6, 2, 5]]
    assert abs(float(rounded.codes.scale) - 0.1172727) < 1e-6
    assert abs(rounded.record["objective"] - 3.4818e-3) < 1e-7
    assert abs(rounded.record["objective_minmax"] - 4.000e-3) < 1e-6


def test_no_scale_of_a_fine_grid_beats_exact_for_int8() -> None:
    weight, scheme = torch.randn(4, 256, generator=generator(1)), QScheme(INT8, CHANNEL)
    rounded = ssz().quantize(weight, scheme)
    for row in range(4):
        w = weight[row].double().numpy()
        scales = np.linspace(0.7, 1.05, 4000)[:, None] * np.abs(w).max() / 127
        errors = ((w - np.clip(np.rint(w / scales), -128, 127) * scales) ** 2).sum(1)
        found = float(((w - dequantize_weight(rounded.codes, scheme)[row].double().numpy()) ** 2).sum())
        assert found <= errors.min() * (1 + 1e-6)


@pytest.mark.parametrize("algo", list(Algo))
@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
@settings(max_examples=15, deadline=None)
@given(weight=odd_weights(), scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]), data=st.data())
def test_no_block_is_worse_than_min_max(
    algo: Algo, scheme: QScheme, weight: Tensor, scale_dtype: torch.dtype, data: st.DataObject
) -> None:
    negative, weighted = data.draw(st.booleans()), data.draw(st.booleans())
    diagonal = torch.rand(weight.shape[1], generator=generator(3)) + 0.01
    method = ssz(algo=algo, negative_scale=negative, importance=weighted)
    codes = method.quantize(weight, scheme, scale_dtype=scale_dtype, gram=Gram(diagonal, 5)).codes
    plain = quantize_weight(weight, scheme, scale_dtype=scale_dtype)
    h = diagonal if weighted else torch.ones_like(diagonal)
    width = scheme.group_size or weight.shape[1]
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], width):
            error, plain_error = (
                float(
                    ((weight - dequantize_weight(c, scheme)).double()[row, start : start + width] ** 2)
                    .mul(h[start : start + width].double())
                    .sum()
                )
                for c in (codes, plain)
            )
            assert error <= plain_error * (1 + 1e-5)


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
def test_the_record_states_the_losses(scheme: QScheme) -> None:
    weight = normal_weight()
    rounded = ssz().quantize(weight, scheme, scale_dtype=torch.bfloat16)
    plain = quantize_weight(weight, scheme, scale_dtype=torch.bfloat16)
    assert np.isclose(rounded.record["objective"], squares(weight, rounded.codes, scheme), rtol=1e-9)
    assert np.isclose(rounded.record["objective_minmax"], squares(weight, plain, scheme), rtol=1e-9)


def test_exact_is_the_best_of_the_three_searches() -> None:
    weight = torch.randn(64, 512, generator=generator(5))
    for scheme in integer_schemes(128):
        errors = {algo: ssz(algo=algo).quantize(weight, scheme).record["objective"] for algo in Algo}
        assert errors[Algo.EXACT] <= errors[Algo.GRID] * (1 + 1e-9)
        assert errors[Algo.EXACT] < errors[Algo.ALS]


def test_more_rounds_of_als_lose_less() -> None:
    weight = torch.randn(64, 256, generator=generator(6))
    errors = [ssz(algo="als", step=step).quantize(weight, SYM4).record["objective"] for step in (1, 3, 20)]
    assert errors[0] > errors[1] > errors[2]


def test_small_weights_gain_as_much_as_large_ones() -> None:
    weight, scheme = torch.randn(32, 512, generator=generator(7)), QScheme(INT8, CHANNEL)
    gains = []
    for std in (1.0, 5e-4):
        record = ssz().quantize(weight * std, scheme).record
        gains.append(record["objective"] / record["objective_minmax"])
    assert gains[1] < 0.99
    assert abs(gains[0] - gains[1]) < 1e-3


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
@pytest.mark.parametrize("factor", [2.0**-10, 2.0**10])
def test_a_factor_on_the_weight_is_a_factor_on_the_scale(scheme: QScheme, factor: float) -> None:
    weight = normal_weight()
    once, scaled = (ssz().quantize(w, scheme, scale_dtype=torch.bfloat16).codes for w in (weight, weight * factor))
    assert torch.equal(once.codes_OI, scaled.codes_OI)
    assert torch.equal(once.scale * factor, scaled.scale)


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
def test_the_order_of_rows_does_not_matter(scheme: QScheme) -> None:
    weight = normal_weight(40)
    order = torch.randperm(40, generator=generator(1))
    straight, mixed = ssz().quantize(weight, scheme).codes, ssz().quantize(weight[order], scheme).codes
    assert torch.equal(straight.codes_OI[order], mixed.codes_OI)
    assert torch.equal(straight.scale[order], mixed.scale)


def test_rows_are_the_same_whatever_is_searched_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scheme = normal_weight(40), QScheme(INT4, GROUP, group_size=16)
    whole = ssz().quantize(weight, scheme).codes
    monkeypatch.setattr("msmodelslim.weight.scale_search._CHUNK_ELEMENTS", 3 * 64)
    chunked = ssz().quantize(weight, scheme).codes
    assert torch.equal(whole.codes_OI, chunked.codes_OI)
    assert torch.equal(whole.scale, chunked.scale)


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_weight_is_its_float32_self(scheme: QScheme, dtype: torch.dtype) -> None:
    weight = normal_weight(dtype=dtype)
    half, full = (ssz().quantize(w, scheme, scale_dtype=dtype).codes for w in (weight, weight.float()))
    assert torch.equal(half.codes_OI, full.codes_OI)
    assert torch.equal(half.scale, full.scale)
    assert torch.equal(half.scale, half.scale.to(dtype).float()), "scales are storable as they are"


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
def test_two_runs_give_the_same_bits(scheme: QScheme) -> None:
    first, second = (ssz().quantize(normal_weight(), scheme).codes for _ in range(2))
    assert torch.equal(first.codes_OI, second.codes_OI)
    assert torch.equal(first.scale, second.scale)


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
def test_a_block_of_zeros_has_scale_one_and_codes_zero(scheme: QScheme) -> None:
    codes = ssz().quantize(torch.zeros(2, 32), scheme).codes
    assert (codes.scale == 1).all()
    assert not codes.codes_OI.any()


def test_weights_that_lie_on_a_lattice_are_found_without_loss() -> None:
    weight = torch.randint(-6, 7, (8, 64), generator=generator(2)) * 0.37
    weight[:, 0] = 6 * 0.37
    assert squares(weight, ssz().quantize(weight, SYM4).codes, SYM4) < 1e-10


def test_importance_moves_the_loss_to_columns_that_matter_less() -> None:
    weight, gram = torch.randn(32, 64, generator=generator(3)), correlated_gram()
    diagonal = gram.diagonal()
    plain, weighted = (ssz(importance=on).quantize(weight, SYM4, gram=gram).codes for on in (False, True))
    assert squares(weight, weighted, SYM4, diagonal) < squares(weight, plain, SYM4, diagonal)
    assert squares(weight, weighted, SYM4) > squares(weight, plain, SYM4)


def test_the_diagonal_alone_is_enough_for_importance() -> None:
    weight, gram = normal_weight(), correlated_gram()
    method = ssz(importance=True)
    assert method.needs_gram and method.diagonal_suffices
    assert not ssz().needs_gram
    whole = method.quantize(weight, SYM4, gram=gram).codes
    diagonal = method.quantize(weight, SYM4, gram=Gram(gram.diagonal().clone(), gram.tokens)).codes
    assert torch.equal(whole.codes_OI, diagonal.codes_OI)


def test_columns_that_saw_only_zeros_still_count_a_little() -> None:
    weight, diagonal = torch.zeros(1, 32), torch.ones(32)
    diagonal[:16] = 0
    weight[0, :16] = torch.randn(16, generator=generator(1))
    rounded = ssz(importance=True).quantize(weight, SYM4, gram=Gram(diagonal, 4))
    assert torch.allclose(rounded.codes.scale, ssz().quantize(weight, SYM4).codes.scale)
    assert rounded.record["objective"] < rounded.record["objective_minmax"]


@pytest.mark.parametrize("gram", [None, Gram(torch.zeros(64, 64), 0), Gram(torch.zeros(64, 64), 9)])
def test_without_tokens_importance_falls_back_to_equal_weights(gram: Gram | None) -> None:
    rounded = ssz(importance=True).quantize(normal_weight(), SYM4, gram=gram)
    assert torch.equal(rounded.codes.scale, ssz().quantize(normal_weight(), SYM4).codes.scale)
    assert rounded.record["fallback"] == "no importance"
    assert "no calibration token" in rounded.record["why"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float) -> None:
    weight = normal_weight()
    weight[3, 5] = value
    with pytest.raises(InvalidModelError, match=r"model\.q: 1 of 768 weights are infinite or NaN"):
        ssz().quantize(weight, SYM4, name="model.q")


def test_a_gram_that_is_not_finite_is_refused_by_name() -> None:
    gram = Gram(torch.full((64, 64), torch.inf), 3)
    with pytest.raises(
        InvalidModelError, match=r"model\.q: the sums of squares of its inputs are not finite; take the"
    ):
        ssz(importance=True).quantize(normal_weight(), SYM4, name="model.q", gram=gram)


def test_a_gram_of_another_size_is_refused() -> None:
    message = "model.q: a Gram matrix (32, 32) for 64 input features"
    with pytest.raises(ValueError, match=re.escape(message)):
        ssz(importance=True).quantize(normal_weight(), SYM4, name="model.q", gram=correlated_gram(32))


@pytest.mark.parametrize("scheme", [QScheme(FP8, CHANNEL), QScheme(INT8, GROUP, False, 16, two_level=True)], ids=str)
def test_a_scheme_that_ssz_has_not_is_refused(scheme: QScheme) -> None:
    assert not Ssz.supports(scheme)
    message = f"model.q: weight method ssz has no {scheme}; use method minmax or another scheme"
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        ssz().quantize(normal_weight(), scheme, name="model.q")


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="64 input features do not divide into groups of 48; set group_size to 16"
    ):
        ssz().quantize(normal_weight(), QScheme(INT4, GROUP, group_size=48))


def test_the_range_of_codes_is_used_to_its_ends() -> None:
    for scheme in integer_schemes():
        codes = ssz().quantize(torch.randn(64, 64, generator=generator(9)), scheme).codes.codes_OI
        low, high = INTEGERS[scheme.dtype]
        assert codes.max() == high or scheme.symmetric
        assert codes.min() >= low


def test_equal_thresholds_keep_their_order() -> None:
    values = torch.tensor([[0.0, 2.0, 1.0, 2.0, 0.0, 0.5]])
    assert descending_order(values).tolist() == [[1, 3, 2, 5, 0, 4]]


def test_cost_grows_with_the_weight_and_the_search() -> None:
    assert ssz().cost(8, 16) == 2 * ssz().cost(8, 8)
    assert ssz(algo="grid").cost(8, 8) < ssz().cost(8, 8)
