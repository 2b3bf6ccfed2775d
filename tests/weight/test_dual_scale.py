"""Outer scales against an exhaustive scalar search, and what becomes of bad input."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.mx import in_blocks, outer_scale
from msmodelslim.ir.quantize import quantize_weight
from msmodelslim.ir.scheme import QDType, QScheme
from msmodelslim.weight import dual_scale
from msmodelslim.weight.base import Gram, Rounded
from msmodelslim.weight.dual_scale import DualScale
from msmodelslim.weight.mx_search import MxSearch
from tests.ir.oracle import dequantized, mx_exponent, mx_value
from tests.weight.weights import BLOCK, DUAL, MXFP4, generator, normal_weight, odd_weights, squares


def dualscale(weight: Tensor, scheme: QScheme = DUAL, gram: Gram | None = None, importance: bool = False) -> Rounded:
    return DualScale(DualScale.Ext(importance=importance)).quantize(weight, scheme, gram=gram)


def scalar_loss(wide: list[float], outer: float) -> float:
    """Of one wide block with the best of many exponents for each block of 32 inside."""
    total = 0.0
    for start in range(0, len(wide), 32):
        block = [value / outer for value in wide[start : start + 32]]
        own = mx_exponent(max(map(abs, block)), QDType.MXFP4)
        total += min(
            sum((value - mx_value(value, exponent, QDType.MXFP4)) ** 2 for value in block)
            for exponent in range(own - 3, own + 4)
        )
    return total * outer**2


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), tail=st.sampled_from([0.0, 1.0]))
def test_no_step_of_two_octaves_loses_less(seed: int, tail: float) -> None:
    weight = torch.randn(1, 128, generator=generator(seed))
    weight *= weight.abs() ** tail
    found = dualscale(weight).codes
    for at, wide in enumerate(weight.unflatten(1, (2, 64))[0].tolist()):
        start = max(map(abs, wide)) / 6
        own = slice(64 * at, 64 * at + 64)
        loss = float(((dequantized(found, DUAL) - weight.double().numpy())[:, own] ** 2).sum())
        assert all(loss <= scalar_loss(wide, start * 2 ** (step / 16)) * (1 + 1e-5) for step in range(-24, 9))


@settings(max_examples=40, deadline=None)
@given(weight=odd_weights(), weighted=st.booleans())
def test_no_wide_block_is_worse_than_min_max(weight: Tensor, weighted: bool) -> None:
    diagonal = torch.rand(weight.shape[1], generator=generator(3)) + 0.01
    rounded = dualscale(weight, gram=Gram(diagonal, 5), importance=weighted)
    plain = quantize_weight(weight, DUAL)
    h = diagonal.double().numpy() if weighted else 1.0
    found, expected = (
        h * (dequantized(codes, DUAL) - weight.double().numpy()) ** 2 for codes in (rounded.codes, plain)
    )
    assert (found.sum(1) <= expected.sum(1) * (1 + 1e-9)).all()


def test_a_free_outer_scale_loses_less_than_powers_of_two_alone() -> None:
    weight = torch.randn(64, 512, generator=generator(1))
    scheme = QScheme(MXFP4, DUAL.scope, dual_block=512)
    single = MxSearch(MxSearch.Ext()).quantize(weight, QScheme(MXFP4, BLOCK))
    rounded = dualscale(weight, scheme)
    assert rounded.record["objective"] < 0.97 * single.record["objective"]
    assert rounded.record["objective"] < 0.9 * rounded.record["objective_minmax"]


def test_the_record_states_the_losses() -> None:
    record = dualscale(normal_weight()).record
    assert math.isclose(
        record["objective"], squares(normal_weight(), dualscale(normal_weight()).codes, DUAL), rel_tol=1e-5
    )
    plain = quantize_weight(normal_weight(), DUAL)
    assert math.isclose(record["objective_minmax"], squares(normal_weight(), plain, DUAL), rel_tol=1e-5)


def test_importance_lowers_the_weighted_loss_and_is_missed_with_a_record() -> None:
    weight, diagonal = torch.randn(16, 128, generator=generator(2)), torch.logspace(-2, 2, 128)
    plain, weighted = (dualscale(weight, gram=Gram(diagonal, 5), importance=yes) for yes in (False, True))
    assert squares(weight, weighted.codes, DUAL, diagonal) < squares(weight, plain.codes, DUAL, diagonal)
    assert dualscale(weight, importance=True).record["fallback"] == "no importance"


def test_a_wide_block_of_zeros_has_the_outer_scale_1_and_codes_0() -> None:
    weight = normal_weight(columns=150)
    weight[0], weight[:, 64:128] = 0, 0
    for codes in (dualscale(weight).codes, quantize_weight(weight, DUAL)):
        assert codes.scale_second is not None
        assert (codes.scale_second[0] == 1).all()
        assert (codes.scale_second[:, 1] == 1).all()
        assert not (codes.codes_OI[:, 64:128] & 7).any()
        assert (dequantized(codes, DUAL)[:, 64:128] == 0).all()


@pytest.mark.parametrize("columns", [30, 72, 150])
def test_columns_that_do_not_fill_a_wide_block_count_as_filled_up_with_zeros(columns: int) -> None:
    weight = normal_weight(columns=columns)
    filled = in_blocks(weight, 64).flatten(1)
    part, whole = dualscale(weight).codes, dualscale(filled).codes
    assert part.scale_second is not None
    assert whole.scale_second is not None
    assert torch.equal(part.codes_OI, whole.codes_OI[:, :columns])
    assert torch.equal(part.scale_second, whole.scale_second)
    assert torch.equal(part.scale, whole.scale[:, : -(-columns // 32)])


@pytest.mark.parametrize("factor", [2.0**-10, 2.0**10, 2.0**-100])
def test_a_power_of_two_on_the_weight_is_one_on_the_outer_scales(factor: float) -> None:
    one, other = dualscale(normal_weight()).codes, dualscale(normal_weight() * factor).codes
    assert torch.equal(one.codes_OI, other.codes_OI)
    assert one.scale_second is not None
    assert other.scale_second is not None
    assert torch.equal(one.scale_second * factor, other.scale_second)


def test_chunks_and_half_precision_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal_weight(dtype=torch.bfloat16)
    whole = dualscale(weight.float()).codes
    monkeypatch.setattr(dual_scale, "_CHUNK_ELEMENTS", 1)
    parts = dualscale(weight).codes
    for name in ("codes_OI", "scale", "scale_second"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


def test_the_smallest_and_the_largest_block_have_finite_outer_scales() -> None:
    assert outer_scale(torch.tensor([0.0, 1e-44, 3e38])).tolist()[0] == 1
    assert (outer_scale(torch.tensor([1e-44, 3e38])) > 0).all()
    for size in (1e-44, 3e38):
        assert dequantized(dualscale(torch.full((1, 64), size)).codes, DUAL).max() <= 1.1 * size


def test_bad_input_is_refused_by_name() -> None:
    method = DualScale(DualScale.Ext())
    with pytest.raises(InvalidModelError, match="m: 1 of 64 weights are infinite or NaN"):
        method.quantize(torch.ones(1, 64).index_fill_(1, torch.tensor([3]), math.nan), DUAL, name="m")
    with pytest.raises(UnsupportedError, match=re.escape("m: weight method dualscale has no mxfp4 per_block sym")):
        method.quantize(torch.ones(1, 64), QScheme(MXFP4, BLOCK), name="m")
