"""Joining and leaving the process group of a run, and the free port to meet at."""

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from msmodelslim.errors import EnvError, SchemaValidateError

#: Collectives wait as long as it takes: a slow local phase is no fault, and the watchdog judges who hangs.
COLLECTIVE_TIMEOUT = timedelta(days=7)
_MEETING_TIMEOUT = timedelta(minutes=30)  # until every rank has come
_LOWEST_PORT, _HIGHEST_PORT = 1024, 65535
_LOCAL = "127.0.0.1"
_joined = itertools.count()  # how often this process has joined a group; equal on all ranks


def is_rank_zero() -> bool:
    """True on rank 0 and where there are no ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def find_free_port(start_port: int = 29500, max_attempts: int = 100) -> int:
    """The first port from `start_port` upward that can be bound on this machine now.

    Another process may take it before it is used; `launch` therefore lets the engine bind its own port.

    Raises:
        SchemaValidateError: `start_port` lies outside 1024 to 65535.
        EnvError: none of the `max_attempts` ports is free.
    """
    if not _LOWEST_PORT <= start_port <= _HIGHEST_PORT:
        raise SchemaValidateError(f"start_port is {start_port}", f"give {_LOWEST_PORT} to {_HIGHEST_PORT}")
    last = min(start_port + max_attempts - 1, _HIGHEST_PORT)
    for port in range(start_port, last + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_LOCAL, port))
            except OSError:
                continue
            return port
    raise EnvError(f"no free port from {start_port} to {last}", "stop what uses them or give another start_port")


def setup_distributed(
    rank: int,
    world_size: int,
    backend: str,
    master_port: int | None = None,
    device_index: int | None = None,
) -> None:
    """Join the process group; no environment variable is touched.

    A process may join again after it has left, in step with the others: each time has its own names in the store where
    ranks meet, which under an elastic launcher outlives the group.

    Args:
        rank: this process's place, 0 to world_size - 1.
        world_size: number of ranks.
        backend: a name that torch.distributed knows, such as gloo.
        master_port: where rank 0 of this machine waits; None means where MASTER_ADDR and MASTER_PORT say.
        device_index: the accelerator of this rank, by default its rank; nothing to set for gloo.

    Raises:
        ValueError: `rank` lies outside the world.
        EnvError: neither `master_port` nor MASTER_PORT says where to meet, or the group exists already.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; give 0 to {world_size - 1}")
    if dist.is_initialized():
        raise EnvError("this process is already in a process group", "leave it first (destroy_process_group)")
    if master_port is None and "MASTER_PORT" not in os.environ:
        raise EnvError("nothing says where the ranks meet", "give master_port, or set MASTER_ADDR and MASTER_PORT")
    if backend != dist.Backend.GLOO:
        torch.accelerator.set_device_index(rank if device_index is None else device_index)
    url = "env://" if master_port is None else f"tcp://{_LOCAL}:{master_port}"
    store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=_MEETING_TIMEOUT))
    store = dist.PrefixStore(f"msmodelslim/{next(_joined)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


@contextmanager
def process_group(
    rank: int, world_size: int, backend: str, master_port: int | None = None, device_index: int | None = None
) -> Iterator[None]:
    """`setup_distributed` for a block; leaves the group at its end, also after an error."""
    setup_distributed(rank, world_size, backend, master_port, device_index)
    try:
        yield
    finally:
        dist.destroy_process_group()
