"""A float sum that one rank owns: its bits, who holds it, what travels, and what is refused; on real ranks."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed import RankMismatchError, Stat, StatKind, StatStore, deal, stat_agree, watchdog
from tests.distributed.test_dist_ops import same_bits
from tests.distributed.test_stat_store import deal as deal_as
from tests.distributed.test_stat_store import sample_values, shard_sums, tree_in_float32
from tests.run_ranks import RankRunner

WIDTH = 64
GRAM_BYTES = 4 * WIDTH * WIDTH


def sums_of(values: dict[int, Tensor]) -> Tensor:
    total = tree_in_float32(shard_sums(values))
    assert total is not None
    return total


def collect(rank: int, dealt: list[list[int]], count: int, owners: dict[str, int], elements: int) -> list[dict]:
    stat_agree._ROUND_ELEMENTS = elements
    store = StatStore(dealt[rank], count)
    found = []
    for _ in range(2):
        store.declare("never:sum", StatKind.SUM)
        for i in dealt[rank]:
            x = sample_values(i)
            store.add_sum("a:gram", i, x)
            store.add_sum("a:double", i, x.double())
            store.add_count("a:tokens", i, torch.tensor(i + 1))
            store.add_max("a", i, x)
            store.add_sum("b:sum", i, x[0])
            if i % 3 == 1:
                store.add_sum("c:sum", i, x[:, :2])
        found.append(dict(store.agree(owners=owners)))
    return found


@pytest.mark.parametrize("elements", [7, 1 << 22])
@pytest.mark.parametrize(
    ("how", "world_size", "count"), [("cyclic", 2, 5), ("deal", 4, 16), ("blocks", 3, 7), ("deal", 5, 3)]
)
def test_the_owner_alone_holds_the_sum_of_the_tree_and_all_know_its_samples(
    run_ranks: RankRunner, how: str, world_size: int, count: int, elements: int
) -> None:
    x = {i: sample_values(i) for i in range(count)}
    owners = {"a": 1, "c:sum": world_size - 1, "never": 0}
    want = {
        "a:gram": (sums_of(x), 1, count),
        "a:double": (sums_of({i: one.double() for i, one in x.items()}), 1, count),
        "b:sum": (sums_of({i: one[0] for i, one in x.items()}), None, count),
        "c:sum": (sums_of({i: x[i][:, :2] for i in range(1, count, 3)}), world_size - 1, len(range(1, count, 3))),
    }
    answers = run_ranks(world_size, collect, deal_as(count, world_size, how), count, owners, elements)
    for rank, rounds in enumerate(answers):
        for found in rounds:
            for name, (total, owner, samples) in want.items():
                one = found[name]
                assert (one.owner, one.samples) == (owner, samples), name
                assert one.is_elsewhere == (owner not in (None, rank)), name
                assert one.value is None if one.is_elsewhere else same_bits(one.value, total), name
            assert found["a:tokens"].value.item() == count * (count + 1) // 2 and found["a:tokens"].owner is None
            assert same_bits(found["a"].value, torch.stack(list(x.values())).amax(0))
            assert found["never:sum"] == Stat(StatKind.SUM, None, 0, owner=0) and not found["never:sum"].is_elsewhere


def test_on_one_rank_the_only_rank_is_the_owner_and_holds_the_same_bits() -> None:
    (first, _) = collect(0, [list(range(9))], 9, {"a": 0}, 1 << 22)
    assert same_bits(first["a:gram"].value, sums_of({i: sample_values(i) for i in range(9)}))
    assert first["a:gram"].owner == 0 and first["b:sum"].owner is None


def pair_of_three(rank: int) -> Mapping[str, Stat] | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    store = StatStore([rank // 2], 2, group=group)
    store.add_sum("a", rank // 2, torch.tensor([1.0 + rank]))
    return dict(store.agree(owners={"a": 1}))


def test_an_owner_is_a_place_in_the_group(run_ranks: RankRunner) -> None:
    first, _, last = run_ranks(3, pair_of_three)
    assert first["a"].is_elsewhere and last["a"].value.tolist() == [4.0]


def with_experts(rank: int) -> Mapping[str, Stat]:
    store = StatStore([rank], 2)
    store.add_sum("norm:gram", rank, torch.tensor([1.0]))
    store.add_sum(f"expert{rank}:gram", rank, torch.tensor([10.0 + rank]))
    owners = {"norm": 0, f"expert{rank}": 1 - rank, "expert0:gram": 5}
    return dict(store.agree(lambda module: module == "norm", owners=owners))


def test_streams_of_local_only_modules_stay_where_they_are(run_ranks: RankRunner) -> None:
    for rank, found in enumerate(run_ranks(2, with_experts)):
        assert found["norm:gram"].is_elsewhere == (rank == 1)
        own = found[f"expert{rank}:gram"]
        assert own.value.item() == 10 + rank and own.owner is None


# ---------------------------------------------------------------- what travels


def gram_of_integers(i: int) -> Tensor:
    """Small integers: float32 adds them exactly, in any order."""
    x = torch.randint(-3, 4, (5, WIDTH), generator=torch.Generator().manual_seed(i)).float()
    return x.T @ x


def send_gram(rank: int, world_size: int, owner: int | None) -> tuple[watchdog.Traffic, int, Tensor | None]:
    """What this rank sent, its partial sums, and the Gram matrix if it has it."""
    own = deal(16, world_size)[rank]
    store = StatStore(own, 16)
    for i in own:
        store.add_sum("a", i, gram_of_integers(i))
    stream = store._streams["a"]
    store._put_away(stream, stream.latest)
    store._tree.settle(stream.parts)
    partials = len(stream.parts)
    before = watchdog.traffic()
    found = store.agree(owners=None if owner is None else {"a": owner})
    return watchdog.traffic().since(before), partials, found["a"].value


def test_a_gram_travels_once_to_its_owner_and_no_further(run_ranks: RankRunner) -> None:
    exact = sum((gram_of_integers(i).double() for i in range(16)), torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    owned = run_ranks(4, send_gram, 4, 2)
    facts = 2048  # bytes of the exchange that comes first
    for rank, (sent, partials, value) in enumerate(owned):
        at_most = 0 if rank == 2 else partials * GRAM_BYTES
        assert at_most <= sent.sent_bytes <= at_most + facts
        assert sent.collectives <= 3
        assert torch.equal(value.double(), exact) if rank == 2 else value is None
    everywhere = run_ranks(4, send_gram, 4, None)
    assert all(torch.equal(value.double(), exact) for _, _, value in everywhere)
    # An all-gather delivers to three others what is handed to it once.
    delivered = sum(sent.sent_bytes for sent, _, _ in owned)
    assert delivered * 3.5 < 3 * sum(sent.sent_bytes for sent, _, _ in everywhere)


# ---------------------------------------------------------------- what is refused


def refused(rank: int, given: list[dict[str, int]]) -> None:
    store = StatStore([rank], 3)
    store.add_sum("a:gram", rank, torch.ones(2))
    store.add_max("m", rank, torch.ones(2))
    store.agree(owners=given[rank])


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (
            [{"a": 0}, {"a": 1}, {"a": 0}],
            RankMismatchError,
            "StatStore.agree of 'a': owner differs: 0 on ranks 0, 2; 1 on rank 1",
        ),
        (
            [{"a": 2}, {"a": 2}, {}],
            RankMismatchError,
            "StatStore.agree of 'a': owner differs: 2 on ranks 0, 1; None on rank 2",
        ),
        (
            [{"a:gram": 3}] * 3,
            ValueError,
            "StatStore.agree: the owner of 'a:gram' is 3; give a place among the 3 ranks, from 0 on",
        ),
        (
            [{"m": 0}] * 3,
            ValueError,
            "StatStore.agree: owners names 'm', which is no float sum; name a sum's stream, or its module",
        ),
    ],
)
def test_a_wrong_owner_is_told_on_every_rank(
    run_ranks: RankRunner, given: list[dict[str, int]], kind: type[Exception], text: str
) -> None:
    for error in run_ranks.errors(3, refused, given):
        assert isinstance(error, kind) and str(error) == text
