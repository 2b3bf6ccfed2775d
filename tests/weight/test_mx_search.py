"""Shared exponents against an exhaustive scalar search, and against the rules that others use."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from msmodelslim import registry
from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.quantize import quantize_weight
from msmodelslim.ir.scheme import QDType, QScheme
from msmodelslim.weight.base import Gram, WeightMethod
from msmodelslim.weight.mx_search import CeilX, MxSearch
from tests.ir.oracle import EMAX, dequantized, mx_exponent, mx_value
from tests.weight.weights import BLOCK, CHANNEL, INT8, MXFP4, MXFP8, generator, normal_weight, odd_weights, squares

SCHEMES = [QScheme(MXFP8, BLOCK), QScheme(MXFP4, BLOCK)]
METHODS = {"mx_search": SCHEMES, "mse_round": SCHEMES[:1], "ceil_x": SCHEMES[1:], "fouroversix": SCHEMES[1:]}
PAIRS = [(name, scheme) for name, schemes in METHODS.items() for scheme in schemes]


def method(name: str = "mx_search", **options: object) -> WeightMethod:
    cls = registry.lookup("weight", name)
    return cls(cls.Ext(**options))


def block_loss(block: list[float], exponent: int, dtype: QDType, h: list[float] | None = None) -> float:
    h = h or [1.0] * len(block)
    return sum(weight * (x - mx_value(x, exponent, dtype)) ** 2 for x, weight in zip(block, h, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), tail=st.sampled_from([0.0, 1.0, 3.0]))
def test_no_exponent_within_ten_beats_the_best_of_three(scheme: QScheme, seed: int, tail: float) -> None:
    weight = torch.randn(2, 64, generator=generator(seed))
    weight *= weight.abs() ** tail
    rounded = method().quantize(weight, scheme)
    for row in range(2):
        for at in range(2):
            block = weight[row, 32 * at : 32 * at + 32].tolist()
            start = mx_exponent(max(map(abs, block)), scheme.dtype)
            losses = {start + shift: block_loss(block, start + shift, scheme.dtype) for shift in range(-10, 11)}
            assert losses[int(rounded.codes.scale[row, at]) - 127] == min(losses.values())


@pytest.mark.parametrize(("name", "scheme"), PAIRS, ids=str)
@settings(max_examples=25, deadline=None)
@given(weight=odd_weights(), data=st.data())
def test_no_block_is_worse_than_min_max(name: str, scheme: QScheme, weight: Tensor, data: st.DataObject) -> None:
    options = {"importance": data.draw(st.booleans())}
    if name == "ceil_x":
        options |= {"enable_search": data.draw(st.booleans()), "c": data.draw(st.sampled_from([6.0, 7.25, 12.0]))}
    diagonal = torch.rand(weight.shape[1], generator=generator(3)) + 0.01
    rounded = method(name, **options).quantize(weight, scheme, gram=Gram(diagonal, 5))
    plain = quantize_weight(weight, scheme)
    for row in range(len(weight)):
        found, expected = (
            (dequantized(codes, scheme)[row] - weight[row].double().numpy()) ** 2 for codes in (rounded.codes, plain)
        )
        h = diagonal.double().numpy() if options["importance"] else 1.0
        assert (h * found).sum() <= (h * expected).sum() * (1 + 1e-12)


def rules(block: list[float], dtype: QDType) -> set[int]:
    """Exponents by the rules that the presets are named after."""
    log = math.log2(max(map(abs, block)))
    if dtype is MXFP8:
        return {math.ceil(log) - 8, math.floor(log) - 8}
    return {math.ceil(log - math.log2(c)) for c in (6, 7.25, 9, 12)} | {round(log - math.log2(v)) for v in (4, 6)}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_rules_of_the_presets_never_win(scheme: QScheme) -> None:
    weight = torch.randn(40, 32, generator=generator(4))
    rounded = method().quantize(weight, scheme)
    for row in range(40):
        block = weight[row].tolist()
        found = block_loss(block, int(rounded.codes.scale[row, 0]) - 127, scheme.dtype)
        assert all(found <= block_loss(block, exponent, scheme.dtype) for exponent in rules(block, scheme.dtype))


@pytest.mark.parametrize(("name", "scheme"), PAIRS, ids=str)
def test_every_preset_gives_what_the_search_gives(name: str, scheme: QScheme) -> None:
    expected = method().quantize(normal_weight(), scheme).codes
    found = method(name).quantize(normal_weight(), scheme).codes
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.codes_OI.view(torch.uint8), expected.codes_OI.view(torch.uint8))


def test_the_search_loses_less_than_ocp_on_normal_numbers() -> None:
    weight = torch.randn(256, 1024, generator=generator(1))
    gains = [method().quantize(weight, scheme).record for scheme in SCHEMES]
    mxfp8, mxfp4 = (record["objective"] / record["objective_minmax"] for record in gains)
    assert mxfp8 < 0.85
    assert mxfp4 < 0.95


def test_the_hand_worked_block_keeps_the_ocp_exponent() -> None:
    weight = torch.tensor([[7.0, 0.26, -1.3, 2.5, 5.1, -0.7, 0, 3.4]])
    rounded = method().quantize(weight, SCHEMES[1])
    assert rounded.codes.scale.tolist() == [[127]]
    assert rounded.codes.codes_OI.tolist() == [[7, 1, 11, 4, 7, 9, 0, 5]]
    assert abs(rounded.record["objective"] - 2.3576) < 1e-4


@pytest.mark.parametrize("c", [6.0, 7.25, 10.0, 12.0])
def test_ceil_x_without_search_follows_its_rule_where_that_is_better(c: float) -> None:
    weight = torch.randn(60, 32, generator=generator(5)) * torch.logspace(-3, 3, 60)[:, None]
    found = method("ceil_x", enable_search=False, c=c).quantize(weight, SCHEMES[1]).codes.scale
    for row in range(60):
        block = weight[row].tolist()
        rule, ocp = math.ceil(math.log2(max(map(abs, block)) / c)), mx_exponent(max(map(abs, block)), MXFP4)
        losses = {e: block_loss(block, e, MXFP4) for e in (ocp, rule)}
        assert int(found[row, 0]) - 127 == min(losses, key=lambda e: losses[e])


def test_ceil_x_follows_a_c_that_is_given_unless_it_shall_search() -> None:
    weight = torch.randn(400, 32, generator=generator(5))
    ruled, searched = method("ceil_x", enable_search=False, c=12.0), method("ceil_x")
    rule, best = (one.quantize(weight, SCHEMES[1]).codes.scale for one in (ruled, searched))
    assert not torch.equal(rule, best)
    assert torch.equal(method("ceil_x", c=12.0).quantize(weight, SCHEMES[1]).codes.scale, rule)
    assert torch.equal(method("ceil_x", c=12.0, enable_search=True).quantize(weight, SCHEMES[1]).codes.scale, best)


@pytest.mark.parametrize(("low", "high", "step"), [(6.0, 7.0, 0.25), (7.25, 7.25, 0.25), (8.0, 12.0, 1.0)])
def test_ceil_x_tries_the_exponents_of_every_c_of_its_range(low: float, high: float, step: float) -> None:
    weight = torch.randn(60, 32, generator=generator(5)) * torch.logspace(-3, 3, 60)[:, None]
    options = {"search_min": low, "search_max": high, "search_step": step}
    found = method("ceil_x", enable_search=True, **options).quantize(weight, SCHEMES[1]).codes.scale
    for row in range(60):
        block = weight[row].tolist()
        largest = max(map(abs, block))
        constants = np.arange(low, high + 1e-9, step).tolist()
        tried = [mx_exponent(largest, MXFP4), *(math.ceil(math.log2(largest / c)) for c in constants)]
        losses = [block_loss(block, e, MXFP4) for e in tried]
        assert int(found[row, 0]) - 127 == tried[losses.index(min(losses))]


def test_a_range_of_c_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="search_min is 9 and search_max 8; swap them"):
        method("ceil_x", search_min=9, search_max=8)


def test_ceil_x_is_exact_at_powers_of_two() -> None:
    weight = torch.zeros(2, 32)
    weight[0, :3] = torch.tensor([16.0, 4.1, 0.3])  # 16/8 = 2¹ exactly, so E = 1, as OCP's floor(log2 16) − 2 = 2 − 0
    weight[1, :3] = torch.tensor([16.01, 4.1, 0.3])
    found = method("ceil_x", enable_search=False, c=8.0).quantize(weight, SCHEMES[1]).codes.scale
    losses = [{e: block_loss(weight[r].tolist(), e, MXFP4) for e in (2, 1 + r)} for r in (0, 1)]
    assert [int(e) - 127 for e in found[:, 0]] == [min(one, key=lambda e: one[e]) for one in losses]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zero_blocks_and_ties_keep_the_ocp_exponent(scheme: QScheme) -> None:
    weight = torch.zeros(2, 32)
    weight[1] = 2.0 ** EMAX[scheme.dtype]  # representable with several exponents
    assert method().quantize(weight, scheme).codes.scale.tolist() == [[0], [127]]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("factor", [2.0**-10, 2.0**10])
def test_a_power_of_two_on_the_weight_moves_the_exponents(scheme: QScheme, factor: float) -> None:
    once, scaled = (method().quantize(w, scheme).codes for w in (normal_weight(), normal_weight() * factor))
    assert torch.equal(once.codes_OI.view(torch.uint8), scaled.codes_OI.view(torch.uint8))
    assert torch.equal(once.scale.int() + int(math.log2(factor)), scaled.scale.int())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_order_of_rows_and_the_chunks_do_not_matter(scheme: QScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, order = normal_weight(20), torch.randperm(20, generator=generator(2))
    straight = method().quantize(weight, scheme).codes
    monkeypatch.setattr("msmodelslim.weight.mx_search._CHUNK_ELEMENTS", 3 * 64)
    mixed = method().quantize(weight[order], scheme).codes
    assert torch.equal(straight.scale[order], mixed.scale)
    assert torch.equal(straight.codes_OI.view(torch.uint8)[order], mixed.codes_OI.view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_columns_that_do_not_fill_a_block_count_as_filled_up_with_zeros(scheme: QScheme) -> None:
    weight = torch.randn(3, 40, generator=generator(3))
    short = method().quantize(weight, scheme).codes
    padded = method().quantize(torch.nn.functional.pad(weight, (0, 24)), scheme).codes
    assert torch.equal(short.scale, padded.scale)
    assert torch.equal(short.codes_OI.view(torch.uint8), padded.codes_OI.view(torch.uint8)[:, :40])


def test_importance_lowers_the_weighted_loss() -> None:
    scheme = SCHEMES[1]
    weight, diagonal = torch.randn(32, 64, generator=generator(3)), torch.logspace(-3, 3, 64)
    plain = method().quantize(weight, scheme).codes
    weighted = method(importance=True).quantize(weight, scheme, gram=Gram(diagonal, 9)).codes
    assert squares(weight, weighted, scheme, diagonal) < squares(weight, plain, scheme, diagonal)
    rounded = method(importance=True).quantize(weight, scheme, gram=None)
    assert torch.equal(rounded.codes.scale, plain.scale)
    assert rounded.record["fallback"] == "no importance"


def test_bfloat16_weights_are_their_float32_selves() -> None:
    weight = normal_weight(dtype=torch.bfloat16)
    for scheme in SCHEMES:
        half, full = (method().quantize(w, scheme).codes for w in (weight, weight.float()))
        assert torch.equal(half.codes_OI.view(torch.uint8), full.codes_OI.view(torch.uint8))


def test_a_weight_that_is_not_finite_is_refused_by_name() -> None:
    weight = normal_weight()
    weight[0, 0] = float("nan")
    with pytest.raises(InvalidModelError, match=r"model\.q: 1 of 768 weights are infinite or NaN"):
        method().quantize(weight, SCHEMES[0], name="model.q")


@pytest.mark.parametrize(
    ("name", "scheme"), [("mx_search", QScheme(INT8, CHANNEL)), ("mse_round", SCHEMES[1]), ("ceil_x", SCHEMES[0])]
)
def test_other_schemes_are_refused(name: str, scheme: QScheme) -> None:
    message = f"model.q: weight method {name} has no {scheme}; use method minmax or another scheme"
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        method(name).quantize(normal_weight(), scheme, name="model.q")


def test_the_record_states_the_losses() -> None:
    for scheme in SCHEMES:
        rounded, plain = method().quantize(normal_weight(), scheme), quantize_weight(normal_weight(), scheme)
        assert np.isclose(rounded.record["objective"], squares(normal_weight(), rounded.codes, scheme), rtol=1e-12)
        assert np.isclose(rounded.record["objective_minmax"], squares(normal_weight(), plain, scheme), rtol=1e-12)


def test_the_classes_say_what_they_need() -> None:
    assert not MxSearch(MxSearch.Ext()).needs_gram
    assert CeilX(CeilX.Ext(importance=True)).needs_gram
