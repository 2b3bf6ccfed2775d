"""The Gram matrix of an input is measured once for all linears that read it, and held by the rank that rounds them."""

import re

import pytest
import torch
from torch import Tensor, nn

from msmodelslim.observer.gram import AgreedGram, GramObserver
from tests.run_ranks import RankRunner

UNITS = (("q", "k"), ("o",), ("unreached",))


def x_of(i: int) -> Tensor:
    return torch.randn(1, 3 + i, 6, generator=torch.Generator().manual_seed(i))


def observe(rank: int, world_size: int, owners: dict[str, int], diagonal: bool = False) -> dict[str, AgreedGram]:
    own = list(range(rank, 5, world_size))
    linears = {name: nn.Linear(6, 2) for unit in UNITS for name in unit}
    current = -1
    observer = GramObserver(own, 5, lambda: current, torch.device("cpu"))
    for unit in UNITS:
        observer.watch(unit, linears[unit[0]], diagonal)
    for current in own:
        for name in ("q", "k", "o"):
            linears[name](x_of(current) * (2 if name == "o" else 1))
        linears["unreached"](torch.empty(0, 6))
    observer.close()
    return dict(observer.agree(lambda name: True, owners))


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_linears_of_one_input_share_one_gram_on_its_owner_alone(
    run_ranks: RankRunner, world_size: int, diagonal: bool
) -> None:
    x = torch.cat([x_of(i)[0] for i in range(5)]).double()
    exact = (x.T @ x).diagonal() if diagonal else x.T @ x
    owners = {"q": world_size - 1, "k": world_size - 1, "o": 0, "unreached": 0}
    answers = run_ranks(world_size, observe, world_size, owners, diagonal)
    alone = run_ranks(1, observe, 1, {})[0] if not diagonal else None
    for rank, found in enumerate(answers):
        assert found["q"] is found["k"]
        assert found["unreached"] == AgreedGram(None, 0, None)
        assert found["q"].first_bad is None
        for name, factor in (("q", 1), ("o", 4)):
            assert found[name].tokens == len(x)
            if rank != owners[name]:
                assert found[name].sums is None
                continue
            torch.testing.assert_close(found[name].sums.double(), exact * factor, rtol=1e-6, atol=1e-5)
            if alone is not None:
                assert torch.equal(found[name].sums, alone[name].sums)


def observe_overflow(rank: int, world_size: int, value: float) -> dict[str, AgreedGram]:
    """Sample 3 of 5 holds the value, and so does sample 4."""
    own = list(range(rank, 5, world_size))
    linear, current = nn.Linear(6, 2), -1
    observer = GramObserver(own, 5, lambda: current, torch.device("cpu"))
    observer.watch(("q", "k"), linear, False)
    for current in own:
        linear(x_of(current).index_fill(1, torch.tensor([2]), value if current >= 3 else 0.0))
    return dict(observer.agree(lambda name: True, {"q": 0, "k": 0}))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e25])
def test_every_rank_knows_the_first_sample_whose_squares_are_not_finite(run_ranks: RankRunner, value: float) -> None:
    """C26"""
    for world_size in (1, 3):
        for found in run_ranks(world_size, observe_overflow, world_size, value):
            assert found["k"].first_bad == 3


def test_without_owners_every_rank_has_the_sums(run_ranks: RankRunner) -> None:
    one, two = run_ranks(2, observe, 2, {})
    assert torch.equal(one["q"].sums, two["q"].sums)


def test_one_input_on_two_owners_is_refused() -> None:
    message = "q and k share one sum, but their owners are 0 and 1; deal linears with the same input to one rank"
    with pytest.raises(ValueError, match=re.escape(message)):
        observe(0, 1, {"q": 0, "k": 1, "o": 0, "unreached": 0})
