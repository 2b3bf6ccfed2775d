"""Clip search against a scalar search in float64."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.quantize import quantize_weight
from msmodelslim.ir.scheme import QScheme
from msmodelslim.weight.awq_clip import AwqClip
from msmodelslim.weight.base import Gram
from tests.ir.oracle import INTEGERS
from tests.weight.weights import (
    CHANNEL,
    FP8,
    GROUP,
    INT4,
    correlated_gram,
    generator,
    integer_schemes,
    loss_on_inputs,
    lost,
    normal_weight,
    odd_weights,
    squares,
)

SYM4 = QScheme(INT4, GROUP, group_size=16)


def clip(**options: object) -> AwqClip:
    return AwqClip(AwqClip.Ext(**options))


def block_losses(weight: Tensor, codes: object, scheme: QScheme, gram: Gram) -> np.ndarray:
    """Loss of each block on the inputs, float64 [O, G]."""
    error, h = lost(weight, codes, scheme), gram.sum_II.double().numpy()
    width = scheme.group_size or weight.shape[1]
    parts = [slice(at, at + width) for at in range(0, weight.shape[1], width)]
    return np.stack([((error[:, p] @ h[p, p]) * error[:, p]).sum(1) for p in parts], axis=1)


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
def test_every_block_has_the_best_of_the_ratios(scheme: QScheme) -> None:
    weight, gram = normal_weight(6), correlated_gram()
    found = block_losses(weight, clip().quantize(weight, scheme, gram=gram).codes, scheme, gram)
    low_code, high_code = INTEGERS[scheme.dtype]
    w, h = weight.double().numpy(), gram.sum_II.double().numpy()
    width = scheme.group_size or 64
    for row in range(6):
        for group in range(64 // width):
            part = slice(group * width, group * width + width)
            block, losses = w[row, part], []
            low, high = min(block.min(), 0), max(block.max(), 0)
            for ratio in np.arange(20, 9, -1) / 20:
                scale = ratio * (
                    max(-low, high) / high_code if scheme.symmetric else (high - low) / (-2 * low_code - 1)
                )
                offset = 0 if scheme.symmetric else np.rint(-ratio * low / scale) + low_code
                error = block - (np.clip(np.rint(block / scale + offset), low_code, high_code) - offset) * scale
                losses.append(error @ h[part, part] @ error)
            assert np.isclose(found[row, group], min(losses), rtol=1e-4)


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
@pytest.mark.parametrize("weighting", ["gram", "diagonal"])
@settings(max_examples=15, deadline=None)
@given(weight=odd_weights(), scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_block_is_worse_than_min_max(
    weighting: str, scheme: QScheme, weight: Tensor, scale_dtype: torch.dtype
) -> None:
    gram = correlated_gram(32)
    if weighting == "diagonal":
        gram = Gram(gram.diagonal().diag(), gram.tokens)
    rounded = clip(weighting=weighting).quantize(weight, scheme, scale_dtype=scale_dtype, gram=gram)
    plain = quantize_weight(weight, scheme, scale_dtype=scale_dtype)
    found, expected = (block_losses(weight, codes, scheme, gram) for codes in (rounded.codes, plain))
    assert (found <= expected * (1 + 1e-4)).all()
    assert rounded.record["objective"] <= rounded.record["objective_minmax"]


def test_the_diagonal_weighting_minimises_the_weighted_squares() -> None:
    weight, gram = torch.randn(32, 64, generator=generator(1)), correlated_gram()
    by_diagonal, by_gram = (clip(weighting=w).quantize(weight, SYM4, gram=gram).codes for w in ("diagonal", "gram"))
    assert squares(weight, by_diagonal, SYM4, gram.diagonal()) < squares(weight, by_gram, SYM4, gram.diagonal())
    assert block_losses(weight, by_gram, SYM4, gram).sum() < block_losses(weight, by_diagonal, SYM4, gram).sum()


def test_per_channel_minimises_the_loss_on_the_inputs() -> None:
    weight, gram, scheme = torch.randn(32, 64, generator=generator(1)), correlated_gram(), QScheme(INT4, CHANNEL)
    plain, clipped = quantize_weight(weight, scheme), clip().quantize(weight, scheme, gram=gram)
    assert loss_on_inputs(weight, clipped.codes, scheme, gram) < 0.95 * loss_on_inputs(weight, plain, scheme, gram)


def test_the_record_states_the_losses_in_mean_squares_of_the_inputs() -> None:
    weight, gram = normal_weight(), correlated_gram()
    mean = float(gram.diagonal().double().mean())
    rounded, plain = clip().quantize(weight, SYM4, gram=gram), quantize_weight(weight, SYM4)
    for key, codes in (("objective", rounded.codes), ("objective_minmax", plain)):
        assert np.isclose(rounded.record[key], block_losses(weight, codes, SYM4, gram).sum() / mean, rtol=1e-5)


@pytest.mark.parametrize(("n_grid", "max_shrink"), [(100, 0.29), (100, 0.57), (20, 0.15), (3, 0.5)])
def test_the_largest_share_that_may_be_clipped_is_tried_where_it_is_a_step(n_grid: int, max_shrink: float) -> None:
    last = 1 - float(int(Fraction(str(max_shrink)) * n_grid) / n_grid)
    weight = torch.full((1, 32), last / 7)  # which the last ratio alone rounds without loss
    weight[0, 0] = 1.0
    gram = Gram(torch.eye(32), 5)
    gram.sum_II[0, 0] = 0
    found = clip(n_grid=n_grid, max_shrink=max_shrink).quantize(weight, QScheme(INT4, CHANNEL), gram=gram).codes.scale
    assert float(found) * 7 == pytest.approx(last)


def test_options_change_the_grid() -> None:
    weight, gram = torch.randn(16, 64, generator=generator(1)), correlated_gram()
    plain = quantize_weight(weight, SYM4)
    assert torch.equal(clip(n_grid=1).quantize(weight, SYM4, gram=gram).codes.scale, plain.scale)
    little = clip(max_shrink=0.1).quantize(weight, SYM4, gram=gram).codes.scale / plain.scale
    assert 0.9 - 1e-6 <= little.min() < 0.96
    assert clip(n_grid=40).cost(8, 8) > clip().cost(8, 8) > clip(weighting="diagonal").cost(8, 8)


@pytest.mark.parametrize("gram", [None, Gram(torch.zeros(64, 64), 0)])
def test_without_tokens_the_squares_are_not_weighted(gram: Gram | None) -> None:
    weight = normal_weight()
    rounded = clip().quantize(weight, SYM4, gram=gram)
    assert rounded.record["fallback"] == "unweighted clip search"
    assert "no calibration token" in rounded.record["why"]
    assert squares(weight, rounded.codes, SYM4) < squares(weight, quantize_weight(weight, SYM4), SYM4)


@pytest.mark.parametrize("scheme", integer_schemes(), ids=str)
@pytest.mark.parametrize("factor", [2.0**-10, 2.0**10])
def test_a_factor_on_weight_or_gram_changes_no_code(scheme: QScheme, factor: float) -> None:
    weight, gram = normal_weight(), correlated_gram()
    once = clip().quantize(weight, scheme, gram=gram).codes
    scaled = clip().quantize(weight * factor, scheme, gram=Gram(gram.sum_II * 4, gram.tokens)).codes
    assert torch.equal(once.codes_OI, scaled.codes_OI)
    assert torch.equal(once.scale * factor, scaled.scale)


def test_the_order_of_rows_and_the_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram, order = normal_weight(20), correlated_gram(), torch.randperm(20, generator=generator(2))
    straight = clip().quantize(weight, SYM4, gram=gram).codes
    monkeypatch.setattr("msmodelslim.weight.awq_clip._CHUNK_ELEMENTS", 3 * 64)
    mixed = clip().quantize(weight[order], SYM4, gram=gram).codes
    assert torch.equal(straight.scale[order], mixed.scale)
    assert torch.equal(straight.codes_OI[order], mixed.codes_OI)


def test_half_precision_weights_are_their_float32_selves() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weight = normal_weight(dtype=dtype)
        half, full = (clip().quantize(w, SYM4, gram=correlated_gram()).codes for w in (weight, weight.float()))
        assert torch.equal(half.codes_OI, full.codes_OI)


def test_zero_rows_and_dead_columns_are_harmless() -> None:
    weight, gram = normal_weight(), correlated_gram()
    weight[0] = 0
    gram.sum_II[:, 5] = gram.sum_II[5] = 0
    codes = clip().quantize(weight, SYM4, gram=gram).codes
    assert (codes.scale[0] == 1).all()
    assert not codes.codes_OI[0].any()


def test_bad_input_is_refused_by_name() -> None:
    weight = normal_weight()
    diagonal = Gram(correlated_gram().diagonal(), 3)
    with pytest.raises(
        ValueError, match=r"m: weighting gram needs the whole Gram matrix, not its diagonal; write diag"
    ):
        clip().quantize(weight, SYM4, name="m", gram=diagonal)
    assert clip(weighting="diagonal").diagonal_suffices
    with pytest.raises(InvalidModelError, match="m: the sums of squares of its inputs are not finite"):
        clip().quantize(weight, SYM4, name="m", gram=Gram(torch.full((64, 64), torch.nan), 3))
    with pytest.raises(UnsupportedError, match=re.escape("m: weight method awq_clip has no fp8_e4m3 per_channel sym")):
        clip().quantize(weight, QScheme(FP8, CHANNEL), name="m")
    weight[1, 1] = float("inf")
    with pytest.raises(InvalidModelError, match="m: 1 of 768 weights are infinite or NaN"):
        clip().quantize(weight, SYM4, name="m")
