import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from msmodelslim.distributed import (
    DistHelper,
    RankMismatchError,
    StatKind,
    StatStore,
    shard_rank,
    shard_tree,
    stat_agree,
    visit_order,
)
from tests.distributed.test_dist_ops import same_bits

INF = float("inf")


def deal(count: int, world_size: int, how: str) -> list[list[int]]:
    if how == "cyclic":
        return [list(range(rank, count, world_size)) for rank in range(world_size)]
    if how == "deal":
        return shard_tree.deal(count, world_size)
    if how == "blocks":
        return [list(range(count * rank // world_size, count * (rank + 1) // world_size)) for rank in range(world_size)]
    return [[i for i in range(count) if shard_rank(i, world_size) == rank] for rank in range(world_size)]


def sample_values(i: int) -> Tensor:
    """Spread over 12 decades, so that any other order of adding shows in the bits."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(2, 5, generator=generator) * 10.0 ** torch.randint(-6, 6, (2, 5), generator=generator)


def sees(i: int, expert: int) -> bool:
    return (i * 7 + expert) % 5 < 2 and expert != 3


def collect(store: StatStore, order: list[int], rounds: int = 1) -> list[dict]:
    results = []
    for _ in range(rounds):
        store.declare("expert3", StatKind.MAX)
        for i in order:
            x = sample_values(i)
            store.add_min("x:min", i, x)
            store.add_max("x:max", i, x.to(torch.bfloat16))
            store.add_count("x:tokens", i, torch.tensor(i + 1))
            store.add_sum("x:sum", i, x)
            store.add_sum("x:sum", i, x * 3)  # a module that is called twice in one sample
            store.add_sum("x:double", i, x.to(torch.float64))
            store.add_scalar("x:loss", i, float(x[0, 0]))
            for expert in range(4):
                if sees(i, expert):
                    store.add_max(f"expert{expert}", i, x.abs())
                    store.add_sum(f"expert{expert}:sum", i, x[0])
        results.append(dict(store.agree()))
    return results


def on_ranks(rank: int, dealt: list[list[int]], count: int, order: bool) -> list[dict]:
    own = visit_order(dealt[rank]) if order else dealt[rank]
    return collect(StatStore(own, count), own, rounds=2)


def tree_in_float32(leaves: list[Tensor | None]) -> Tensor | None:
    """The fixed tree over shard sums, written out: strides G/2, G/4, … 1."""
    while len(leaves) > 1:
        half = len(leaves) // 2
        pairs = zip(leaves[:half], leaves[half:], strict=True)
        leaves = [b if a is None else a if b is None else a + b for a, b in pairs]
    return leaves[0]


def shard_sums(values: dict[int, Tensor], shards: int = 8) -> list[Tensor | None]:
    sums: list[Tensor | None] = [None] * shards
    for i in sorted(values):
        held = sums[i % shards]
        sums[i % shards] = values[i] if held is None else held + values[i]
    return sums


def by_hand(count: int) -> dict[str, Tensor]:
    x = {i: sample_values(i) for i in range(count)}
    stacked = torch.stack(list(x.values()))
    found = {
        "x:min": stacked.amin(0),
        "x:max": stacked.to(torch.bfloat16).amax(0).float(),
        "x:tokens": torch.tensor(count * (count + 1) // 2),
        "x:sum": tree_in_float32(shard_sums({i: one + one * 3 for i, one in x.items()})),
        "x:double": tree_in_float32(shard_sums({i: one.double() for i, one in x.items()})),
        "x:loss": torch.tensor([float(one[0, 0]) for one in x.values()], dtype=torch.float64),
    }
    for expert in range(3):
        own = {i: one for i, one in x.items() if sees(i, expert)}
        if own:
            found[f"expert{expert}"] = torch.stack([one.abs() for one in own.values()]).amax(0)
            found[f"expert{expert}:sum"] = tree_in_float32(shard_sums({i: one[0] for i, one in own.items()}))
    return found


def check(found: dict, count: int) -> None:
    want = by_hand(count)
    assert list(found) == sorted([*want, "expert3"])
    assert found["expert3"].value is None and found["expert3"].samples == 0
    assert found["x:loss"].sample_ids == tuple(range(count))
    for name, value in want.items():
        assert same_bits(found[name].value, value), name
        if name.startswith("expert"):
            assert found[name].samples == sum(sees(i, int(name[6])) for i in range(count))
        else:
            assert found[name].samples == count


@pytest.mark.parametrize("count", [1, 5, 16, 21])
def test_one_rank_gives_the_tree_written_by_hand_in_any_visiting_order(count):
    for order in (list(range(count)), visit_order(range(count))):
        for found in collect(StatStore(order, count), order, rounds=2):
            check(found, count)


def test_the_values_of_these_tests_tell_one_order_from_another():
    tree = by_hand(21)["x:sum"]
    assert not same_bits(torch.stack([sample_values(i) * 4 for i in range(21)]).sum(0), tree)


@pytest.mark.parametrize("how", ["cyclic", "blocks", "shards", "deal"])
@pytest.mark.parametrize(("world_size", "count"), [(2, 5), (2, 16), (3, 16), (4, 3), (5, 21)])
def test_any_number_of_ranks_and_any_way_of_dealing_gives_the_same_bits(run_ranks, world_size, count, how):
    dealt = deal(count, world_size, how)
    for answers in run_ranks(world_size, on_ranks, dealt, count, how == "shards"):
        for found in answers:
            check(found, count)


def test_more_ranks_than_shards_and_samples_dealt_at_random_give_the_same_bits(run_ranks):
    ids = list(range(13))
    random.Random(0).shuffle(ids)
    dealt = [sorted(ids[rank::9]) for rank in range(9)]
    for answers in run_ranks(9, on_ranks, dealt, 13, False):
        check(answers[0], 13)


# ---------------------------------------------------------------- hand-worked vectors


def three_ranks(rank: int) -> dict:
    store = StatStore([rank], 3)
    if rank == 0:
        store.add_max("expert", 0, torch.tensor([1.5]))
    elif rank == 1:
        store.declare("expert", StatKind.MAX)
    else:
        store.add_max("expert", 2, torch.tensor([-INF]))
    return dict(store.agree())


def test_maxima_of_a_shard_an_empty_shard_and_an_identity(run_ranks):
    for found in run_ranks(3, three_ranks):
        assert found["expert"].value.tolist() == [1.5] and found["expert"].samples == 2


def four_partials(rank: int, world_size: int, values: list[float]) -> Tensor:
    own = list(range(rank, 4, world_size))
    store = StatStore(own, 4, shards=4)
    for i in own:
        store.add_sum("a", i, torch.tensor([values[i]]))
    return store.agree()["a"].value


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_four_partials_are_added_as_even_ones_plus_odd_ones(run_ranks, world_size):
    values = [1e8, 1.0, -1e8, 1.0]  # (1e8 - 1e8) + (1 + 1) = 2 in float32; a running sum would give 1
    for found in run_ranks(world_size, four_partials, world_size, values):
        assert found.tolist() == [2.0]


# ---------------------------------------------------------------- values that are hard


def hard(rank: int) -> dict:
    store = StatStore([rank], 2)
    nan = float("nan")
    row = [[nan, 1.0, -0.0, INF, -INF], [1.0, nan, 0.0, -INF, INF]][rank]
    store.add_min("min", rank, torch.tensor(row))
    store.add_max("max", rank, torch.tensor(row, dtype=torch.float64))
    store.add_min("int", rank, torch.tensor([rank - 5, 2**40 * rank]))
    store.add_max("wide", rank, torch.tensor([rank - 5, -(2**40) * rank]))
    store.add_count("flags", rank, torch.tensor([True, rank == 1]))
    store.add_count("big", rank, torch.tensor([2**53 + rank]))
    store.add_sum("empty", rank, torch.empty(0, 3))
    store.add_max("none", rank, torch.empty(0))
    return dict(store.agree())


def test_nan_zeros_integers_bools_and_empty_tensors(run_ranks):
    one, two = run_ranks(2, hard)
    for name in one:
        assert same_bits(one[name].value, two[name].value), name
    assert (
        torch.isnan(one["min"].value).tolist() == torch.isnan(one["max"].value).tolist() == [True, True, *[False] * 3]
    )
    assert one["min"].value.tolist()[2:] == [0.0, -INF, -INF] and one["max"].value.tolist()[2:] == [0.0, INF, INF]
    assert not one["min"].value[2].signbit() and one["max"].value.dtype == torch.float64
    assert one["int"].value.tolist() == [-5, 0] and one["wide"].value.tolist() == [-4, 0]
    assert one["flags"].value.tolist() == [2, 1] and one["big"].value.tolist() == [2**54 + 1]
    assert one["empty"].value.shape == (0, 3) and one["none"].value.shape == (0,)


def in_rounds(rank: int) -> list[Tensor]:
    stat_agree._ROUND_ELEMENTS = 7
    own = list(range(rank, 11, 3))
    store = StatStore(own, 11)
    for i in own:
        store.add_sum("a", i, torch.full((5,), 0.1 * i))
        store.add_sum("b", i, torch.arange(3) * 0.3 * i)
    found = store.agree()
    return [found["a"].value, found["b"].value]


def test_sums_that_need_many_rounds_are_the_same(run_ranks):
    a = tree_in_float32(shard_sums({i: torch.full((5,), 0.1 * i) for i in range(11)}))
    b = tree_in_float32(shard_sums({i: torch.arange(3) * 0.3 * i for i in range(11)}))
    for found in run_ranks(3, in_rounds):
        assert same_bits(found[0], a) and same_bits(found[1], b)


def test_what_was_added_may_be_changed_by_its_owner_afterwards():
    store = StatStore([0], 1)
    own = torch.ones(2)
    for add in (store.add_min, store.add_max, store.add_sum):
        add(add.__name__, 0, own)
    own.zero_()
    assert all(one.value.tolist() == [1, 1] for one in store.agree().values())


def test_in_visiting_order_few_partial_sums_are_held():
    held = {}
    for order in (list(range(64)), visit_order(range(64))):
        store = StatStore(order, 64)
        most = 0
        for i in order:
            store.add_sum("a", i, torch.ones(1))
            stream = store._streams["a"]
            most = max(most, len(stream.parts) + 1)
        held[order[1]] = most
    assert held == {1: 9, 8: 5}  # G + the sample at hand; log2(G) + 1 + the sample at hand


@given(st.integers(0, 70), st.integers(1, 20), st.sampled_from([1, 4, 8, 16]))
def test_dealing_gives_each_sample_to_one_rank_in_whole_shards_and_few_subtrees(count, world_size, shards):
    dealt = shard_tree.deal(count, world_size, shards)
    assert len(dealt) == world_size and sorted(i for own in dealt for i in own) == list(range(count))
    for own in dealt:
        assert {i for i in range(count) if i % shards in {one % shards for one in own}} == set(own)
        assert own == visit_order(own, shards)
        store = StatStore(own, count, shards=shards)
        most = 0
        for i in own:
            store.add_sum("a", i, torch.ones(1))
            most = max(most, len(store._streams["a"].parts))
        assert most <= 2 * shards.bit_length()
    if count <= shards:
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_sixteen_samples_are_dealt_to_three_ranks_as_written_here():
    assert shard_tree.deal(16, 3) == [[0, 8, 4, 12, 2, 10], [6, 14, 1, 9], [5, 13, 3, 11, 7, 15]]


def test_samples_go_to_ranks_by_shard_and_shards_are_visited_bit_reversed():
    assert [shard_rank(i, 3) for i in range(10)] == [0, 1, 2, 0, 1, 2, 0, 1, 0, 1]
    assert visit_order(range(10)) == [0, 8, 4, 2, 6, 1, 9, 5, 3, 7]
    assert visit_order([]) == []


# ---------------------------------------------------------------- shared and local_only


def experts(rank: int, use_helper: bool) -> dict:
    model = nn.ModuleDict({"norm": nn.Identity(), f"expert{rank}": nn.Identity()})
    store = StatStore([rank], 2)
    store.add_max("norm", rank, torch.tensor([float(rank)]))
    store.add_max(f"expert{rank}:out", rank, torch.tensor([float(rank)]))
    return dict(store.agree(DistHelper(model) if use_helper else lambda module: module == "norm"))


@pytest.mark.parametrize("use_helper", [True, False])
def test_a_local_only_module_keeps_its_own_statistics(run_ranks, use_helper):
    for rank, found in enumerate(run_ranks(2, experts, use_helper)):
        assert list(found) == [f"expert{rank}:out", "norm"]
        assert found["norm"].value.item() == 1.0 and found["norm"].samples == 2
        assert found[f"expert{rank}:out"].value.item() == rank and found[f"expert{rank}:out"].samples == 1


def test_a_stream_must_be_named_after_a_module():
    store = StatStore([0], 1)
    store.add_max("q_proj.input", 0, torch.ones(1))
    with pytest.raises(
        ValueError, match=r"stream 'q_proj.input': 'q_proj.input' is not a module; write the module's full"
    ):
        store.agree(DistHelper(nn.Linear(1, 1), "q_proj"))


# ---------------------------------------------------------------- disagreements and mistakes


def disagree(rank: int, what: str) -> None:
    store = StatStore([0 if what == "twice" else rank], 4 if what == "missing" else 3 + (what == "count") * rank)
    sample = 0 if what == "twice" else rank
    if what == "shape":
        store.add_max("m", sample, torch.ones(2 + rank // 2))
    elif what == "dtype":
        store.add_max("m", sample, torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    elif what == "kind":
        (store.add_min if rank == 1 else store.add_max)("m", sample, torch.ones(2))
    else:
        store.add_max("m", sample, torch.ones(2))
    store.agree((lambda name: rank != 1) if what == "shared" else None)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("shape", "StatStore.agree: 1 streams disagree: 'm': shape differs: [2] on ranks 0, 1; [3] on rank 2"),
        ("dtype", "'m': dtype differs: torch.float32 on rank 0; torch.float64 on ranks 1, 2"),
        ("kind", "'m': kind differs: max on ranks 0, 2; min on rank 1"),
        ("shared", "'m': local_only on rank 1 and shared on others"),
        ("twice", "StatStore.agree: sample 0 is on ranks 0 and 1; deal each sample once"),
        ("missing", "StatStore.agree: no rank has sample 3 (1 are missing); deal each once"),
        ("count", "StatStore.agree: number of samples differs: 3 on rank 0; 4 on rank 1; 5 on rank 2"),
    ],
)
def test_a_disagreement_is_named_on_every_rank(run_ranks, what, text):
    for error in run_ranks.errors(3, disagree, what):
        assert isinstance(error, RankMismatchError) and text in str(error)


def test_mistakes_of_the_caller_are_refused_where_they_happen():
    store = StatStore([3, 1], 4)
    store.add_max("m", 3, torch.ones(2))
    with pytest.raises(ValueError, match="stream 'm' measures max, not min; give each statistic its own name"):
        store.add_min("m", 3, torch.ones(2))
    with pytest.raises(
        ValueError, match=r"stream 'm': sample 1 has torch.float32 \(3,\), earlier ones torch.float32 \(2,\)"
    ):
        store.add_max("m", 1, torch.ones(3))
    with pytest.raises(ValueError, match="stream 'm': sample 2 is not one of this rank's; give its global number"):
        store.add_max("m", 2, torch.ones(2))
    store.add_sum("s", 1, torch.ones(1))
    with pytest.raises(ValueError, match="stream 's': sample 3 after sample 1; add in the order of sample_ids"):
        store.add_sum("s", 3, torch.ones(1))
    with pytest.raises(TypeError, match=r"stream 'c': counts are torch.float32; give integers, or use add_sum"):
        store.add_count("c", 1, torch.ones(1))
    with pytest.raises(TypeError, match=r"stream 's': values are torch.int64; give floats, or use add_count"):
        store.add_sum("s", 1, torch.tensor([1]))
    store.add_scalar("l", 3, 1.0)
    with pytest.raises(ValueError, match="stream 'l': sample 3 has a scalar already; give one a sample"):
        store.add_scalar("l", 3, 1.0)


@pytest.mark.parametrize(
    ("ids", "count", "shards", "text"),
    [
        ([0, 1], 2, 6, "shards is 6; give a power of two"),
        ([0, 0], 2, 8, "a sample repeats in"),
        ([8, 0], 9, 8, "sample 0 comes after 8; increase within a shard"),
        ([2], 2, 8, "sample 2 lies outside 0 to 1; give global numbers"),
    ],
)
def test_samples_that_cannot_be_are_refused(ids, count, shards, text):
    with pytest.raises(ValueError, match=text):
        StatStore(ids, count, shards=shards)


def collectives(rank: int, streams: int) -> int:
    import torch.distributed as dist

    calls = 0
    for name in ("all_gather", "all_reduce", "broadcast"):
        original = getattr(dist, name)

        def counted(*args, _original=original, **kwargs):
            nonlocal calls
            calls += 1
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    own = list(range(rank, 16, 2))
    store = StatStore(own, 16)
    for i in own:
        for stream in range(streams):
            store.add_min(f"{stream}:min", i, torch.ones(4))
            store.add_max(f"{stream}:max", i, torch.ones(4))
            store.add_count(f"{stream}:count", i, torch.ones(1, dtype=torch.int64))
            store.add_sum(f"{stream}:sum", i, torch.ones(4))
    store.agree()
    return calls


def test_collectives_do_not_grow_with_streams(run_ranks):
    assert run_ranks(2, collectives, 20) == run_ranks(2, collectives, 200) == [5, 5]
