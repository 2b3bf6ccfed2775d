"""Searched exponents are those that a brute-force search in numpy finds, and never cost more than no change."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from msmodelslim.distributed import Stat, StatKind
from msmodelslim.ir.scheme import LinearScheme, QDType, QScheme, QScope
from msmodelslim.model.structure import LayerStructure
from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.processor.smooth_search import (
    UNCHANGED,
    Consumers,
    Exponents,
    ExponentSearch,
    JudgedRows,
    first_smallest,
    gram_loss,
    judged_rows,
    token_losses,
)
from msmodelslim.processor.smooth_statistics import InputStats, judged_samples, kept_tokens
from tests.processor.driver import step
from tests.processor.smooth_driver import (
    EVERY_KIND,
    NAME,
    PRESETS,
    W4A8,
    TinyLayer,
    inputs,
    relative_error,
    smooth,
    smoother,
)

UP_DOWN = LayerStructure(up_down=(("first", "second"),))
GRID = [step / 20 for step in range(21)]


class Pair(nn.Module):
    """64 → 48 → 32, the middle with a few large channels."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(64, 48, bias=False), nn.Linear(48, 32, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.randn(48, 64, generator=generator) / 8)
            self.first.weight[::11] *= 12
            self.second.weight.copy_(torch.randn(32, 48, generator=generator) / 7)
            self.second.weight[:, ::7] *= 3

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def rounded(x: np.ndarray, levels: int, axis: int = 1) -> np.ndarray:
    """Symmetric, a scale a row; all-zero rows stay."""
    scale = np.abs(x).max(axis=axis, keepdims=True) / levels
    scale[scale == 0] = 1
    return np.rint(x / scale) * scale


