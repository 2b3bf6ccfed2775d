"""What ranks must agree on before statistics move: what each stream is, who holds which sample, who receives a sum.

Every check sees the facts of all ranks and gives the same answer on each, so all of them raise or none does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msmodelslim.distributed import wire

_SHOWN = 3  # mistakes an error lists


def check_streams(where: wire.Members, call: str, tables: list[dict[str, dict]], local: list[list[str]]) -> None:
    """Every stream means the same on all ranks that have it, or all ranks raise."""
    mistakes = []
    for name in sorted({name for table in tables for name in table}):
        for key in ("kind", "dtype", "shape"):
            values = [table[name][key] if name in table else None for table in tables]
            if len({str(value) for value in values if value is not None}) > 1:
                known = [value if value is not None else "nothing" for value in values]
                mistakes.append(f"{name!r}: {key} differs: {wire.by_rank(where, known)}")
        alone = [rank for rank, names in zip(where.ranks, local, strict=True) if name in names]
        if alone:
            mistakes.append(f"{name!r}: local_only on rank {alone[0]} and shared on others")
    if mistakes:
        raise wire.RankMismatchError(f"{call}: {len(mistakes)} streams disagree: {'; '.join(mistakes[:_SHOWN])}")


def check_dealt(where: wire.Members, call: str, dealt: list[dict[str, Any]]) -> None:
    """Every sample is on exactly one rank."""
    for key in ("samples", "shards"):
        wire.agree_on(where, call, f"number of {key}", [one[key] for one in dealt])
    holder: dict[int, int] = {}
    for rank, one in zip(where.ranks, dealt, strict=True):
        for sample in _expand(one["ids"]):
            if sample in holder:
                raise wire.RankMismatchError(
                    f"{call}: sample {sample} is on ranks {holder[sample]} and {rank}; deal each sample once"
                )
            holder[sample] = rank
    missing = [sample for sample in range(dealt[0]["samples"]) if sample not in holder]
    if missing:
        raise wire.RankMismatchError(
            f"{call}: no rank has sample {missing[0]} ({len(missing)} are missing); deal each once"
        )


def resolve_owners(
    where: wire.Members | None,
    call: str,
    owners: list[dict[str, int]],
    sums: Sequence[str],
    local: list[list[str]],
) -> dict[str, int]:
    """Float sum → the one member that receives it; sums that all receive are left out.

    Args:
        owners: what each rank was given: stream, or module of streams → place in the group.
        sums: float sums of all ranks together.
        local: names of each rank's local_only streams, of which owners are ignored.

    Raises:
        RankMismatchError: an owner is not the same on every rank.
        ValueError: an owner is no place in the group, or a name fits no float sum; the same on every rank.
    """
    aside = {part for names in local for name in names for part in (name, _module(name))}
    named = {name: [one.get(name) for one in owners] for name in sorted(set().union(*owners) - aside)}
    if where is not None:
        for name, values in named.items():
            wire.agree_on(where, call, "owner", values, name=name)
    size = 1 if where is None else where.size
    known = {part for name in sums for part in (name, _module(name))}
    found = {}
    for name, (owner, *_) in named.items():
        assert owner is not None, f"{name!r} has no owner on any rank"
        if not 0 <= owner < size:
            raise ValueError(
                f"{call}: the owner of {name!r} is {owner}; give a place among the {size} ranks, from 0 on"
            )
        if name not in known:
            raise ValueError(
                f"{call}: owners names {name!r}, which is no float sum; name a sum's stream, or its module"
            )
        found[name] = owner
    chosen = {name: found.get(name, found.get(_module(name))) for name in sums}
    return {name: owner for name, owner in chosen.items() if owner is not None}


def compact(ids: Mapping[int, int]) -> list[int] | dict[str, int]:
    """Sample numbers as they are, or as a range where they are one: short on the wire."""
    listed = sorted(ids)
    if len(listed) > 1:
        step = listed[1] - listed[0]
        if listed == list(range(listed[0], listed[-1] + 1, step)):
            return {"start": listed[0], "stop": listed[-1] + 1, "step": step}
    return listed


def _expand(ids: list[int] | dict[str, int]) -> Sequence[int]:
    return range(ids["start"], ids["stop"], ids["step"]) if isinstance(ids, dict) else ids


def _module(stream: str) -> str:
    return stream.partition(":")[0]
