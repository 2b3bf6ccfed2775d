"""How the statistics of all ranks become one: facts first, then one flat bucket a kind of reduction.

Extrema travel as integers in the order of the floats (one minimum, with maxima turned round), counts as one int64 sum,
partial sums and scalars as bytes: to every rank, or a sum that one rank owns to that rank alone. Everything is combined
by the same arithmetic when there is only one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed import watchdog, wire
from msmodelslim.distributed.dist_ops import from_ordered, to_ordered
from msmodelslim.distributed.shard_tree import Node, Parts, ShardTree, tree_sum
from msmodelslim.distributed.stat_checks import check_dealt, check_streams, compact, resolve_owners

_ROUND_ELEMENTS = 1 << 22  # elements of partial sums that are combined at a time, over all ranks


class StatKind(StrEnum):
    """What a stream measures."""

    MIN = "min"
    MAX = "max"
    COUNT = "count"
    SUM = "sum"
    SCALAR = "scalar"


_EXTREMA = (StatKind.MIN, StatKind.MAX)
_Batch = list[tuple[str, int, int]]  # stream, start, stop: elements that travel together


@dataclass(frozen=True)
class Stat:
    """One stream after agreement. Read-only: processors share it.

    Args:
        kind: what was measured.
        value: the extremum, count (int64) or sum in the stream's shape; for scalars float64, one a sample in global
            order; None when no rank saw the stream, and where another rank owns the sum.
        samples: how many samples contributed, over all ranks, the same on every rank; 0 is "never seen".
        sample_ids: for scalars, the global numbers of the samples; else empty.
        owner: of a sum, the place of the one rank that holds `value`; None when every rank does.
    """

    kind: StatKind
    value: Tensor | None
    samples: int
    sample_ids: tuple[int, ...] = ()
    owner: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether there is a value, on another rank."""
        return self.value is None and self.samples > 0


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
    owners: Mapping[str, int] | None = None,
) -> dict[str, Stat]:
    """The streams of all members, or of this rank alone where there are none; uses up the partial sums of `own`."""
    tables = [{name: stream.facts() for name, stream in own.items()}]
    locals_, given = [list(local)], [dict(owners or {})]
    if where is not None:
        dealt = {"samples": tree.sample_count, "shards": tree.shards, "ids": compact(tree.place)}
        facts = {"streams": tables[0], "local": locals_[0], "dealt": dealt, "owners": given[0]}
        found = wire.exchange(where, call, facts)
        tables, locals_, given = ([one[key] for one in found] for key in ("streams", "local", "owners"))
        check_dealt(where, call, [one["dealt"] for one in found])
        check_streams(where, call, tables, locals_)
    outlines, unseen = _union(tables)
    kinds = {name: one.kind for name, one in outlines.items()} | unseen
    sums = [name for name, kind in kinds.items() if kind is StatKind.SUM]
    owner = resolve_owners(where, call, given, sums, locals_)
    values = _extrema(where, own, outlines, device) | _counts(where, own, outlines, device)
    values |= _sums(where, own, outlines, owner, tree.shards, device)
    stats = {
        name: Stat(one.kind, values.get(name), sum(one.samples), owner=owner.get(name))
        for name, one in outlines.items()
        if one.kind is not StatKind.SCALAR
    }
    never = {name: Stat(kind, None, 0, owner=owner.get(name)) for name, kind in unseen.items()}
    return stats | _scalars(where, own, outlines, device) | never


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
    owner: Mapping[str, int],
    shards: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Element ranges of the streams, as many at a time as fit a round, each added up by the tree where it is wanted.

    Ranges without an owner go to every rank, the others to their owner alone: all owners take part in one round.
    """
    sums = {name: one for name, one in outlines.items() if one.kind is StatKind.SUM}
    here, size = (0, 1) if where is None else (where.rank, where.size)
    totals = {
        name: torch.empty(one.shape.numel(), dtype=one.dtype, device=device)
        for name, one in sums.items()
        if owner.get(name, here) == here
    }
    flats = {name: {node: part.reshape(-1) for node, part in own[name].parts.items()} for name in sums if name in own}

    def pieces(batch: _Batch) -> list[Tensor]:
        """What this rank gives."""
        return [
            wire.as_bytes(flats[name][node][start:stop])
            for name, start, stop in batch
            if name in flats
            for node in sorted(flats[name])
        ]

    def sizes(batch: _Batch) -> list[list[int]]:
        """Bytes of what each rank gives."""
        return [
            [(stop - start) * sums[name].dtype.itemsize for name, start, stop in batch for _ in sums[name].nodes[rank]]
            for rank in range(size)
        ]

    def add_up(batch: _Batch, gathered: list[list[Tensor]]) -> None:
        rows = [iter(row) for row in gathered]
        for name, start, stop in batch:
            parts = {
                node: next(rows[rank]).view(sums[name].dtype)
                for rank, nodes in enumerate(sums[name].nodes)
                for node in nodes
            }
            total = tree_sum(parts, shards)
            assert total is not None, f"{name} is listed without partial sums"
            totals[name][start:stop] = total

    if where is not None and owner:
        room = max(1, _ROUND_ELEMENTS // len(set(owner.values())))
        queues = [
            _rounds({name: one for name, one in sums.items() if owner.get(name) == member}, room)
            for member in range(size)
        ]
        for batches in zip_longest(*queues, fillvalue=[]):
            outgoing = [pieces(batch) for batch in batches]
            add_up(batches[here], wire.deliver_bytes(where, outgoing, sizes(batches[here]), device))
    to_all = {name: one for name, one in sums.items() if where is None or name not in owner}
    for batch in _rounds(to_all, _ROUND_ELEMENTS):
        add_up(batch, wire.gather_bytes(where, pieces(batch), sizes(batch), device))
    return {name: total.reshape(sums[name].shape) for name, total in totals.items()}


def _rounds(sums: dict[str, _Outline], most: int) -> list[_Batch]:
    """(stream, start, stop) batches of at most `most` elements, counted over all partial sums."""
    batches: list[_Batch] = [[]]
    room = most
    for name, one in sums.items():
        partials = sum(map(len, one.nodes))
        start, total = 0, one.shape.numel()
        while start < total:
            if room < min(partials, most):
                batches.append([])
                room = most
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
