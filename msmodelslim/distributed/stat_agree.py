"""How the statistics of all ranks become one: facts first, then one flat bucket a kind of reduction.

Extrema travel as integers in the order of the floats (one minimum, with maxima turned round), counts as one int64 sum,
partial sums and scalars as bytes. Everything is combined by the same arithmetic when there is only one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed import watchdog, wire
from msmodelslim.distributed.dist_ops import from_ordered, to_ordered
from msmodelslim.distributed.shard_tree import Node, Parts, ShardTree, tree_sum

_ROUND_ELEMENTS = 1 << 22  # elements of partial sums that are combined at a time, over all ranks
_SHOWN = 3  # mistakes an error lists


class StatKind(StrEnum):
    """What a stream measures."""

    MIN = "min"
    MAX = "max"
    COUNT = "count"
    SUM = "sum"
    SCALAR = "scalar"


_EXTREMA = (StatKind.MIN, StatKind.MAX)


@dataclass(frozen=True)
class Stat:
    """One stream after agreement. Read-only: processors share it.

    Args:
        kind: what was measured.
        value: the extremum, count (int64) or sum in the stream's shape; for scalars float64, one a sample in global
            order; None when no rank saw the stream.
        samples: how many samples contributed, over all ranks; 0 is "never seen".
        sample_ids: for scalars, the global numbers of the samples; else empty.
    """

    kind: StatKind
    value: Tensor | None
    samples: int
    sample_ids: tuple[int, ...] = ()


@dataclass
class Stream:
    """What one rank has accumulated of one stream.

    Args:
        kind: what is measured.
        value: of an extremum or a count.
        parts: of a sum, the finished samples by node of the tree.
        pending: of a sum, the partial of the sample that was added last.
        scalars: sample → number.
        samples: how many samples contributed.
        latest: the sample that was added last.
        form: type and shape of what is here; None when nothing is.
    """

    kind: StatKind
    value: Tensor | None = None
    parts: Parts = field(default_factory=dict)
    pending: Tensor | None = None
    scalars: dict[int, float] = field(default_factory=dict)
    samples: int = 0
    latest: int | None = None
    form: tuple[torch.dtype, torch.Size] | None = None

    def facts(self) -> dict[str, Any]:
        dtype, shape = self.form or (None, None)
        return {
            "kind": self.kind,
            "dtype": None if dtype is None else str(dtype),
            "shape": None if shape is None else list(shape),
            "samples": self.samples,
            "nodes": sorted(self.parts),
        }


@dataclass(frozen=True)
class _Outline:
    """What is known of one stream over all ranks, before its data; one entry a rank in the lists."""

    kind: StatKind
    dtype: torch.dtype
    shape: torch.Size
    samples: list[int]
    nodes: list[list[Node]]


def combine(
    where: wire.Members | None,
    call: str,
    own: Mapping[str, Stream],
    tree: ShardTree,
    device: torch.device,
    local: Sequence[str] = (),
) -> dict[str, Stat]:
    """The streams of all members, or of this rank alone where there are none; uses up the partial sums of `own`."""
    tables = [{name: stream.facts() for name, stream in own.items()}]
    if where is not None:
        dealt = {"samples": tree.sample_count, "shards": tree.shards, "ids": _compact(tree.place)}
        found = wire.exchange(where, call, {"streams": tables[0], "local": list(local), "dealt": dealt})
        tables = [one["streams"] for one in found]
        _check_dealt(where, call, [one["dealt"] for one in found])
        _check_streams(where, call, tables, [one["local"] for one in found])
    outlines, unseen = _union(tables)
    values = _extrema(where, own, outlines, device) | _counts(where, own, outlines, device)
    values |= _sums(where, own, outlines, tree.shards, device)
    stats = {name: Stat(one.kind, values[name], sum(one.samples)) for name, one in outlines.items() if name in values}
    return stats | _scalars(where, own, outlines, device) | {name: Stat(kind, None, 0) for name, kind in unseen.items()}


def _union(tables: list[dict[str, dict]]) -> tuple[dict[str, _Outline], dict[str, StatKind]]:
    """Streams that some rank has data of, and those that are only declared; sorted by name."""
    outlines, unseen = {}, {}
    for name in sorted({name for table in tables for name in table}):
        rows = [table.get(name) for table in tables]
        known = next((row for row in rows if row and row["dtype"] is not None), None)
        if known is None:
            unseen[name] = StatKind(next(row for row in rows if row)["kind"])
            continue
        outlines[name] = _Outline(
            StatKind(known["kind"]),
            wire.dtype_named(known["dtype"]),
            torch.Size(known["shape"]),
            [row["samples"] if row else 0 for row in rows],
            [[(level, j) for level, j in row["nodes"]] if row else [] for row in rows],
        )
    return outlines, unseen


def _extrema(
    where: wire.Members | None, own: Mapping[str, Stream], outlines: dict[str, _Outline], device: torch.device
) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for carrier in (torch.int32, torch.int64):
        names = [
            name for name, one in outlines.items() if one.kind in _EXTREMA and carrier.itemsize == one.dtype.itemsize
        ]
        flats = [_encode(own.get(name), outlines[name], carrier, device) for name in names]
        for name, flat in zip(names, _all_reduce(where, flats, dist.ReduceOp.MIN), strict=True):
            values[name] = _decode(flat, outlines[name])
    return values


def _encode(stream: Stream | None, outline: _Outline, carrier: torch.dtype, device: torch.device) -> Tensor:
    """Flat integers whose minimum over ranks is the extremum; the largest integer for a rank without data."""
    info = torch.iinfo(carrier)
    if stream is None or stream.value is None:
        return torch.full((outline.shape.numel(),), info.max, dtype=carrier, device=device)
    value = stream.value.reshape(-1)
    ordered = to_ordered(value) if value.is_floating_point() else value
    if outline.kind is StatKind.MAX:
        return ordered.bitwise_not()  # turns the order round, and NaN from the largest into the smallest
    return torch.where(value.isnan(), info.min, ordered) if value.is_floating_point() else ordered


def _decode(flat: Tensor, outline: _Outline) -> Tensor:
    ordered = flat.bitwise_not() if outline.kind is StatKind.MAX else flat.clone()
    value = from_ordered(ordered, outline.dtype) if outline.dtype.is_floating_point else ordered
    return value.reshape(outline.shape)


def _counts(
    where: wire.Members | None, own: Mapping[str, Stream], outlines: dict[str, _Outline], device: torch.device
) -> dict[str, Tensor]:
    names = [name for name, one in outlines.items() if one.kind is StatKind.COUNT]
    flats = []
    for name in names:
        value = own[name].value if name in own else None
        zeros = torch.zeros(outlines[name].shape.numel(), dtype=torch.int64, device=device)
        flats.append(zeros if value is None else value.reshape(-1))
    sums = _all_reduce(where, flats, dist.ReduceOp.SUM)
    return {name: flat.clone().reshape(outlines[name].shape) for name, flat in zip(names, sums, strict=True)}


def _all_reduce(where: wire.Members | None, flats: list[Tensor], op: dist.ReduceOp.RedOpType) -> list[Tensor]:
    """All flat tensors, of one type, in one bucket."""
    if where is None or not sum(flat.numel() for flat in flats):
        return flats
    bucket = torch.cat(flats).to(where.device)
    watchdog.count_sent(bucket.nbytes)
    dist.all_reduce(bucket, op, group=where.group)
    return list(bucket.to(flats[0].device).split([flat.numel() for flat in flats]))


def _sums(
    where: wire.Members | None,
    own: Mapping[str, Stream],
    outlines: dict[str, _Outline],
    shards: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Element ranges of the streams, as many at a time as fit a round; each is added up by the tree on every rank."""
    sums = {name: one for name, one in outlines.items() if one.kind is StatKind.SUM}
    totals = {name: torch.empty(one.shape.numel(), dtype=one.dtype, device=device) for name, one in sums.items()}
    flats = {name: {node: part.reshape(-1) for node, part in own[name].parts.items()} for name in sums if name in own}
    for batch in _rounds(sums):
        pieces = [
            wire.as_bytes(flats[name][node][start:stop])
            for name, start, stop in batch
            if name in flats
            for node in sorted(flats[name])
        ]
        sizes = [
            [(stop - start) * sums[name].dtype.itemsize for name, start, stop in batch for _ in sums[name].nodes[rank]]
            for rank in range(1 if where is None else where.size)
        ]
        gathered = [iter(row) for row in wire.gather_bytes(where, pieces, sizes, device)]
        for name, start, stop in batch:
            parts = {
                node: next(gathered[rank]).view(sums[name].dtype)
                for rank, nodes in enumerate(sums[name].nodes)
                for node in nodes
            }
            total = tree_sum(parts, shards)
            assert total is not None, f"{name} is listed without partial sums"
            totals[name][start:stop] = total
    return {name: total.reshape(sums[name].shape) for name, total in totals.items()}


