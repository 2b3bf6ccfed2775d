"""Histograms that merge exactly, and the ranges read off them against brute force on the values themselves."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from msmodelslim.ir.scheme import QDType, QScheme, QScope
from msmodelslim.observer.histogram import (
    BINS,
    SMALLEST_EXPONENT,
    DyadicHistogram,
    HistogramObserver,
)
from msmodelslim.observer.histogram_range import kl_range, mse_range, percentile_range
from tests.run_ranks import RankRunner

SYM8, ASYM8 = (QScheme(QDType.INT8, QScope.PER_TENSOR, symmetric) for symmetric in (True, False))
FP8 = QScheme(QDType.FP8_E4M3, QScope.PER_TENSOR)
SYM4 = QScheme(QDType.INT4, QScope.PER_TENSOR)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of(*batches: Tensor) -> DyadicHistogram:
    histogram = DyadicHistogram()
    for batch in batches:
        histogram.add(batch)
    return histogram


def ends(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.amin(), values.amax()


def heavy_tailed(count: int = 20000, seed: int = 0) -> Tensor:
    values = torch.randn(count, generator=generator(seed))
    return values * values.abs()


def same(one: DyadicHistogram, other: DyadicHistogram) -> bool:
    return (
        torch.equal(one.counts_B, other.counts_B)
        and torch.equal(one.zeros, other.zeros)
        and torch.equal(one.exponent, other.exponent)
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=40), st.data())
def test_any_order_batching_and_sharding_gives_the_same_counts(values: list[float], data: st.DataObject) -> None:
    whole = of(torch.tensor(values))
    mixed = data.draw(st.permutations(values))
    at = data.draw(st.integers(0, len(values)))
    left, right = of(torch.tensor(mixed[:at])), of(*(torch.tensor([value]) for value in mixed[at:]))
    left.merge(right)
    assert same(left, whole)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_every_value_is_in_the_bin_of_its_floor(values: list[float]) -> None:
    histogram = of(torch.tensor(values))
    width = 2.0 ** int(histogram.exponent)
    largest = max(map(abs, values))
    expected = np.zeros(BINS, dtype=int)
    for value in values:
        if value:
            expected[math.floor(value / width) + BINS // 2] += 1
    assert histogram.counts_B.tolist() == expected.tolist()
    assert int(histogram.zeros) == values.count(0)
    if largest >= 2.0**-115:
        assert width * BINS / 4 <= largest < width * BINS / 2


def test_widening_adds_neighbours_and_rounds_down_for_negatives_too() -> None:
    fine, coarse = of(torch.tensor([-5.0, -4.0, -1.0, 1.0, 4.0, 5.0]) / 8), of(torch.tensor([10000.0]))
    shift = int(coarse.exponent - fine.exponent)
    before = fine.counts_B.clone()
    after = fine.widened(coarse.exponent)
    for index in before.nonzero().flatten().tolist():
        assert after[((index - BINS // 2) >> shift) + BINS // 2] >= 1
    assert int(after.sum()) == 6
    assert after[BINS // 2 - 1] == 3, "negative values stay below zero"
    assert after[BINS // 2] == 3


def test_ranks_agree_by_the_largest_exponent_and_a_sum_of_counts() -> None:
    parts = [of(heavy_tailed(seed=seed) * 10.0**seed) for seed in range(3)]
    exponent = torch.stack([part.exponent for part in parts]).amax()
    total = sum((part.widened(exponent) for part in parts), torch.zeros(BINS, dtype=torch.int64))
    whole = of(*(heavy_tailed(seed=seed) * 10.0**seed for seed in range(3)))
    assert torch.equal(total, whole.counts_B)
    assert exponent == whole.exponent


def test_an_empty_histogram_is_the_identity() -> None:
    histogram, values = DyadicHistogram(), heavy_tailed()
    assert int(histogram.exponent) == SMALLEST_EXPONENT
    histogram.add(torch.zeros(0, 8))
    histogram.merge(of(values))
    assert same(histogram, of(values))
    histogram.merge(DyadicHistogram())
    assert same(histogram, of(values))


def test_values_that_are_not_finite_are_left_out() -> None:
    values = heavy_tailed(100)
    spoilt = torch.cat((values, torch.tensor([torch.nan, torch.inf, -torch.inf])))
    assert same(of(spoilt), of(values))
    assert not of(torch.tensor([torch.nan])).counts_B.any()


def test_half_precision_values_are_counted_exactly() -> None:
    values = heavy_tailed().bfloat16()
    assert same(of(values), of(values.float()))


def test_counting_a_large_batch_takes_a_fraction_of_a_second() -> None:
    values = torch.randn(2048, 1024, generator=generator(1))
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        of(values)
        best = min(best, time.process_time() - start)
    assert best < 0.25  # a quarter of the batch that took a histogram with a loop 0.95 s


@pytest.mark.parametrize(("lower", "upper"), [(0.01, 99.99), (1, 99), (0, 100), (50, 60)])
def test_percentiles_are_those_of_the_sorted_values_within_a_bin(lower: float, upper: float) -> None:
    values = heavy_tailed()
    histogram = of(values[:1000], values[1000:])
    width = 2.0 ** int(histogram.exponent)
    low, high = percentile_range(histogram, *ends(values), lower, upper)
    for found, share in ((low, lower), (high, upper)):
        expected = np.percentile(values.numpy(), share, method="inverted_cdf")
        assert abs(float(found) - expected) <= width


def test_percentiles_see_zeros_as_zeros() -> None:
    values = torch.cat((torch.zeros(900), torch.ones(100)))
    low, high = percentile_range(of(values), *ends(values), 10, 80)
    assert (float(low), float(high)) == (0, 0)


def clipped_error(values: Tensor, low: float, high: float, scheme: QScheme) -> float:
    """Mean square error of quantizing the values themselves, float64."""
    qmin, qmax = (-128, 127) if scheme.dtype is QDType.INT8 else (-8, 7)
    x = values.double().numpy()
    scale = high / qmax if scheme.symmetric else (high - low) / (qmax - qmin)
    offset = 0 if scheme.symmetric else np.rint(-low / scale) + qmin
    return float(((np.clip(np.rint(x / scale + offset), qmin, qmax) - offset) * scale - x).__pow__(2).mean())


@pytest.mark.parametrize("scheme", [SYM8, SYM4], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_symmetric_range_is_as_good_as_brute_force_over_the_values(scheme: QScheme, seed: int) -> None:
    values = heavy_tailed(seed=seed)
    low, high = mse_range(of(values), *ends(values), scheme)
    assert low == -high
    largest = float(values.abs().amax())
    best = min(clipped_error(values, -t, t, scheme) for t in np.linspace(0.02, 1, 1500) * largest)
    assert clipped_error(values, float(low), float(high), scheme) <= best * 1.02  # a code spans five bins here


def test_the_fp8_range_is_as_good_as_brute_force_over_the_values() -> None:
    values = torch.cat((heavy_tailed(), torch.tensor([3000.0])))

    def error(end: float) -> float:
        codes = (values.double() * (448 / end)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return float((codes.double() * (end / 448) - values.double()).square().mean())

    low, high = mse_range(of(values), *ends(values), FP8)
    assert low == -high
    assert error(float(high)) <= min(map(error, np.linspace(0.02, 1, 1500) * 3000)) * 1.02


def test_the_asymmetric_range_is_better_than_min_max_and_as_good_as_a_grid() -> None:
    values = heavy_tailed().abs() - 0.3
    low, high = mse_range(of(values), *ends(values), ASYM8)
    error = clipped_error(values, float(low), float(high), ASYM8)
    grid = min(
        clipped_error(values, a * float(values.amin()), b * float(values.amax()), ASYM8)
        for a in np.linspace(0.2, 1, 9)
        for b in np.linspace(0.1, 1, 60)
    )
    assert error <= grid * 1.01
    assert error < 0.97 * clipped_error(values, *map(float, ends(values)), ASYM8)


def test_values_without_outliers_keep_their_range() -> None:
    values = torch.linspace(-1, 1, 5001)
    low, high = mse_range(of(values), *ends(values), SYM8)
    assert float(high) > 0.98
    low, high = mse_range(of(values), *ends(values), ASYM8)
    assert float(high) > 0.98 and float(low) < -0.98


def test_values_of_one_sign_leave_the_other_side_at_zero() -> None:
    values = heavy_tailed().abs()
    low, high = mse_range(of(values), *ends(values), ASYM8)
    assert float(low) == 0 and 0 < float(high) <= float(values.amax())
    low, high = mse_range(of(-values), *ends(-values), ASYM8)
    assert float(high) == 0 and -float(values.amax()) <= float(low) < 0


def test_a_constant_batch_moves_nothing_but_its_own_counts() -> None:
    values = heavy_tailed()
    constant = torch.full((50,), 0.25)
    forward, backward = of(values, constant), of(constant, values)
    every = torch.cat((values, constant))
    for search in (mse_range, kl_range):
        assert search(forward, *ends(every), SYM8) == search(backward, *ends(every), SYM8)
    assert mse_range(of(constant), *ends(constant), SYM8)[1] > 0


def entropy_reference(values: Tensor, levels: int, width: float) -> float:
    """The threshold of least divergence."""
    counts = np.bincount((values.abs().numpy() / width).astype(int))
    best, best_loss = None, math.inf
    for bins in range(levels, len(counts) + 1):
        inside = counts[:bins].astype(float)
        p = inside.copy()
        p[-1] += counts[bins:].sum()
        level = np.arange(bins) * levels // bins
        mass, filled = np.bincount(level, inside), np.bincount(level, inside > 0)
        q = np.where(inside > 0, (mass / np.maximum(filled, 1))[level], 0)
        if (q[p > 0] == 0).any():
            continue
        seen = p > 0
        loss = float((p[seen] / p.sum() * np.log(p[seen] / p.sum() / (q[seen] / q.sum()))).sum())
        if loss < best_loss:
            best, best_loss = bins, loss
    assert best is not None
    return min(best * width, float(values.abs().amax()))


def test_the_kl_range_is_that_of_a_plain_restatement() -> None:
    values = heavy_tailed(3000, seed=4)
    histogram = of(values)
    low, high = kl_range(histogram, *ends(values), SYM4)
    assert low == -high
    assert math.isclose(float(high), entropy_reference(values, 8, 2.0 ** int(histogram.exponent)), rel_tol=1e-6)
    assert float(high) < float(values.abs().amax())


@pytest.mark.parametrize(("first", "second", "expected"), [(8, 1, 8.0), (4, 4, 9.5)])
def test_the_kl_range_of_ten_bins_is_that_worked_by_hand(first: int, second: int, expected: float) -> None:
    # Width 1, eight levels. A bound at 8 puts the outlier of bin 9 on bin 7: with 34 values in all
    # 29/34 ln(33/34) + 5/34 ln(165/136) = 0.0030. A bound at 9 has no value in its last bin: infinite. A bound at 10
    # mixes bins 0 and 1: counts of 8 and 1 become 4.5 each, 8/34 ln(8/4.5) + 1/34 ln(1/4.5) = 0.0911; counts of 4 and 4
    # stay, 0.
    counts_B = torch.zeros(BINS, dtype=torch.int64)
    counts_B[BINS // 2 : BINS // 2 + 10] = torch.tensor([first, second, 4, 4, 4, 4, 4, 4, 0, 1])
    low, high = kl_range(DyadicHistogram.of(counts_B, 0), torch.tensor(0.0), torch.tensor(9.5), SYM4)
    assert (float(low), float(high)) == (-expected, expected)


def test_the_asymmetric_kl_range_stays_within_the_extrema() -> None:
    values = heavy_tailed().abs() - 0.01
    low, high = kl_range(of(values), *ends(values), ASYM8)
    assert float(low) == float(values.amin())
    assert float(high) <= float(values.amax())


def test_nothing_counted_is_an_error() -> None:
    zero = torch.tensor(0.0)
    for search in (lambda h: percentile_range(h, zero, zero), lambda h: mse_range(h, zero, zero, SYM8)):
        with pytest.raises(ValueError, match="the histogram is empty: no token was seen; calibrate with at least one"):
            search(DyadicHistogram())


def test_all_zeros_give_a_range_of_zero() -> None:
    zeros = torch.zeros(10)
    for search in (mse_range, kl_range):
        assert tuple(map(float, search(of(zeros), *ends(zeros), SYM8))) == (0, 0)
    assert tuple(map(float, mse_range(of(zeros), *ends(zeros), ASYM8))) == (0, 0)
    assert tuple(map(float, percentile_range(of(zeros), *ends(zeros)))) == (0, 0)


def test_percentiles_out_of_order_are_refused() -> None:
    values = heavy_tailed(10)
    with pytest.raises(ValueError, match=r"percentiles 60 and 40; give two numbers from 0 to 100, the lower one first"):
        percentile_range(of(values), *ends(values), 60, 40)


def test_the_observer_counts_the_inputs_of_each_linear() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    current = [0]
    observer = HistogramObserver(lambda: current[0])
    for name, linear in block.named_children():
        observer.watch(name, linear, torch.device("cpu"))
    batches = [torch.randn(1, 5, 8, generator=generator(seed)) for seed in range(3)]
    with torch.no_grad():
        for current[0], batch in enumerate(batches):
            block(batch)
        observer.close()
        block(batches[0])
        inner = [block[0](batch) for batch in batches]
    for name, expected in (("0", batches), ("1", inner)):
        assert same(observer.histograms[name], of(*expected))
        assert observer.ranges[name].minimum == torch.cat(expected).amin()


def test_linears_that_are_handed_one_tensor_count_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    block, calls = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), []
    observer = HistogramObserver(lambda: 0)
    for name, linear in block.named_children():
        observer.watch(name, linear, torch.device("cpu"))
    add = DyadicHistogram.add
    monkeypatch.setattr(DyadicHistogram, "add", lambda self, x: (calls.append(x), add(self, x))[1])
    x = torch.randn(1, 5, 8, generator=generator(0))
    for linear in block:
        linear(x)
    assert len(calls) == 1
    assert all(same(observer.histograms[name], of(x)) for name, _ in block.named_children())
    x += 1
    block[1](x)
    assert same(observer.histograms["1"], of(x - 1, x))


def observed_share(rank: int, ranks: int, samples: list[Tensor]) -> tuple[list[int], int, int, list[float], int]:
    """What this rank holds after agreement: counts, exponent, zeros, extrema, first bad sample."""
    ids = list(range(rank, len(samples), ranks))
    current = [0]
    observer = HistogramObserver(lambda: current[0])
    linear = nn.Linear(8, 8)
    observer.watch("a", linear, torch.device("cpu"))
    with torch.no_grad():
        for current[0] in ids:
            linear(samples[current[0]])
    observer.close()
    found = observer.agree(ids, len(samples), lambda name: True)["a"]
    bad = -1 if found.range.first_bad is None else found.range.first_bad
    extrema = [float(found.range.minimum), float(found.range.maximum)]
    return found.histogram.counts_B.tolist(), int(found.histogram.exponent), int(found.histogram.zeros), extrema, bad


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_agree_on_the_counts_of_all_samples_whatever_their_widths(run_ranks: RankRunner, ranks: int) -> None:
    samples = [torch.randn(1, 5, 8, generator=generator(seed)).relu() * 10.0**seed for seed in range(3)]
    whole, every = of(*samples), torch.cat(samples)
    expected = (whole.counts_B.tolist(), int(whole.exponent), int((every == 0).sum()), [0.0, float(every.amax())], -1)
    assert run_ranks(ranks, observed_share, ranks, samples) == [expected] * ranks


def test_a_layer_that_no_sample_reaches_agrees_on_nothing(run_ranks: RankRunner) -> None:
    nothing = run_ranks(2, observed_share, 2, [torch.zeros(1, 0, 8)] * 2)
    assert nothing == [([0] * BINS, SMALLEST_EXPONENT, 0, [math.inf, -math.inf], -1)] * 2


def test_the_observer_skips_empty_inputs_and_remembers_what_is_not_finite() -> None:
    linear = nn.Linear(8, 8)
    observer = HistogramObserver(lambda: 5)
    observer.watch("a", linear, torch.device("cpu"))
    linear(torch.zeros(1, 0, 8))
    assert not observer.histograms["a"].counts_B.any()
    linear(torch.full((1, 1, 8), torch.inf))
    assert int(observer.ranges["a"].first_bad) == 5
