"""How ranks talk: first facts, as JSON, so that every rank sees every disagreement; then raw bytes, in bounded buffers.

Every collective of this package begins with `exchange`. Two ranks that reached different calls, or the same call with
different arguments, therefore meet there and raise the same error, instead of mixing up each other's tensors.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed import watchdog
from msmodelslim.errors import UnsupportedError

_HEADER_BYTES = 512  # facts up to here need one collective, longer ones a second
_ROUND_BYTES = 64 << 20  # what all ranks together receive in one round
_LENGTH_BYTES = 4
_PACKAGE = str(Path(__file__).parent)

_owned_task = ""  # the task only this rank runs just now, see `no_collectives`


class RankMismatchError(ValueError):
    """Ranks came to one collective with different calls or arguments; raised with the same text on every rank."""


@dataclass(frozen=True)
class Members:
    """The ranks of one process group.

    Args:
        group: what torch calls the group; None is all ranks.
        ranks: their global numbers, in the order of the group.
        rank: the place of this process among them.
        device: where tensors must lie for the group's backend.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.ranks)


def members(group: dist.ProcessGroup | None, call: str) -> Members | None:
    """The group's ranks, or None where there is nobody to talk to: no process group, or a group of one.

    Raises:
        ValueError: a group is given although torch.distributed is not initialised, or this rank is not in it.
        RuntimeError: this rank is inside a task that no other rank runs, so nobody would answer.
    """
    if _owned_task:
        raise RuntimeError(
            f"{call} at {call_site()} inside task {_owned_task!r}, which only this rank runs: the others would never "
            f"answer; communicate before or after the task"
        )
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError(f"{call}: a group is given, but there is no process group; call setup_distributed first")
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{call}: rank {dist.get_rank()} is not in the group of ranks {list(ranks)}")
    if len(ranks) == 1:
        return None
    # gloo moves host memory; every other backend belongs to the machine's accelerator.
    on_host = dist.get_backend(group) == dist.Backend.GLOO
    accelerator = None if on_host else torch.accelerator.current_accelerator()
    if accelerator is None:
        return Members(group, ranks, rank, torch.device("cpu"))
    return Members(group, ranks, rank, torch.device(accelerator.type, torch.accelerator.current_device_index()))


@contextmanager
def no_collectives(task: str) -> Iterator[None]:
    """While it lasts, a collective of this package raises instead of waiting for ranks that will never come."""
    global _owned_task
    before, _owned_task = _owned_task, task
    try:
        yield
    finally:
        _owned_task = before


def call_site() -> str:
    """File and line that called into this package: "linear_quant.py:120"."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def by_rank(where: Members, values: Sequence[Any]) -> str:
    """Who holds what, for messages: "float32 on ranks 0, 2; float16 on rank 1"."""
    holders: dict[str, list[int]] = {}
    for rank, value in zip(where.ranks, values, strict=True):
        holders.setdefault(str(value), []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in holders.items()
    )


def exchange(where: Members, call: str, facts: dict[str, Any], *, problem: str = "") -> list[dict[str, Any]]:
    """Every rank's `facts` (plain data), in the order of the group. One small collective; two when facts are long.

    Args:
        call: name of the public function, the same on every rank.
        problem: why this rank cannot go on; then no rank does.

    Raises:
        RankMismatchError: ranks are in different calls; names each call and its line.
        UnsupportedError: a rank has a problem.
    """
    site = call_site()
    payload = json.dumps({"call": call, "site": site, "problem": problem, "facts": facts}).encode()
    with watchdog.waiting(f"{call} at {site}"):
        heads = _all_gather(where, _frame(payload, _HEADER_BYTES))
        lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
        if max(lengths) > _HEADER_BYTES - _LENGTH_BYTES:
            heads = _all_gather(where, _frame(payload, max(lengths) + _LENGTH_BYTES))
    found = [json.loads(head[_LENGTH_BYTES : _LENGTH_BYTES + n]) for head, n in zip(heads, lengths, strict=True)]
    calls = [f"{one['call']} (at {one['site']})" for one in found]
    if len({one["call"] for one in found}) > 1:
        raise RankMismatchError(f"ranks are in different collectives: {by_rank(where, calls)}")
    problems = [
        f"rank {rank}: {one['problem']}" for rank, one in zip(where.ranks, found, strict=True) if one["problem"]
    ]
    if problems:
        raise UnsupportedError(f"{call} (at {found[0]['site']}): {'; '.join(problems)}")
    return [one["facts"] for one in found]


def agree_on(where: Members, call: str, what: str, values: Sequence[Any], *, name: str = "") -> None:
    """Raise `RankMismatchError` on every rank unless all `values`, one a rank, are equal."""
    if any(value != values[0] for value in values):
        subject = f" of {name!r}" if name else ""
        raise RankMismatchError(f"{call}{subject}: {what} differs: {by_rank(where, values)}")


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory in row-major order as a flat uint8 tensor; a view where it already lies so."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(flat: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The inverse of `as_bytes`; `flat` must begin at its own storage."""
    return flat.view(dtype).reshape(tuple(shape))


