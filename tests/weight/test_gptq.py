"""GPTQ against naive elimination in float64, its promises, and what becomes of bad input."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.quantize import WeightCodes, dequantize_weight, quantize_weight
from msmodelslim.ir.scheme import QScheme, QScope
from msmodelslim.weight.base import Gram
from msmodelslim.weight.column_grid import ColumnGrid
from msmodelslim.weight.error_feedback import Feedback, upper_factor
from msmodelslim.weight.gptq import Gptq
from msmodelslim.weight.ssz import Ssz
from tests.ir.oracle import E2M1, E4M3, INTEGERS, float_values
from tests.weight.weights import (
    BLOCK,
    CHANNEL,
    DUAL,
    FP8,
    GROUP,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    correlated_gram,
    generator,
    integer_schemes,
    loss_on_inputs,
    normal_weight,
    odd_weights,
)

FLOATS = [
    QScheme(FP8, CHANNEL),
    QScheme(FP8, QScope.PER_TENSOR),
    QScheme(FP8, BLOCK, block=(128, 128)),
    QScheme(MXFP8, BLOCK),
    QScheme(MXFP4, BLOCK),
    DUAL,
]
TWO_LEVEL = QScheme(INT4, GROUP, False, 16, two_level=True)
ALL = [*integer_schemes(), TWO_LEVEL, *FLOATS]
SYM4 = QScheme(INT4, GROUP, group_size=16)


def gptq(**options: object) -> Gptq:
    """With two rounds of refining, so that every fact holds with them too, and with the textbook's damping."""
    return Gptq(Gptq.Ext(**({"refine": 2, "shrinkage": 0} | options)))


