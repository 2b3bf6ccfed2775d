import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from msmodelslim.distributed import (
    DistHelper,
    RankMismatchError,
    StaleTopologyError,
    sync_base_operation,
    sync_gather_tensor_lists,
    sync_gather_tensors,
)


def layer(experts: tuple[int, ...]) -> nn.Module:
    """A block whose expert list keeps its length, with None where another rank holds the expert."""
    block = nn.Module()
    block.norm = nn.LayerNorm(2)
    block.mlp = nn.Module()
    block.mlp.experts = nn.ModuleDict({str(i): nn.Linear(2, 2, bias=False) for i in experts})
    return block


EXPERTS = ((0, 1), (1, 2), (1,))  # 1 everywhere, 0 and 2 on one rank each


def ask(rank: int, prefix: str) -> dict:
    helper = DistHelper(layer(EXPERTS[rank]), prefix)
    full = [
        ".".join(filter(None, (prefix, name)))
        for name in ("norm", "mlp.experts.0", "mlp.experts.1", "mlp.experts.2", "x")
    ]
    model = helper._model
    names = {id(module): name for name, module in model.named_modules(prefix=prefix)}
    return {
        "shared": [helper.is_shared(name) for name in full],
        "local": [helper.is_local(name) for name in full],
        "local_only": [helper.is_local_only(name) for name in full],
        "all": [helper.is_all(name) for name in full],
        "shared_modules": [names[id(one)] for one in helper.shared_modules()],
        "local_modules": [names[id(one)] for one in helper.local_modules()],
        "local_only_modules": [names[id(one)] for one in helper.local_only_modules()],
        "all_modules": [names[id(one)] for one in helper.all_modules()],
        "slice": helper.get_shared_modules_slice(),
        "prefixed": helper.get_shared_modules_slice("top"),
        "rank": helper.get_rank(),
    }


@pytest.mark.parametrize("prefix", ["", "model.layers.3"])
def test_modules_are_classified_by_who_holds_them(run_ranks, prefix):
    def full(*names: str) -> list[str]:
        return [".".join(filter(None, (prefix, name))) for name in names]

    found = run_ranks(3, ask, prefix)
    shared = sorted(full("", "mlp", "mlp.experts", "mlp.experts.1", "norm"))
    for rank, one in enumerate(found):
        own = [str(expert) for expert in EXPERTS[rank]]
        assert one["shared"] == [True, False, True, False, False]
        assert one["local"] == [True, "0" in own, True, "2" in own, False]
        assert one["local_only"] == [False, "0" in own, False, "2" in own, False]
        assert one["all"] == [True, True, True, True, False]
        assert one["shared_modules"] == shared
        assert one["local_only_modules"] == full(*(f"mlp.experts.{i}" for i in own if i != "1"))
        assert one["local_modules"] == one["all_modules"] == sorted(shared + one["local_only_modules"])
        assert one["slice"] == shared[rank::3]
        assert one["prefixed"] == [".".join(filter(None, ("top", name))) for name in shared[rank::3]]
        assert one["rank"] == rank


def test_without_a_process_group_every_module_is_shared():
    helper = DistHelper(layer((0, 1)), "a")
    assert helper.is_shared("a.mlp.experts.0") and not helper.is_local_only("a.mlp.experts.0")
    assert helper.get_shared_modules_slice() == sorted(name for name, _ in layer((0, 1)).named_modules(prefix="a"))
    assert helper.get_rank() == 0


QUERIES = {
    "is_shared": lambda helper: helper.is_shared("b.norm"),
    "is_local": lambda helper: helper.is_local("b.norm"),
    "is_local_only": lambda helper: helper.is_local_only("b.norm"),
    "is_all": lambda helper: helper.is_all("b.norm"),
    "require_shared": lambda helper: helper.require_shared("b.norm"),
    "shared_modules": lambda helper: helper.shared_modules(),
    "local_modules": lambda helper: helper.local_modules(),
    "local_only_modules": lambda helper: helper.local_only_modules(),
    "all_modules": lambda helper: helper.all_modules(),
    "get_shared_modules_slice": lambda helper: helper.get_shared_modules_slice(),
}


def insert(block: nn.Module) -> None:
    block.mlp.experts["1"].observer = nn.Identity()


def remove(block: nn.Module) -> None:
    del block.mlp.experts["1"]


