"""Ranges of linear inputs over samples."""

import pytest
import torch
from torch import nn

from msmodelslim.observer.min_max import NO_SAMPLE, MinMaxObserver


class Block(nn.Module):
    """Two linears that read one tensor, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) + self.k(x))


def observe(batches: list[torch.Tensor], keep: bool = False) -> tuple[Block, MinMaxObserver]:
    block = Block()
    current = [0]
    observer = MinMaxObserver(lambda: current[0], keep)
    for name, linear in block.named_children():
        observer.watch(name, linear, torch.device("cpu"))
    for current[0], batch in enumerate(batches):
        block(batch)
    observer.close()
    return block, observer


def batches(count: int = 4) -> list[torch.Tensor]:
    return list(torch.randn(count, 1, 5, 8, generator=torch.Generator().manual_seed(0)))


def test_the_range_over_samples_is_the_range_of_their_concatenation() -> None:
    block, observer = observe(batches())
    every = torch.cat(batches())
    inner = block.q(every) + block.k(every)
    for name, expected in (("q", every), ("k", every), ("o", inner)):
        assert torch.equal(observer.ranges[name].minimum, expected.amin())
        assert torch.equal(observer.ranges[name].maximum, expected.amax())


def test_the_order_of_samples_does_not_matter() -> None:
    _, forward = observe(batches())
    _, backward = observe(batches()[::-1])
    assert torch.equal(forward.ranges["q"].minimum, backward.ranges["q"].minimum)
    assert torch.equal(forward.ranges["q"].maximum, backward.ranges["q"].maximum)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_sample_that_is_not_finite_is_remembered(value: float) -> None:
    data = batches()
    data[2][0, 3, 1] = value
    data[3][0, 3, 1] = value
    _, observer = observe(data)
    assert int(observer.ranges["k"].first_bad) == 2


def test_a_linear_without_tokens_keeps_the_identity() -> None:
    _, observer = observe([torch.zeros(1, 0, 8)])
    seen = observer.ranges["q"]
    assert (seen.minimum, seen.maximum, int(seen.first_bad)) == (torch.inf, -torch.inf, NO_SAMPLE)


def test_each_samples_own_range_is_kept_when_asked_for() -> None:
    data = batches()
    _, observer = observe(data, keep=True)
    for index, batch in enumerate(data):
        assert torch.equal(observer.ranges["q"].per_sample[index], torch.stack((batch.amin(), batch.amax())))


def test_a_tensor_changed_in_place_is_measured_again() -> None:
    linear = nn.Linear(8, 8, bias=False)
    observer = MinMaxObserver(lambda: 0)
    observer.watch("a", linear, torch.device("cpu"))
    x = torch.ones(1, 2, 8)
    linear(x)
    x.mul_(3)
    linear(x)
    assert observer.ranges["a"].maximum == 3