def column_values(codes: WeightCodes, scheme: QScheme, column: int) -> NDArray[np.float64]:
    """Every value that a column may take, [O, number of codes], from the definitions of the number formats."""
    rows, columns = codes.codes_OI.shape
    if scheme.dtype in INTEGERS:
        low, high = INTEGERS[scheme.dtype]
        numbers = np.arange(low, high + 1, dtype=np.float64)
    else:
        table = np.array(E2M1 if scheme.dtype is MXFP4 else E4M3)
        numbers = np.concatenate((-table[:0:-1], table))
    if scheme.is_mx:
        scale = 2.0 ** (codes.scale[:, column // 32].double().numpy() - 127)
        if codes.scale_second is not None:
            scale = scale * codes.scale_second[:, column // scheme.dual_block].double().numpy()
    elif scheme.scope is QScope.PER_TENSOR:
        scale = codes.scale.double().numpy().repeat(rows)
    elif scheme.scope is BLOCK:
        scale = codes.scale[:, column // 128].double().numpy().repeat(128)[:rows]
    else:
        scale = codes.scale[:, column // (scheme.group_size or columns)].double().numpy()
    offset = np.zeros(rows)
    if codes.offset is not None:
        offset = codes.offset[:, column // (scheme.group_size or columns)].double().numpy()
    return (numbers[None, :] - offset[:, None]) * scale[:, None]


def damped() -> NDArray[np.float64]:
    """`correlated_gram` in mean squares of an input, with the default damping."""
    h = correlated_gram().sum_II.double().numpy()
    return h / np.diag(h).mean() + 0.01 * np.eye(64)


def naive(weight: Tensor, codes: WeightCodes, scheme: QScheme, h: NDArray[np.float64], order: list[int]) -> NDArray:
    """Optimal brain quantization: the inverse of what is left of H is computed anew for every column."""
    w, out = weight.double().numpy().copy(), np.zeros(weight.shape)
    for at, column in enumerate(order):
        values = column_values(codes, scheme, column)
        nearest = np.abs(values - w[:, column, None]).argmin(1)
        out[:, column] = values[np.arange(len(w)), nearest]
        left = order[at:]
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        error = (w[:, column] - out[:, column]) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0][None, :]
    return out


def rounding_order(diagonal: NDArray[np.float64], width: int, actorder: str) -> list[int]:
    """Columns in the order of their names: as they come, by falling size, or whole groups by their largest."""
    order = list(range(len(diagonal)))
    if actorder == "static":
        order.sort(key=lambda c: -diagonal[c])
    elif actorder == "group":
        order.sort(key=lambda c: (-max(diagonal[c // width * width :][:width]), c // width, -diagonal[c]))
    return order


@pytest.mark.parametrize("actorder", ["static", "none", "group"])
@pytest.mark.parametrize("scheme", [*integer_schemes(), *FLOATS], ids=str)
def test_in_float64_every_value_is_that_of_naive_elimination(scheme: QScheme, actorder: str) -> None:
    weight, h = torch.randn(8, 64, generator=generator(7)), damped()
    order = rounding_order(np.diag(h), 32 if scheme.is_mx else scheme.group_size or 64, actorder)
    codes = quantize_weight(weight, scheme)
    grid = ColumnGrid(scheme, codes, torch.tensor(order), torch.ones(8))
    grid.scale_SO = grid.scale_SO.double()
    factor = upper_factor(torch.from_numpy(h[np.ix_(order, order)]), 0)
    assert factor is not None
    rounded = Feedback(weight.double().T[order], block=24)
    rounded.feed_back(grid, factor, 0)
    found = (rounded.weight_IO - rounded.lost_IO).T.numpy()
    assert np.allclose(found, naive(weight, codes, scheme, h, order)[:, order], rtol=1e-9)


@pytest.mark.parametrize("scheme", [*integer_schemes(), *FLOATS], ids=str)
def test_codes_are_those_of_naive_elimination_in_float64(scheme: QScheme) -> None:
    weight, gram = torch.randn(8, 64, generator=generator(7)), correlated_gram()
    rounded = gptq(refine=0, block_size=24).quantize(weight, scheme, gram=gram)
    expected = naive(weight, rounded.codes, scheme, damped(), rounding_order(np.diag(damped()), 0, "static"))
    assert np.allclose(dequantize_weight(rounded.codes, scheme).double().numpy(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("actorder", ["none", "group"])
def test_options_choose_the_order_of_columns(actorder: str) -> None:
    weight, gram = torch.randn(8, 64, generator=generator(7)), correlated_gram()
    rounded = gptq(refine=0, actorder=actorder).quantize(weight, SYM4, gram=gram)
    expected = naive(weight, rounded.codes, SYM4, damped(), rounding_order(np.diag(damped()), 16, actorder))
    assert np.allclose(dequantize_weight(rounded.codes, SYM4).double().numpy(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("scheme", ALL, ids=str)
@settings(max_examples=12, deadline=None)
@given(weight=odd_weights(), tokens=st.sampled_from([1, 3, 300]), data=st.data())
def test_no_row_is_worse_than_min_max_on_any_inputs(
    scheme: QScheme, weight: Tensor, tokens: int, data: st.DataObject
) -> None:
    x = torch.randn(tokens, 32, generator=generator(tokens)) * torch.logspace(-2, 2, 32)
    x[:, data.draw(st.integers(0, 31))] = 0
    gram = Gram(x.T @ x, tokens)
    options = {"refine": data.draw(st.integers(0, 2)), "negative_scale": data.draw(st.booleans())}
    scale_dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    rounded = gptq(**options).quantize(weight, scheme, scale_dtype=scale_dtype, gram=gram)
    plain = quantize_weight(weight, scheme, scale_dtype=scale_dtype)
    h = gram.sum_II.double().numpy()
    for row in range(len(weight)):
        found, expected = (
            weight[row].double().numpy() - dequantize_weight(c, scheme)[row].double().numpy()
            for c in (rounded.codes, plain)
        )
        slack = 1e-5 * np.diag(h).mean() * (expected @ expected)  # what float32 sums can hide in the damping
        assert found @ h @ found <= expected @ h @ expected * (1 + 1e-5) + slack


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_correlated_inputs_lose_far_less_than_with_plain_rounding(scheme: QScheme) -> None:
    weight, gram = torch.randn(64, 64, generator=generator(1)), correlated_gram()
    found, plain = gptq().quantize(weight, scheme, gram=gram).codes, quantize_weight(weight, scheme)
    gain = loss_on_inputs(weight, found, scheme, gram) / loss_on_inputs(weight, plain, scheme, gram)
    assert gain < (0.6 if scheme.dtype in INTEGERS else 0.8)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_the_record_states_the_losses_in_mean_squares_of_the_inputs(scheme: QScheme) -> None:
    weight, gram = normal_weight(), correlated_gram()
    mean = float(gram.diagonal().double().mean())
    for refine in (0, 1):
        rounded, plain = gptq(refine=refine).quantize(weight, scheme, gram=gram), quantize_weight(weight, scheme)
        for key, codes in (("objective", rounded.codes), ("objective_minmax", plain)):
            expected = loss_on_inputs(weight, codes, scheme, gram) / mean
            assert math.isclose(rounded.record[key], expected, rel_tol=1e-3)
        assert rounded.record["damping"] == 0.01


def test_refining_lowers_the_loss_round_by_round() -> None:
    weight, gram = torch.randn(64, 128, generator=generator(1)), correlated_gram(128)
    for scheme in (SYM4, QScheme(INT4, CHANNEL, False), FLOATS[0], FLOATS[4], TWO_LEVEL):
        losses = [gptq(refine=n).quantize(weight, scheme, gram=gram).record["objective"] for n in (0, 1, 3)]
        assert losses[0] > losses[1] > losses[2]


def test_a_scale_below_zero_lowers_the_loss() -> None:
    weight, gram = torch.randn(64, 64, generator=generator(1)), correlated_gram()
    either, positive = (gptq(negative_scale=on).quantize(weight, SYM4, gram=gram) for on in (True, False))
    assert (either.codes.scale < 0).any()
    assert (positive.codes.scale > 0).all()
    assert either.record["objective"] < positive.record["objective"]


def test_important_columns_first_lose_less_than_columns_as_they_come() -> None:
    losses: dict[str, float] = {}
    for seed in range(10):
        weight, gram = torch.randn(32, 64, generator=generator(seed)), correlated_gram(seed=seed)
        for actorder in ("static", "group", "none"):
            record = gptq(refine=0, actorder=actorder).quantize(weight, SYM4, gram=gram).record
            losses[actorder] = losses.get(actorder, 0) + record["objective"]
    assert losses["static"] < losses["group"] < losses["none"]


def test_unrelated_inputs_leave_nothing_to_make_up_for() -> None:
    weight, diagonal = torch.randn(8, 64, generator=generator(1)), torch.rand(64, generator=generator(2)) + 0.1
    for scheme in (SYM4, QScheme(INT4, CHANNEL, False), FLOATS[0], FLOATS[3]):
        codes = gptq(refine=0).quantize(weight, scheme, gram=Gram(diagonal.diag(), 64)).codes
        grid = ColumnGrid(scheme, codes, torch.arange(64), torch.ones(8))
        nearest = torch.stack([grid.value(grid.round(weight[:, c], c), c) for c in range(64)], dim=1)
        assert torch.equal(dequantize_weight(codes, scheme), nearest)


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("factor", [2.0**-10, 2.0**10])
def test_a_factor_on_weight_or_gram_changes_no_code(scheme: QScheme, factor: float) -> None:
    weight, gram = normal_weight(), correlated_gram()
    once = gptq().quantize(weight, scheme, scale_dtype=torch.bfloat16, gram=gram).codes
    larger = Gram(gram.sum_II * 16, gram.tokens)
    scaled = gptq().quantize(weight * factor, scheme, scale_dtype=torch.bfloat16, gram=larger).codes
    assert torch.equal(once.codes_OI.view(torch.uint8), scaled.codes_OI.view(torch.uint8))
    if not scheme.is_mx:
        assert torch.equal(once.scale * factor, scaled.scale)


@pytest.mark.parametrize("scheme", [scheme for scheme in ALL if scheme.scope is not QScope.PER_TENSOR], ids=str)
def test_rows_do_not_matter_to_each_other(scheme: QScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    tall = scheme.scope is BLOCK and not scheme.is_mx  # whose tiles are 128 rows high
    rows = 256 if tall else 40
    weight, gram = normal_weight(rows), correlated_gram()
    order = torch.arange(rows) if tall else torch.randperm(rows, generator=generator(2))
    straight = gptq().quantize(weight, scheme, gram=gram).codes
    monkeypatch.setattr("msmodelslim.weight.gptq._ROWS", 128 if tall else 7)
    mixed = gptq().quantize(weight[order], scheme, gram=gram).codes
    # As numbers: which sign a zero has may depend on the last bit of a sum.
    found, expected = (
        codes if scheme.dtype in INTEGERS else float_values(codes)
        for codes in (mixed.codes_OI, straight.codes_OI[order])
    )
    assert (found == expected).all()
    assert tall or torch.allclose(straight.scale[order].float(), mixed.scale.float(), rtol=1e-5)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_half_precision_weights_are_their_float32_selves_and_runs_repeat(scheme: QScheme) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weight, gram = normal_weight(dtype=dtype), correlated_gram()
        half, full, again = (
            gptq().quantize(w, scheme, scale_dtype=dtype, gram=gram).codes for w in (weight, weight.float(), weight)
        )
        for other in (full, again):
            assert torch.equal(half.codes_OI.view(torch.uint8), other.codes_OI.view(torch.uint8))
            assert torch.equal(half.scale, other.scale)
        if scheme.dtype in INTEGERS:
            assert torch.equal(half.scale, half.scale.to(dtype).float()), "scales are storable as they are"


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_zero_rows_and_columns_without_input_are_harmless(scheme: QScheme) -> None:
    weight, gram = normal_weight(), correlated_gram()
    weight[0] = 0
    gram.sum_II[:, [5, 20]] = 0
    gram.sum_II[[5, 20]] = 0
    codes = gptq().quantize(weight, scheme, gram=gram).codes
    found = dequantize_weight(codes, scheme)
    assert not found[0].any()
    plain = dequantize_weight(quantize_weight(weight, scheme), scheme)
    error, plain_error = ((w - weight)[3:, [5, 20]].square().sum() for w in (found, plain))
    assert error < 4 * plain_error, "columns without input are rounded to what is near, not dropped"


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_identical_samples_and_a_dead_column_need_no_special_care(scheme: QScheme) -> None:
    x = torch.randn(1, 64, generator=generator(1)).expand(4, 64).clone()
    x[:, 9] = 0
    weight, gram = normal_weight(), Gram(x.T @ x, 4)
    rounded = gptq().quantize(weight, scheme, gram=gram)
    assert "fallback" not in rounded.record
    plain = quantize_weight(weight, scheme)
    assert loss_on_inputs(weight, rounded.codes, scheme, gram) < loss_on_inputs(weight, plain, scheme, gram)


@pytest.mark.parametrize("scheme", [QScheme(INT4, CHANNEL), QScheme(INT8, CHANNEL), QScheme(FP8, CHANNEL)], ids=str)
@pytest.mark.parametrize("refine", [0, 1])
def test_inputs_on_which_plain_rounding_loses_nothing_lose_nothing(scheme: QScheme, refine: int) -> None:
    for column in range(8):
        weight = torch.randn(2, 32, generator=generator(column))
        weight[:, column] = 7.0  # the largest, so that it has a code of its own
        x = torch.zeros(1, 32)
        x[:, column] = 1.0 + column
        record = (
            gptq(refine=refine, percdamp=0.02 + 0.003 * column).quantize(weight, scheme, gram=Gram(x.T @ x, 1)).record
        )
        assert 0 <= record["objective"] <= record["objective_minmax"] < 1e-5


def test_damping_is_raised_until_the_matrix_can_be_factored() -> None:
    x = torch.randn(200, 64, generator=generator(1))
    gram = x.T @ x
    lowest = float(torch.linalg.eigvalsh(gram)[0])
    gram -= (lowest + 0.04 * float(gram.diagonal().mean())) * torch.eye(64)
    rounded = gptq().quantize(normal_weight(), SYM4, gram=Gram(gram, 200))
    assert rounded.record["damping"] == 0.1
    for percdamp in (0.2, 3.0):
        record = gptq(percdamp=percdamp).quantize(normal_weight(), SYM4, gram=Gram(gram, 200)).record
        assert record["damping"] == percdamp


@pytest.mark.parametrize(
    ("scheme", "method"),
    [(SYM4, "ssz"), (FLOATS[0], "minmax"), (FLOATS[4], "mx_search"), (DUAL, "dualscale"), (TWO_LEVEL, "ssz")],
    ids=str,
)
def test_an_indefinite_gram_falls_back_with_a_record(scheme: QScheme, method: str) -> None:
    gram = torch.full((64, 64), 3.0)
    gram.fill_diagonal_(1.0)
    gram[0] = gram[:, 0] = -3.0
    gram[0, 0] = 1.0
    rounded = gptq().quantize(normal_weight(), scheme, gram=Gram(gram, 10))
    assert rounded.record["fallback"] == method
    assert rounded.record["why"] == ("the Gram matrix of its inputs is not positive definite, even with a damping of 1")


@pytest.mark.parametrize(
    ("gram", "why"),
    [
        (None, "no calibration token reached it"),
        (Gram(torch.zeros(64, 64), 0), "no calibration token reached it"),
        (Gram(torch.zeros(64, 64), 8), "its inputs were zero for every calibration token"),
    ],
)
def test_without_inputs_it_falls_back_to_the_exact_scale(gram: Gram | None, why: str) -> None:
    rounded = gptq().quantize(normal_weight(), SYM4, gram=gram)
    expected = Ssz(Ssz.Ext()).quantize(normal_weight(), SYM4).codes
    assert torch.equal(rounded.codes.codes_OI, expected.codes_OI)
    assert rounded.record["fallback"] == "ssz"
    assert rounded.record["why"] == why


def test_the_fallback_uses_what_is_known_of_the_inputs() -> None:
    gram = torch.full((64, 64), 300.0)
    gram.diagonal().copy_(torch.logspace(-2, 2, 64))
    rounded = gptq().quantize(normal_weight(), SYM4, gram=Gram(gram, 10))
    expected = Ssz(Ssz.Ext(importance=True)).quantize(normal_weight(), SYM4, gram=Gram(gram.diagonal(), 10)).codes
    assert rounded.record["fallback"] == "ssz"
    assert torch.equal(rounded.codes.codes_OI, expected.codes_OI)


def test_two_level_codes_stay_within_int8_between_the_levels() -> None:
    weight, gram = torch.randn(64, 64, generator=generator(1)), correlated_gram()
    codes = gptq().quantize(weight, TWO_LEVEL, gram=gram).codes
    assert codes.scale_second is not None and codes.offset_second is not None
    inner = (codes.codes_OI.unflatten(1, (-1, 16)) - codes.offset_second[:, :, None]) * codes.scale_second[:, :, None]
    assert inner.abs().max() <= 127


def test_linears_with_the_same_input_share_one_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object) -> Tensor | None:
        calls.append(args)
        return upper_factor(*args)  # type: ignore[arg-type] # handed on as they come

    monkeypatch.setattr("msmodelslim.weight.gptq.upper_factor", counted)
    gram = correlated_gram()
    weights = [torch.randn(8, 64, generator=generator(seed)) for seed in range(3)]
    shared = [gptq().quantize(weight, SYM4, gram=gram).codes.codes_OI for weight in weights]
    assert len(calls) == 1
    assert all(
        torch.equal(found, gptq().quantize(weight, SYM4, gram=correlated_gram()).codes.codes_OI)
        for found, weight in zip(shared, weights, strict=True)
    )
    gptq(percdamp=0.1).quantize(weights[0], SYM4, gram=gram)
    gptq(actorder="group").quantize(weights[0], SYM4, gram=gram)
    gptq(actorder="group").quantize(weights[0], QScheme(INT4, GROUP, group_size=32), gram=gram)
    assert len(calls) == 1 + 3 + 3


def test_more_damping_is_less_feedback() -> None:
    weight, gram = torch.randn(32, 64, generator=generator(1)), correlated_gram()
    losses = [gptq(percdamp=d, refine=0).quantize(weight, SYM4, gram=gram).record["objective"] for d in (0.01, 1.0)]
    assert losses[0] < losses[1]


def test_the_fewer_tokens_the_more_damping() -> None:
    weight, gram = normal_weight(), correlated_gram()
    for tokens, damping in ((10**6, 0.01 + 0.2 * 64e-6), (640, 0.03), (64, 0.21), (8, 1.0)):
        rounded = gptq(shrinkage=0.2).quantize(weight, SYM4, gram=Gram(gram.sum_II, tokens))
        assert math.isclose(rounded.record["damping"], damping)
    assert Gptq.Ext().shrinkage == 0.2


def test_with_few_tokens_shrinking_loses_less_on_inputs_that_were_not_seen() -> None:
    weight = torch.randn(64, 64, generator=generator(1))
    x = torch.randn(4096, 64, generator=generator(2)) @ torch.randn(64, 64, generator=generator(3))
    x *= torch.logspace(-1, 1, 64)
    seen, unseen = x[:24], x[24:]
    losses = [
        loss_on_inputs(
            weight,
            gptq(shrinkage=shrinkage).quantize(weight, SYM4, gram=Gram(seen.T @ seen, 24)).codes,
            SYM4,
            Gram(unseen.T @ unseen, 4072),
        )
        for shrinkage in (0, 0.2)
    ]
    assert losses[1] < 0.9 * losses[0]


def test_cost_grows_with_the_square_of_the_inputs_and_with_refining() -> None:
    assert gptq().cost(64, 256) > 3 * gptq().cost(64, 128)
    assert gptq(refine=3).cost(64, 64) > gptq(refine=0).cost(64, 64)


def test_bad_input_is_refused_by_name() -> None:
    weight, gram = normal_weight(), correlated_gram()
    with pytest.raises(ValueError, match=r"m: gptq needs the whole Gram matrix, not its diagonal"):
        gptq().quantize(weight, SYM4, name="m", gram=Gram(gram.diagonal(), 3))
    with pytest.raises(ValueError, match=re.escape("m: a Gram matrix (32, 32) for 64 input features")):
        gptq().quantize(weight, SYM4, name="m", gram=correlated_gram(32))
    gram.sum_II[3, 4] = float("nan")
    with pytest.raises(InvalidModelError, match="m: the sums of squares of its inputs are not finite; take the sample"):
        gptq().quantize(weight, SYM4, name="m", gram=gram)
    with pytest.raises(UnsupportedError, match="m: weight method gptq has no int8 per_token sym"):
        gptq().quantize(weight, QScheme(INT8, QScope.PER_TOKEN), name="m", gram=correlated_gram())
    weight[1, 1] = float("inf")
    with pytest.raises(InvalidModelError, match="m: 1 of 768 weights are infinite or NaN"):
        gptq().quantize(weight, SYM4, name="m", gram=correlated_gram())
