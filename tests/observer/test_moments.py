"""Moments and value counts against numpy on the concatenated values, in float64."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from msmodelslim.observer import moments
from msmodelslim.observer.moments import MomentObserver, Moments, merged, moments_of
from msmodelslim.observer.value_counts import ValueCountObserver, count_values, quantiles
from tests.run_ranks import RankRunner


def numpy_moments(values: NDArray[np.float64]) -> list[float]:
    deviation = values - values.mean()
    return [values.size, values.mean(), *((deviation**power).sum() for power in (2, 3, 4))]


def numpy_kurtosis(values: NDArray[np.float64]) -> float:
    """Fisher's, biased: scipy.stats.kurtosis with its defaults."""
    deviation = values - values.mean()
    return float((deviation**4).mean() / (deviation**2).mean() ** 2 - 3)


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), min_size=1, max_size=6),
    st.floats(-1e4, 1e4),
)
@settings(deadline=None, max_examples=60)
def test_parts_merge_to_the_moments_of_the_whole(parts: list[list[float]], shift: float) -> None:
    arrays = [np.array(part) + shift for part in parts]
    found = moments_of(torch.from_numpy(arrays[0]))
    for array in arrays[1:]:
        found = merged(found, moments_of(torch.from_numpy(array)))
    expected = numpy_moments(np.concatenate(arrays))
    size = max(1e-9, np.abs(np.concatenate(arrays) - expected[1]).max())
    scales = [1, 1, size**2, size**3, size**4]
    for value, one, scale in zip(vars(found).values(), expected, scales, strict=True):
        assert value == pytest.approx(one, rel=1e-9, abs=1e-7 * scale)


def test_kurtosis_and_std_keep_their_digits_far_from_zero() -> None:
    values = np.random.default_rng(0).standard_t(5, 5000) + 1e6
    found = moments_of(torch.from_numpy(values))
    assert found.excess_kurtosis == pytest.approx(numpy_kurtosis(values), rel=1e-8)
    assert found.std == pytest.approx(values.std(), rel=1e-10)


def test_a_hand_worked_example() -> None:
    # 0, 0, 0, 4: mean 1; squares 1+1+1+9, cubes -3+27, fourth powers 3+81; kurtosis (84/4)/(12/4)^2 - 3
    found = moments_of(torch.tensor([0.0, 0.0, 0.0, 4.0]))
    assert found == Moments(4, 1, 12, 24, 84)
    assert found.excess_kurtosis == pytest.approx(21 / 9 - 3)


def test_large_inputs_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    whole = moments_of(x)
    monkeypatch.setattr(moments, "_ELEMENTS_AT_ONCE", 64)
    for one, other in zip(vars(moments_of(x)).values(), vars(whole).values(), strict=True):
        assert one == pytest.approx(other, rel=1e-10)


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=300))
@settings(deadline=None, max_examples=60)
def test_quantiles_of_bfloat16_numbers_are_numpys(bits: list[int]) -> None:
    signed = np.array(bits, dtype=np.uint16).view(np.int16)
    x = torch.from_numpy(signed.copy()).view(torch.bfloat16)
    x = torch.where(x.isfinite() & (x.abs() < 1e30), x, torch.zeros_like(x))
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    expected = np.quantile(x.double().numpy(), shares)
    assert quantiles(count_values(x), shares) == pytest.approx(expected.tolist(), rel=1e-12, abs=0)


def test_quantiles_of_float32_numbers_are_within_half_a_bfloat16_step() -> None:
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(2)) * 3 + 1
    found = quantiles(count_values(x), [0.01, 0.25, 0.75, 0.99])
    assert found == pytest.approx(np.quantile(x.double().numpy(), [0.01, 0.25, 0.75, 0.99]).tolist(), rel=2**-8)


def test_outliers_do_not_blur_the_quartiles() -> None:
    """Of 10,000 values 49 are outliers of 1e4: an equal-width histogram would have no bin inside the bulk."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[:49] = 1e4
    low, high = quantiles(count_values(x), [0.25, 0.75])
    expected = np.quantile(x.double().numpy(), [0.25, 0.75])
    assert [low, high] == pytest.approx(expected.tolist(), rel=1e-12)
    assert 1.2 < high - low < 1.5


def samples(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, 3 + index, 8, generator=generator).bfloat16() for index in range(count)]


def observed(rank: int, world_size: int, count: int) -> list[Any]:
    linear, now = nn.Linear(8, 8, dtype=torch.bfloat16), [-1]
    counts, parts = ValueCountObserver(), MomentObserver(lambda: now[0])
    counts.watch("x", linear, torch.device("cpu"))
    parts.watch("x", linear)
    ids = list(range(rank, count, world_size))
    for index in ids:
        now[0] = index
        for half in samples(count)[index].split(2, dim=1):  # called more than once a sample
            linear(half)
        linear(torch.empty(1, 0, 8, dtype=torch.bfloat16))
    counts.close()
    parts.close()
    linear(torch.full((1, 1, 8), 1e30, dtype=torch.bfloat16))  # nobody looks any more
    share = (ids, count, lambda name: True)
    found, counted = parts.agree(*share)["x"], counts.agree(*share)["x"]
    return [found and list(vars(found).values()), counted]


@pytest.mark.parametrize("count", [1, 5])
def test_ranks_agree_bit_for_bit_with_one_rank_and_numpy(count: int, run_ranks: RankRunner) -> None:
    ((alone, counts),) = run_ranks(1, observed, 1, count)
    values = torch.cat([sample.flatten() for sample in samples(count)]).double().numpy()
    assert alone == pytest.approx(numpy_moments(values), rel=1e-10)
    assert int(counts.sum()) == values.size
    for ranks in (2, 3):
        for found, counted in run_ranks(ranks, observed, ranks, count):
            assert found == alone
            assert torch.equal(counted, counts)


def test_nothing_seen_has_no_moments() -> None:
    observer = MomentObserver(lambda: 0)
    observer.watch("x", nn.Linear(2, 2))
    assert observer.agree([0], 1, lambda name: True) == {"x": None}


def test_counts_are_in_the_order_of_the_numbers() -> None:
    x = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0], dtype=torch.bfloat16)
    places = count_values(x).nonzero().flatten().tolist()
    assert len(places) == 5  # both zeros are one number
    assert all(one < other for one, other in itertools.pairwise(places))