def middle(pair: Pair, samples: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The input of the second linear, all tokens of all samples, and its weight; float64."""
    with torch.no_grad():
        x = torch.cat([pair.first(sample).flatten(0, 1) for sample in samples]).double().numpy()
    return x, pair.second.weight.detach().double().numpy()


def loss_of(x: np.ndarray, weight: np.ndarray, factor: np.ndarray, act_levels: int, weight_levels: int) -> float:
    seen = rounded(x / factor, act_levels) if act_levels else x / factor
    return float(((seen @ rounded(weight * factor, weight_levels).T - x @ weight.T) ** 2).sum())


def samples_of(pair: Pair) -> list[Tensor]:
    return inputs(6, tokens=10, width=64, dtype=torch.float32)


def best(losses: dict[Exponents, float]) -> Exponents:
    return min(losses, key=lambda exponents: losses[exponents])  # the first of equal ones


@pytest.mark.parametrize(("options", "weight_levels"), [({}, 127), ({"qconfig": W4A8}, 7)])
def test_flex_smooth_quant_finds_what_brute_force_finds(options: dict[str, Any], weight_levels: int) -> None:
    pair = Pair()
    x, weight = middle(pair, samples_of(pair))
    act, largest = np.abs(x).max(0), np.abs(weight).max(0)

    def loss(exponents: Exponents) -> float:
        return loss_of(x, weight, act**exponents.act / largest**exponents.weight, 127, weight_levels)

    tried = [Exponents(0.0, 0.0)] + [Exponents(alpha, round(1 - alpha, 9)) for alpha in GRID]
    first = best({exponents: loss(exponents) for exponents in tried})
    expected = best({exponents: loss(exponents) for exponents in [first, *(Exponents(first.act, b) for b in GRID)]})
    processor = smoother(pair, UP_DOWN, "flex_smooth_quant", **options)
    smooth(pair, samples_of(pair), processor)
    assert processor.chosen == {f"{NAME}.first": expected}
    assert 0 < expected.act < 1  # a search that could not move would pass nothing


def test_flex_awq_ssz_applies_the_mean_that_it_searches_with() -> None:
    pair = Pair()
    before = copy.deepcopy(pair)
    x, weight = middle(pair, samples_of(pair))
    mean = np.abs(x).mean(0)
    tried = [Exponents(alpha, 0.0) for alpha in GRID]
    expected = best({one: loss_of(x, weight, mean**one.act, 127, 7) for one in tried})
    processor = smoother(pair, UP_DOWN, "flex_awq_ssz", qconfig=W4A8)
    smooth(pair, samples_of(pair), processor)
    assert processor.chosen == {f"{NAME}.first": expected}
    factor = (pair.second.weight / before.second.weight)[0].detach().double().numpy()
    np.testing.assert_allclose(factor, mean**expected.act, rtol=1e-5)


@pytest.mark.parametrize("duo", [True, False])
def test_awq_finds_what_brute_force_over_all_tokens_finds(duo: bool) -> None:
    pair = Pair()
    before = copy.deepcopy(pair)
    x, weight = middle(pair, samples_of(pair))
    mean = np.abs(x).mean(0)
    groups = np.abs(weight).reshape(32, 4, 12)
    relative = (groups / groups.max(2, keepdims=True)).reshape(32, 48).mean(0)

    def factor_of(exponents: Exponents) -> np.ndarray:
        factor = mean**exponents.act / relative**exponents.weight
        return factor / np.sqrt(factor.max() * factor.min())

    def loss(exponents: Exponents) -> float:
        factor = factor_of(exponents)
        scaled = (weight * factor).reshape(32 * 4, 12)
        codes = np.clip(np.rint(scaled / (np.abs(scaled).max(1, keepdims=True) / 7)), -8, 7)
        back = (codes * np.abs(scaled).max(1, keepdims=True) / 7).reshape(32, 48) / factor
        return float(((x @ (back - weight).T) ** 2).sum())

    tried = [Exponents(0.0, 0.0)] + [Exponents(r, 1 - r if duo else 0.0) for r in GRID]
    expected = best({exponents: loss(exponents) for exponents in tried})
    options = {"dtype": "int4", "scope": "per_group", "ext": {"group_size": 12}}
    processor = smoother(pair, UP_DOWN, "awq", weight_qconfig=options, duo_scaling=duo)
    smooth(pair, samples_of(pair), processor)
    assert processor.chosen == {f"{NAME}.first": expected}
    assert processor.context.record.smoothing == [
        {
            "module": f"{NAME}.first",
            "processor": "awq",
            "subgraph": "up-down",
            "act_exponent": expected.act,
            "weight_exponent": expected.weight,
        }
    ]
    assert loss(expected) < 0.9 * loss(Exponents(0.0, 0.0))
    factor = (pair.second.weight / before.second.weight)[0].detach().double().numpy()
    np.testing.assert_allclose(factor, factor_of(expected), rtol=1e-5)


def test_the_gram_form_equals_the_loss_over_tokens() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((90, 24), (10, 24)))
    factor = torch.rand(24, generator=generator, dtype=torch.float64) + 0.5
    scheme = QScheme(QDType.INT4, QScope.PER_CHANNEL)
    stats = InputStats(x.amin(0), x.amax(0), None, x.T @ x, {0: x[:50], 1: x[50:]})
    judged = JudgedRows(weight, 3.0)
    gram = gram_loss(judged, x.T @ x, factor, scheme, torch.float32, "linear")
    tokens = token_losses(stats, Consumers({"linear": judged}), [factor], LinearScheme(scheme), torch.float32)
    assert gram == pytest.approx(float(sum(tokens.values())), rel=1e-12)


def rounded_tokens(x: np.ndarray) -> np.ndarray:
    """int8, a scale a token."""
    step_T1 = np.abs(x).max(1, keepdims=True) / 127
    return np.rint(x / step_T1) * step_T1


def test_rounding_the_activations_is_judged_on_all_rows_by_their_gram_matrix() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, 24, generator=generator, dtype=torch.float64)
    weight = torch.randint(-126, 127, (500, 24), generator=generator).double()
    weight[:, 3] = 127  # so that rounding the weight changes nothing
    consumers = Consumers({"linear": JudgedRows(weight[:5], 100.0)}, weight.T @ weight)
    stats = InputStats(x.amin(0), x.amax(0), None, None, {0: x})
    scheme = LinearScheme(QScheme(QDType.INT8, QScope.PER_CHANNEL), QScheme(QDType.INT8, QScope.PER_TOKEN))
    found = token_losses(stats, consumers, [torch.ones(24, dtype=torch.float64)], scheme, torch.float32)[0]
    lost = (rounded_tokens(x.numpy()) - x.numpy()) @ weight.numpy().T
    assert float(found) == pytest.approx((lost**2).sum(), rel=1e-6)  # scales are stored in float32


def test_the_two_errors_of_a_tall_consumer_add_up_nearly_to_that_of_all_its_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(200, 24, generator=generator, dtype=torch.float64) * torch.logspace(-1, 0.5, 24)
    weight = torch.randn(500, 24, generator=generator, dtype=torch.float64)
    factor = torch.logspace(-0.4, 0.4, 24, dtype=torch.float64)
    consumers = Consumers({"linear": JudgedRows(weight[::4], 4.0)}, weight.T @ weight)
    stats = InputStats(x.amin(0), x.amax(0), None, None, {0: x})
    scheme = LinearScheme(QScheme(QDType.INT8, QScope.PER_CHANNEL), QScheme(QDType.INT8, QScope.PER_TOKEN))
    found = token_losses(stats, consumers, [factor], scheme, torch.float32)[0]
    scaled = (weight * factor).numpy()
    lost = rounded_tokens((x / factor).numpy()) @ rounded(scaled, 127).T - x.numpy() @ weight.numpy().T
    assert float(found) == pytest.approx((lost**2).sum(), rel=0.08)


@pytest.mark.parametrize("scope", ["per_tensor", "pd_mix"])
def test_a_static_activation_is_judged_with_the_range_that_the_factor_leaves(scope: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 16, generator=generator) * torch.logspace(-1, 1, 16)
    weight = torch.randn(8, 16, generator=generator)
    factor = torch.logspace(-0.5, 0.5, 16)
    scheme = LinearScheme(QScheme(QDType.INT8, QScope.PER_CHANNEL), QScheme(QDType.INT8, QScope(scope), False))
    stats = InputStats(x.amin(0), x.amax(0), None, None, {4: x})
    found = token_losses(stats, Consumers({"linear": JudgedRows(weight)}), [factor], scheme, torch.float32)[4]
    seen, scaled = (x / factor).double().numpy(), (weight * factor).double().numpy()
    step = (seen.max() - seen.min()) / 255
    offset = np.rint(-seen.min() / step) - 128
    codes = np.clip(np.rint(seen / step + offset), -128, 127)
    lost = (codes - offset) * step @ rounded(scaled, 127).T - x.double().numpy() @ weight.double().numpy().T
    assert float(found) == pytest.approx(float((lost**2).sum()), rel=1e-3)


def test_a_wide_consumer_is_judged_by_rows_spread_over_all_of_it() -> None:
    by_row = QScheme(QDType.INT4, QScope.PER_CHANNEL)
    assert judged_rows(200, by_row).tolist() == list(range(200))
    some = judged_rows(1000, by_row)
    assert len(some.unique()) == 256
    assert int(some.max()) < 1000
    assert set((some[1:] - some[:-1]).tolist()) == {3, 4}
    assert len(judged_rows(1000, QScheme(QDType.MXFP4, QScope.PER_BLOCK))) == 256
    tiles = QScheme(QDType.FP8_E4M3, QScope.PER_BLOCK)
    assert len(judged_rows(1000, tiles)) == 1000  # rows share scales
    assert len(judged_rows(1000, QScheme(QDType.INT8, QScope.PER_TENSOR))) == 1000


def test_the_first_samples_with_enough_tokens_are_judged() -> None:
    kept = Stat(StatKind.SCALAR, torch.tensor([500.0, 500, 30, 30]), 4, (1, 2, 5, 9))
    assert judged_samples(kept) == {1, 2, 5}
    assert judged_samples(None) == set()


def test_of_equal_losses_the_first_wins() -> None:
    assert first_smallest(torch.tensor([2.0, 1.0, 1.0])) == 1


def test_zero_tokens_and_dead_channels_do_not_spoil_the_search() -> None:
    pair = Pair()
    with torch.no_grad():
        pair.first.weight[4] = 0
    samples = samples_of(pair)
    samples[1][0, 3] = 0
    processor = smoother(pair, UP_DOWN, "flex_smooth_quant")
    smooth(pair, samples, processor)
    assert processor.chosen[f"{NAME}.first"].act > 0


def test_kept_tokens_are_spread_evenly_and_start_elsewhere_in_each_sample() -> None:
    assert kept_tokens(3, 8, 5).tolist() == [0, 1, 2]
    for sample in range(50):
        kept = kept_tokens(100, 8, sample)
        assert len(set(kept.tolist())) == 8
        assert int(kept.min()) >= 0
        assert int(kept.max()) < 100
        assert set((kept[1:] - kept[:-1]).tolist()) <= {12, 13}
    assert sum(int(0 in kept_tokens(100, 8, sample)) for sample in range(50)) in range(2, 7)  # 8 % of 50


W8A8 = {
    "act": {"dtype": "int8", "scope": "per_token", "method": "minmax"},
    "weight": {"dtype": "int8", "scope": "per_channel"},
}
W4A16 = {"weight": {"dtype": "int4", "scope": "per_group", "ext": {"group_size": 8}}}


def with_outliers() -> TinyLayer:
    """Between each producer and its consumers every seventh channel is 40 times larger, its weights as much smaller."""
    layer = TinyLayer(4, 2).randomize(outliers=False)
    pairs: list[tuple[nn.Module, list[nn.Linear], int]] = [
        (layer.norm_1, [layer.q, layer.k, layer.v], 24),
        (layer.norm_2, [layer.gate, layer.up], 24),
        (layer.up, [layer.down], 40),
        (layer.first, [layer.second], 16),
    ]
    with torch.no_grad():
        for producer, consumers, width in pairs:
            factor = torch.ones(width)
            factor[3::7] = 40
            weight = producer.get_parameter("weight")
            weight.mul_(factor if weight.dim() == 1 else factor.unsqueeze(1))
            for consumer in consumers:
                consumer.weight.div_(factor)
    return layer


def error_after(preset: str | None, qconfig: dict[str, Any], options: dict[str, Any]) -> float:
    """What rounding the layer costs its output, after smoothing by the preset or without."""
    layer = with_outliers()
    samples = inputs(dtype=torch.float32)
    with torch.no_grad():
        exact = [layer(x) for x in samples]
    processor = smoother(layer, layer.structure(), preset or "iter_smooth", **options)
    if preset:
        smooth(layer, samples, processor)
    request = BatchProcessRequest(NAME, layer)
    with torch.no_grad():
        rounding = step(processor.context, "linear_quant", qconfig=qconfig)
        rounding.preprocess(request)
        rounding.postprocess(request)
        return relative_error([layer(x) for x in samples], exact)


@pytest.mark.parametrize(
    ("preset", "left"),
    [("smooth_quant", 0.6), ("iter_smooth", 0.1), ("flex_smooth_quant", 0.1), ("flex_awq_ssz", 0.1)],
)
def test_outlier_channels_cost_8_bits_less_after_smoothing(preset: str, left: float) -> None:
    options = {"qconfig": W8A8} if preset == "flex_awq_ssz" else {}
    assert error_after(preset, W8A8, options) < left * error_after(None, W8A8, {})


def test_outlier_channels_cost_4_bit_weights_less_after_awq() -> None:
    assert error_after("awq", W4A16, PRESETS["awq"]) < 0.3 * error_after(None, W4A16, {})


@pytest.mark.parametrize("preset", ["flex_smooth_quant", "flex_awq_ssz", "awq"])
def test_inputs_whose_squares_overflow_leave_a_subgraph_unscaled_and_recorded(preset: str) -> None:
    """C26: each activation is finite, but no loss is."""
    pair = Pair()
    with torch.no_grad():
        pair.first.weight.mul_(1e25)
    before = copy.deepcopy(pair.state_dict())
    processor = smoother(pair, UP_DOWN, preset, **PRESETS[preset])
    smooth(pair, samples_of(pair), processor)
    assert processor.chosen == {} and processor.context.record.smoothing == []
    assert all(torch.equal(value, before[name]) for name, value in pair.state_dict().items())
    assert processor.context.record.fallbacks == [
        {
            "module": f"{NAME}.first",
            "what": f"not scaled by {preset}",
            "why": f"the squares of the inputs of {NAME}.second overflow",
        }
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preset", ["flex_smooth_quant", "flex_awq_ssz", "awq"])
def test_a_searched_factor_never_costs_more_than_none(preset: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[tuple[Any, list[list[Exponents]], list[Tensor]]] = []
    losses_of: Callable[..., list[Tensor]] = ExponentSearch._losses

    def kept(self: ExponentSearch, cases: Any, tried: Any, rescale: Any) -> list[Tensor]:
        losses = losses_of(self, cases, tried, rescale)
        searches.append(([case.subgraph.source for case in cases], tried, losses))
        return losses

    monkeypatch.setattr(ExponentSearch, "_losses", kept)
    layer = TinyLayer(4, 1).randomize(seed)
    options = {**PRESETS[preset], "enable_subgraph_type": EVERY_KIND}
    processor = smoother(layer, layer.structure(), preset, **options)
    smooth(layer, inputs(dtype=torch.float32), processor)
    lowest: dict[str, float] = {}
    for sources, tried, losses in searches:
        for source, exponents, found in zip(sources, tried, losses, strict=True):
            if source not in lowest:
                lowest[source] = float(found[exponents.index(UNCHANGED)])
            assert float(found.min()) <= lowest[source]
            lowest[source] = float(found.min())
    assert lowest.keys() == processor.chosen.keys()