def dtype_named(name: str) -> torch.dtype:
    """ "torch.float32" → torch.float32."""
    found = torch.__dict__[name.removeprefix("torch.")]
    assert isinstance(found, torch.dtype), f"{name} is not a dtype"
    return found


def gather_bytes(
    where: Members | None, own: Sequence[Tensor], sizes: Sequence[Sequence[int]], device: torch.device
) -> list[list[Tensor]]:
    """Every rank's list of flat uint8 tensors, on `device`, in rounds whose buffers do not grow with the data.

    Args:
        own: this rank's tensors, `as_bytes`.
        sizes: bytes of each tensor of each rank, agreed before.
    """
    if where is None:
        return [[piece.to(device, copy=True) for piece in own]]
    result = [[torch.empty(size, dtype=torch.uint8, device=device) for size in row] for row in sizes]
    longest = max(sum(row) for row in sizes)
    step = max(1, _ROUND_BYTES // where.size)
    for start in range(0, longest, step):
        length = min(step, longest - start)
        send = torch.zeros(length, dtype=torch.uint8, device=where.device)
        for piece, at in _window(own, start, length):
            send[at : at + len(piece)].copy_(piece)
        received = [torch.empty_like(send) for _ in where.ranks]
        watchdog.count_sent(send.nbytes)
        dist.all_gather(received, send, group=where.group)
        for row, buffer in zip(result, received, strict=True):
            for piece, at in _window(row, start, length):
                piece.copy_(buffer[at : at + len(piece)])
    return result


def deliver_bytes(
    where: Members, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[int]], device: torch.device
) -> list[list[Tensor]]:
    """Hand each member its own list of flat uint8 tensors, in one collective; the caller bounds what travels at a time.

    Args:
        outgoing: for each member, the tensors that this rank hands to it, `as_bytes`.
        incoming: for each member, bytes of each tensor that it hands to this rank, agreed before.

    Returns:
        For each member, what it handed to this rank, on `device`. A rank's own part does not travel.
    """
    away = [[] if member == where.rank else list(pieces) for member, pieces in enumerate(outgoing)]
    sent = [sum(map(len, pieces)) for pieces in away]
    due = [0 if member == where.rank else sum(row) for member, row in enumerate(incoming)]
    empty = torch.empty(0, dtype=torch.uint8, device=where.device)
    send = torch.cat([empty, *(piece.to(where.device) for pieces in away for piece in pieces)])
    received = torch.empty(sum(due), dtype=torch.uint8, device=where.device)
    watchdog.count_sent(send.nbytes)
    dist.all_to_all_single(received, send, due, sent, group=where.group)
    rows = received.split(due)
    return [
        [
            piece.to(device, copy=True)
            for piece in (outgoing[member] if member == where.rank else rows[member].split(list(incoming[member])))
        ]
        for member in range(where.size)
    ]


def broadcast_bytes(where: Members, pieces: Sequence[Tensor], owner: int) -> None:
    """Fill `pieces` (flat uint8) on every rank with what the member `owner` has in them, in bounded rounds."""
    total = sum(len(piece) for piece in pieces)
    for start in range(0, total, _ROUND_BYTES):
        buffer = torch.empty(min(_ROUND_BYTES, total - start), dtype=torch.uint8, device=where.device)
        windows = list(_window(pieces, start, len(buffer)))
        if where.rank == owner:
            for piece, at in windows:
                buffer[at : at + len(piece)].copy_(piece)
        watchdog.count_sent(buffer.nbytes if where.rank == owner else 0)
        dist.broadcast(buffer, src=where.ranks[owner], group=where.group)
        if where.rank != owner:
            for piece, at in windows:
                piece.copy_(buffer[at : at + len(piece)])


def _window(pieces: Sequence[Tensor], start: int, length: int) -> Iterator[tuple[Tensor, int]]:
    """What of the concatenated `pieces` lies in [start, start + length): (view, its place in the window)."""
    begin = 0
    for piece in pieces:
        low, high = max(start, begin), min(start + length, begin + len(piece))
        if low < high:
            yield piece[low - begin : high - begin], low - start
        begin += len(piece)


def _frame(payload: bytes, size: int) -> Tensor:
    """`payload` behind its length, cut or padded to `size` bytes."""
    head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
    return torch.frombuffer(bytearray(head[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _all_gather(where: Members, flat: Tensor) -> list[bytes]:
    received = [torch.empty_like(flat, device=where.device) for _ in where.ranks]
    watchdog.count_sent(flat.nbytes)
    dist.all_gather(received, flat.to(where.device), group=where.group)
    return [bytes(one.cpu().numpy()) for one in received]
