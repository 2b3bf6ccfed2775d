"""The shortest window of each head against a double loop, and ranks that agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msmodelslim.observer.recall_window import RecallWindowObserver, shortest_window
from tests.run_ranks import RankRunner


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_window(values: list[float], ratio: float) -> tuple[float, float]:
    """Every window that holds enough values."""
    ordered = sorted(values)
    kept = max(int(ratio * len(values)), 1)
    best = (ordered[0], ordered[kept - 1])
    for start in range(len(ordered) - kept + 1):
        window = (ordered[start], ordered[start + kept - 1])
        if window[1] - window[0] < best[1] - best[0]:
            best = window
    return best


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=50),
    st.floats(0.01, 1, exclude_min=True),
)
def test_the_window_is_that_of_a_double_loop_and_of_equal_ones_the_lowest(values: list[int], ratio: float) -> None:
    low, high = shortest_window(torch.tensor([values], dtype=torch.float32), ratio)
    assert (float(low), float(high)) == slow_window([float(v) for v in values], ratio)


def test_ratio_one_is_min_max() -> None:
    observer, values = RecallWindowObserver(), torch.randn(4, 100, generator=generator(0))
    observer.update(values[:, :50])
    observer.update(values[:, 50:])
    low, high = observer.get_min_max()
    assert torch.equal(low, values.amin(1))
    assert torch.equal(high, values.amax(1))


def test_updates_keep_the_union_of_their_windows_in_any_order() -> None:
    samples = [torch.randn(3, 40 + n, generator=generator(n)) for n in range(4)]
    forward, backward = RecallWindowObserver(0.9), RecallWindowObserver(0.9)
    for sample in samples:
        forward.update(sample)
    for sample in samples[::-1]:
        backward.update(sample)
    windows = [[slow_window(row.tolist(), 0.9) for row in sample] for sample in samples]
    low, high = forward.get_min_max()
    assert low.tolist() == [min(w[row][0] for w in windows) for row in range(3)]
    assert high.tolist() == [max(w[row][1] for w in windows) for row in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(forward.get_min_max(), backward.get_min_max(), strict=True))


def test_outliers_are_left_out() -> None:
    values = torch.randn(2, 1000, generator=generator(1)).clamp(-3, 3)
    values[0, 7], values[1, 9] = 1e4, -1e4
    observer = RecallWindowObserver(0.999)
    observer.update(values)
    low, high = observer.get_min_max()
    assert low.min() >= -3 and high.max() <= 3


@pytest.mark.parametrize("outlier", [torch.inf, -torch.inf])
def test_an_infinity_that_no_window_needs_is_left_out(outlier: float) -> None:
    values = torch.linspace(0, 1, 100).reshape(1, -1)
    values[0, 3] = outlier
    observer = RecallWindowObserver(0.99)
    observer.update(values)
    assert tuple(map(float, observer.get_min_max())) == (float(values[0, 0]), 1.0)


def test_half_precision_is_measured_in_float32() -> None:
    values = torch.randn(2, 64, generator=generator(2)).bfloat16()
    half, full = RecallWindowObserver(0.9), RecallWindowObserver(0.9)
    half.update(values)
    full.update(values.float())
    assert half.get_min_max()[0].dtype is torch.float32
    assert torch.equal(half.get_min_max()[0], full.get_min_max()[0])


def test_a_nan_is_not_forgotten() -> None:
    observer, values = RecallWindowObserver(0.5), torch.randn(3, 20, generator=generator(3))
    observer.update(values)
    values[1, 4] = torch.nan
    observer.update(values)
    observer.update(torch.randn(3, 20, generator=generator(4)))
    with pytest.raises(
        ValueError, match=r"rows \[1\] saw no values, a NaN, or an infinity that the window had to keep"
    ):
        observer.get_min_max()


def test_empty_updates_change_nothing_and_alone_are_an_error() -> None:
    observer = RecallWindowObserver(0.9)
    observer.update(torch.zeros(2, 0))
    with pytest.raises(ValueError, match=r"rows \[0, 1\] saw no values"):
        observer.get_min_max()
    observer.update(torch.ones(2, 3))
    observer.update(torch.zeros(2, 0))
    assert observer.get_min_max()[1].tolist() == [1, 1]


def test_reset_forgets() -> None:
    observer = RecallWindowObserver()
    observer.update(torch.ones(2, 3))
    observer.reset()
    with pytest.raises(ValueError, match="no values were seen; calibrate with at least one sample"):
        observer.get_min_max()


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01])
def test_a_share_outside_zero_to_one_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=rf"ratio is {ratio}; it is the share of values to keep, so give above 0 to 1"):
        RecallWindowObserver(ratio)


def test_other_shapes_are_refused() -> None:
    observer = RecallWindowObserver()
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\); give rows of values, \[rows, values\]"):
        observer.update(torch.zeros(3))
    observer.update(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="4 rows after 3; use one observer a module"):
        observer.update(torch.zeros(4, 2))


def test_without_a_process_group_sync_is_a_matter_of_course() -> None:
    observer = RecallWindowObserver()
    observer.update(torch.ones(2, 3), sync=True)
    assert observer.get_min_max()[0].tolist() == [1, 1]


def observe(rank: int, world_size: int, samples: list[Tensor]) -> list[list[float]]:
    observer = RecallWindowObserver(0.9)
    for first in range(0, len(samples), world_size):  # equally many calls on every rank; a rank may see no values
        mine = samples[first + rank] if first + rank < len(samples) else torch.zeros(3, 0)
        observer.update(mine, sync=True)
    return [end.tolist() for end in observer.get_min_max()]


def test_ranks_that_sync_hold_the_windows_of_all_samples(run_ranks: RankRunner) -> None:
    samples = [torch.randn(3, 50, generator=generator(n)) for n in range(5)]
    assert run_ranks(2, observe, 2, samples) == [observe(0, 1, samples)] * 2