def _rounds(sums: dict[str, _Outline]) -> list[list[tuple[str, int, int]]]:
    """(stream, start, stop) batches of at most `_ROUND_ELEMENTS` elements, counted over all partial sums."""
    batches: list[list[tuple[str, int, int]]] = [[]]
    room = _ROUND_ELEMENTS
    for name, one in sums.items():
        partials = sum(map(len, one.nodes))
        start, total = 0, one.shape.numel()
        while start < total:
            if room < min(partials, _ROUND_ELEMENTS):
                batches.append([])
                room = _ROUND_ELEMENTS
            stop = min(total, start + max(1, room // partials))
            batches[-1].append((name, start, stop))
            room -= (stop - start) * partials
            start = stop
    return batches if batches[-1] else batches[:-1]


def _scalars(
    where: wire.Members | None, own: Mapping[str, Stream], outlines: dict[str, _Outline], device: torch.device
) -> dict[str, Stat]:
    names = [name for name, one in outlines.items() if one.kind is StatKind.SCALAR]
    if not names:
        return {}
    held = [item for name in names if name in own for item in own[name].scalars.items()]
    ids = torch.tensor([sample for sample, _ in held], dtype=torch.int64)
    numbers = torch.tensor([number for _, number in held], dtype=torch.float64)
    sizes = [
        [8 * sum(outlines[name].samples[rank] for name in names)] * 2
        for rank in range(1 if where is None else where.size)
    ]
    gathered = wire.gather_bytes(where, [wire.as_bytes(ids), wire.as_bytes(numbers)], sizes, torch.device("cpu"))
    rows = [zip(one.view(torch.int64).tolist(), two.view(torch.float64).tolist(), strict=True) for one, two in gathered]
    stats = {}
    for name in names:
        pairs = sorted(next(rows[rank]) for rank, count in enumerate(outlines[name].samples) for _ in range(count))
        value = torch.tensor([number for _, number in pairs], dtype=torch.float64, device=device)
        stats[name] = Stat(StatKind.SCALAR, value, len(pairs), tuple(sample for sample, _ in pairs))
    return stats


def _check_streams(where: wire.Members, call: str, tables: list[dict[str, dict]], local: list[list[str]]) -> None:
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


def _check_dealt(where: wire.Members, call: str, dealt: list[dict[str, Any]]) -> None:
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


def _compact(ids: Mapping[int, int]) -> list[int] | dict[str, int]:
    """Sample numbers as they are, or as a range where they are one: short on the wire."""
    listed = sorted(ids)
    if len(listed) > 1:
        step = listed[1] - listed[0]
        if listed == list(range(listed[0], listed[-1] + 1, step)):
            return {"start": listed[0], "stop": listed[-1] + 1, "step": step}
    return listed


def _expand(ids: list[int] | dict[str, int]) -> Sequence[int]:
    return range(ids["start"], ids["stop"], ids["step"]) if isinstance(ids, dict) else ids
