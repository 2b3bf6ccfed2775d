"""Which rank writes which tensor: decided from names and sizes alone, the same on every rank.

The unit is a module: all tensors of one are written together. What every rank holds is balanced by size, one layer at a
time, so that no rank waits long for another's writing; what only some ranks hold is written by the lowest of them.
"""

from collections.abc import Callable, Mapping, Sequence

from msmodelslim.distributed.task_scheduler import assign
from msmodelslim.saver.shards import TensorSpec


def module_of(tensor_name: str) -> str:
    """The module a tensor belongs to."""
    return tensor_name.rpartition(".")[0]


def unite(by_rank: Sequence[Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """Everything that any rank will write.

    Raises:
        ValueError: two ranks plan one tensor differently; names both.
    """
    united: dict[str, TensorSpec] = {}
    planner: dict[str, int] = {}
    for rank, specs in enumerate(by_rank):
        for name, spec in specs.items():
            if united.setdefault(name, spec) != spec:
                raise ValueError(f"{name} is {united[name]} on rank {planner[name]} and {spec} on rank {rank}")
            planner.setdefault(name, rank)
    return united


def owners(by_rank: Sequence[Mapping[str, TensorSpec]], layer_of: Callable[[str], str]) -> dict[str, int]:
    """Module → the rank that writes its tensors.

    Args:
        by_rank: what each rank holds.
        layer_of: module → the layer it is part of, "" outside all layers.
    """
    bytes_of: dict[str, int] = {}
    for name, spec in unite(by_rank).items():
        bytes_of[module_of(name)] = bytes_of.get(module_of(name), 0) + spec.nbytes
    holders = [{module_of(name) for name in specs} for specs in by_rank]
    found: dict[str, int] = {}
    shared: dict[str, dict[str, float]] = {}
    for module, size in bytes_of.items():
        ranks = [rank for rank, held in enumerate(holders) if module in held]
        if len(ranks) == len(by_rank):
            shared.setdefault(layer_of(module), {})[module] = float(size)
        else:
            found[module] = ranks[0]
    for costs in shared.values():
        found |= assign(costs, len(by_rank))
    return found
