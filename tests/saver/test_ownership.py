"""Who writes what on several ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msmodelslim.saver.ownership import module_of, owners, unite
from msmodelslim.saver.shards import TensorSpec


def spec(size: int) -> TensorSpec:
    return TensorSpec(torch.int8, (size,))


def layer_of(module: str) -> str:
    return module.rpartition(".")[0]


@given(st.dictionaries(st.sampled_from([f"l{i}.m{j}.weight" for i in range(3) for j in range(8)]), st.integers(0, 99)))
def test_every_module_has_exactly_one_owner_among_those_that_hold_it(sizes: dict[str, int]) -> None:
    everything = {name: spec(size) for name, size in sizes.items()}
    shares = [
        {n: s for n, s in everything.items() if n.startswith("l0") or sum(map(ord, n)) % 3 == rank} for rank in range(3)
    ]
    found = owners(shares, layer_of)
    assert set(found) == {module_of(name) for share in shares for name in share}
    for name in everything:
        if any(name in share for share in shares):
            assert name in shares[found[module_of(name)]]


def test_shared_modules_of_one_layer_are_balanced_by_bytes() -> None:
    sizes = {"l0.a.weight": 60, "l0.b.weight": 40, "l0.c.weight": 30, "l0.c.bias": 2, "l0.d.weight": 28}
    share = {name: spec(size) for name, size in sizes.items()}
    found = owners([share, share], layer_of)
    loads = [sum(size for name, size in sizes.items() if found[module_of(name)] == rank) for rank in range(2)]
    assert sorted(loads) == [72, 88]  # 60 + 28 against 40 + 32


def test_a_module_on_one_rank_alone_is_written_there() -> None:
    shared = {"l0.norm.weight": spec(4)}
    by_rank = [shared | {"l0.experts.0.weight": spec(9)}, shared | {"l0.experts.1.weight": spec(9)}]
    assert {n: r for n, r in owners(by_rank, layer_of).items() if "experts" in n} == {
        "l0.experts.0": 0,
        "l0.experts.1": 1,
    }


def test_ranks_that_plan_one_tensor_differently_are_named() -> None:
    with pytest.raises(ValueError, match=r"a\.weight is int8 \[3\] on rank 0 and int8 \[4\] on rank 1"):
        unite([{"a.weight": spec(3)}, {"a.weight": spec(4)}])