def replace(block: nn.Module) -> None:
    block.mlp.experts["1"] = nn.Identity()


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (insert, "added 'b.mlp.experts.1.observer'"),
        (remove, "removed 'b.mlp.experts.1'"),
        (replace, "replaced 'b.mlp.experts.1'"),
    ],
)
def test_every_query_after_a_change_raises_and_names_it(query, change, text):
    block = layer((0, 1))
    helper = DistHelper(block, "b")
    QUERIES[query](helper)
    change(block)
    with pytest.raises(
        StaleTopologyError, match=f"the module tree below 'b' changed .*: {text}; make the DistHelper after"
    ):
        QUERIES[query](helper)


def test_many_changes_are_counted_and_the_first_named():
    block = layer(tuple(range(9)))
    helper = DistHelper(block)
    block.mlp.experts.clear()
    with pytest.raises(
        StaleTopologyError, match=r"below 'the root' .*removed 'mlp.experts.0', .*'mlp.experts.2' and 6 more"
    ):
        helper.is_shared("norm")


def test_a_module_under_two_names_is_no_change():
    block = layer((0,))
    block.alias = block.norm
    helper = DistHelper(block)
    assert helper.is_shared("norm") or helper.is_shared("alias")
    assert not helper.is_shared("alias.missing")


def test_a_replaced_module_is_not_kept_alive():
    block = layer((0,))
    helper = DistHelper(block)
    gone = weakref.ref(block.norm)
    block.norm = nn.Identity()
    assert gone() is None
    with pytest.raises(StaleTopologyError):
        helper.is_shared("norm")


def test_asking_about_each_of_20000_modules_stays_cheap_and_finds_a_change():
    block = layer(tuple(range(20_000)))
    helper = DistHelper(block)
    start = time.process_time()
    for i in range(0, 20_000, 10):
        helper.is_shared(f"mlp.experts.{i}")
    assert time.process_time() - start < 4  # a whole walk a query would take 20 s
    block.mlp.experts["77"].observer = nn.Identity()
    with pytest.raises(StaleTopologyError, match=r"added 'mlp.experts.77.observer'"):
        for _ in range(40):  # at most as many queries as the tree has windows
            helper.is_shared("norm")


def guard(rank: int, call: str) -> None:
    helper = DistHelper(layer(EXPERTS[rank]), "b")
    own = torch.ones(1)
    name = "b.mlp.experts.2"
    if call == "unknown":
        helper.require_shared("b.nothing")
    elif call == "sync_base_operation":
        sync_base_operation(own, "max", name=name, helper=helper)
    elif call == "sync_gather_tensors":
        sync_gather_tensors(own, name=name, helper=helper)
    else:
        sync_gather_tensor_lists([own], name=name, helper=helper)


@pytest.mark.parametrize("call", ["sync_base_operation", "sync_gather_tensors", "sync_gather_tensor_lists"])
def test_a_collective_about_a_local_only_module_raises_at_once(run_ranks, call):
    for error in run_ranks.errors(3, guard, call, timeout_s=20):
        assert isinstance(error, ValueError)
        assert "'b.mlp.experts.2' is local_only: rank 1 of 3 hold it" in str(error)


def test_a_name_that_no_rank_has_is_refused(run_ranks):
    for error in run_ranks.errors(2, guard, "unknown"):
        assert "'b.nothing' is not a module of this DistHelper (prefix 'b'); write its full name" in str(error)


def gather(rank: int) -> list[list[int]]:
    pair = dist.new_group([0, 2])
    found = DistHelper.gather_variable_shapes(torch.full((rank, 2), rank))
    if rank == 1:
        return [list(one.shape) for one in found]
    helper = DistHelper(layer(EXPERTS[rank]), group=pair)
    assert (
        helper.is_shared("mlp.experts.1")
        and not helper.is_shared("mlp.experts.0")
        and not helper.is_all("mlp.experts.2")
    )
    return [list(one.shape) for one in found]


def test_variable_shapes_are_gathered_and_a_group_is_compared_alone(run_ranks):
    assert run_ranks(3, gather) == [[[0, 2], [1, 2], [2, 2]]] * 3


def out_of_step(rank: int) -> None:
    if rank == 0:
        DistHelper(layer((0,)))
    else:
        sync_base_operation(torch.ones(1), "max")


def test_a_helper_made_on_some_ranks_only_is_noticed(run_ranks):
    for error in run_ranks.errors(2, out_of_step):
        assert isinstance(error, RankMismatchError)
        assert "DistHelper (at test_dist_helper.py" in str(error) and "sync_base_operation" in str(error)
