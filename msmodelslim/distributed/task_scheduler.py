"""Independent tasks, each done by one rank, its results on all: who does what follows from names and costs alone."""

import heapq
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed import watchdog, wire
from msmodelslim.distributed.failure import Catch, Failure, failure_of, first_of

Task = Callable[[], Mapping[str, Tensor]]


def assign(costs: Mapping[str, float], world_size: int, units: Sequence[Sequence[str]] = ()) -> dict[str, int]:
    """Which rank does which task: the most expensive first, each to the rank with the least work so far.

    Equal costs go by name and equal loads to the lower rank, so every rank computes the same answer.

    Args:
        costs: expected cost of each task, in any unit of work, 0 or more.
        world_size: number of ranks.
        units: tasks that one rank must do together, as they share what only that rank has; a task in none of them
            goes by itself. A unit costs as much as its tasks together, so there is no use in more ranks than units.

    Returns:
        Task → its rank.

    Raises:
        ValueError: no rank, a cost below 0, or a task of several units or without a cost.

    Source: Graham, Bounds on multiprocessing timing anomalies, 1969 (at most 4/3 of the best makespan).
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; give 1 or more")
    for name, cost in costs.items():
        if not cost >= 0:
            raise ValueError(f"the cost of {name!r} is {cost}; give 0 or more")
    unit_of: dict[str, str] = {}
    for unit in units:
        for name in unit:
            if name in unit_of or name not in costs:
                raise ValueError(f"{name!r} of a unit {'is in another one too' if name in unit_of else 'has no cost'}")
            unit_of[name] = min(unit)
    together: dict[str, float] = {}
    for name in sorted(costs):
        unit = unit_of.get(name, name)
        together[unit] = together.get(unit, 0.0) + costs[name]
    loads = [(0.0, rank) for rank in range(world_size)]
    owners = {}
    for unit in sorted(together, key=lambda name: (-together[name], name)):
        load, rank = heapq.heappop(loads)
        owners[unit] = rank
        heapq.heappush(loads, (load + together[unit], rank))
    return {name: owners[unit_of.get(name, name)] for name in sorted(costs)}


def run_tasks(
    tasks: Mapping[str, Task],
    costs: Mapping[str, float] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    owners: Mapping[str, int] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Run each task on one rank and give its tensors to all.

    Args:
        tasks: the same names on every rank, each a function that returns named tensors and uses no collective.
        costs: as in `assign`, the same on every rank.
        group: the ranks that share the work; all by default.
        device: where the results are put.
        owners: instead of costs, which rank does which task, by its place in the group; what `assign` gave before.

    Returns:
        Task name → its tensors, the same bits on every rank.

    Raises:
        ModelslimError: a task failed; the same error on every rank, the earliest one, with its rank.
        RankMismatchError: names, costs or owners differ over the ranks.
        ValueError: neither costs nor owners are given, or both; they lack a task; an owner is none of the ranks.
    """
    call = "run_tasks"
    where = wire.members(group, call)
    rank, size = (0, 1) if where is None else (where.rank, where.size)
    if costs is not None and owners is None:
        word, dealt = "costs", assign(costs, size)
    elif owners is not None and costs is None:
        word, dealt = "owners", dict(sorted(owners.items()))
    else:
        raise ValueError("run_tasks: give the costs of the tasks, or their owners")
    if tasks.keys() != dealt.keys():
        raise ValueError(f"tasks and {word} name different things: {sorted(tasks.keys() ^ dealt.keys())}")
    if where is not None:
        tables = wire.exchange(where, call, {"owners": dealt})
        wire.agree_on(where, call, "which rank does which task", [one["owners"] for one in tables])
    for name, owner in dealt.items():
        if not 0 <= owner < size:
            raise ValueError(f"the owner of task {name!r} is {owner}; give a place among the {size} ranks, from 0 on")
    own, failure = _run_own([name for name in sorted(tasks) if dealt[name] == rank], tasks, where)
    results = {name: {key: one.to(device) for key, one in found.items()} for name, found in own.items()}
    if where is not None:
        return _share(where, call, results, dealt, failure, device)
    if failure is not None:
        raise failure.error()
    return results


def _run_own(
    names: list[str], tasks: Mapping[str, Task], where: wire.Members | None
) -> tuple[dict[str, Mapping[str, Tensor]], Failure | None]:
    """The results of this rank's tasks up to the first that fails, and its failure."""
    results = {}
    for name in names:
        with Catch() as caught, wire.no_collectives(name):
            results[name] = tasks[name]()
        if caught.error is not None:
            at = watchdog.place()
            rank = 0 if where is None else where.ranks[where.rank]
            return {}, failure_of(caught.error, rank, watchdog.Place(at.layer, at.processor, f"task {name!r}"))
    return results, None


def _share(
    where: wire.Members,
    call: str,
    own: dict[str, dict[str, Tensor]],
    owners: dict[str, int],
    failure: Failure | None,
    device: torch.device | str,
) -> dict[str, dict[str, Tensor]]:
    shapes = {name: {key: (str(t.dtype), list(t.shape)) for key, t in found.items()} for name, found in own.items()}
    facts = {"results": shapes, "failure": None if failure is None else failure.plain()}
    tables = wire.exchange(where, f"{call} results", facts)
    first = first_of([Failure.from_plain(one["failure"]) for one in tables if one["failure"] is not None])
    if first is not None:
        raise first.error()
    results: dict[str, dict[str, Tensor]] = {}
    with watchdog.waiting(f"{call} at {wire.call_site()}"):
        for owner, table in enumerate(tables):
            flats = {
                (name, key): wire.as_bytes(own[name][key])
                if owner == where.rank
                else torch.empty(
                    torch.Size(shape).numel() * wire.dtype_named(dtype).itemsize, dtype=torch.uint8, device=device
                )
                for name, found in table["results"].items()
                for key, (dtype, shape) in found.items()
            }
            wire.broadcast_bytes(where, list(flats.values()), owner)
            for (name, key), flat in flats.items():
                dtype, shape = table["results"][name][key]
                results.setdefault(name, {})[key] = wire.from_bytes(flat, wire.dtype_named(dtype), shape)
    return {name: results.get(name, {}) for name in sorted(owners)}
