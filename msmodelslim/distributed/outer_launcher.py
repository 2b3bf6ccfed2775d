"""Being one of the ranks that torchrun, or a launcher of its kind, has started, on one machine or several.

Nobody watches these ranks as `launch` watches its own, so they end each other: the first that fails says so in the
launcher's store, and every rank listens there from its first line on, wherever it is. There each also notes what it is
doing; rank 0 reads the notes and names a rank that makes no progress.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from msmodelslim.distributed import watchdog
from msmodelslim.distributed.failure import Catch, Failure, RankFailedError, failure_of, was_told
from msmodelslim.distributed.network import interface_towards
from msmodelslim.distributed.worker import LEAVE_S, RankSetup, end_hard, leave, run_entry
from msmodelslim.errors import EnvError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOK_S = 1.0
_ECHO_S = 2.0  # how long the echo of another rank's failure waits for that failure to be told

_NOTES = "msmodelslim/notes"  # in the store

_log = logging.getLogger(__name__)
_is_one_job = False


def joins_outer_launcher() -> bool:
    """True when torchrun, or another launcher of its kind, has started this process as one rank of several."""
    return outer_rank() is not None


def outer_rank() -> int | None:
    """The rank that an outer launcher made this process; None where there is no such launcher."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in _VARIABLES) else None


def outer_world_size() -> int:
    """How many ranks an outer launcher has started, on all machines; 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if joins_outer_launcher() else 1


def join(entry: str, job: dict[str, Any], setup: RankSetup) -> None:
    """Be the rank that an outer launcher (torchrun) made this process; returns when the whole job is done.

    Raises:
        EnvError: the launcher started another number of processes than there are devices.
        ModelslimError: this rank failed first, on any machine.
        SystemExit: another rank failed first and tells it (code 1), or SIGTERM came (code 143).
    """
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if local != len(setup.device_ids):
        raise EnvError(
            f"the launcher started {local} processes on this machine for {len(setup.device_ids)} devices "
            f"({', '.join(map(str, setup.device_ids))})",
            "start one process a device",
        )
    with as_one_job():
        with _towards_the_others():
            run_entry(entry, job, setup)
        dist.destroy_process_group()


@contextmanager
def as_one_job() -> Iterator[None]:
    """Inside a rank of an outer launcher: an error within the block ends the ranks on all machines.

    Elsewhere, and within another such block, nothing is done.

    Raises:
        ModelslimError: this rank failed first, on any machine.
        SystemExit: another rank failed first and tells it (code 1), or SIGTERM came (code 143).
    """
    global _is_one_job
    if _is_one_job or not joins_outer_launcher() or threading.current_thread() is not threading.main_thread():
        yield
        return
    _is_one_job = True
    watchdog.note(phase=watchdog.STARTING)
    before, over = signal.signal(signal.SIGTERM, leave), threading.Event()
    threading.Thread(target=_listen, args=(over,), daemon=True).start()
    try:
        with Catch() as caught:
            yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)
        _is_one_job = False
        if caught.error is None:  # done, or asked to leave: then the cause is known
            was_told()
    if caught.error is not None:
        failure = failure_of(caught.error, int(os.environ["RANK"]), watchdog.place())
        first = _tells_first(failure)
        was_told()
        if not first:
            sys.exit(1)
        raise failure.error() from caught.error


@contextmanager
def _towards_the_others() -> Iterator[None]:
    """Gloo takes the interface of the host's name, which often is the loopback: name one that the others can reach."""
    alone = outer_world_size() == int(os.environ["LOCAL_WORLD_SIZE"])
    interface = "lo" if alone and sys.platform == "linux" else interface_towards(os.environ["MASTER_ADDR"])
    if _INTERFACE in os.environ or not interface:
        yield
        return
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _store() -> dist.TCPStore:
    """The launcher's own store, where the first failure is told."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))


def _errors() -> str:
    """Where in the store failures are counted; a job that the launcher starts again counts anew."""
    return f"msmodelslim/errors/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _listen(over: threading.Event) -> None:
    """End this rank when another one, on whatever machine, has told its failure; it may be far from any collective."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    notes = _Notes(world_size, watchdog.Limits.from_environment())
    try:
        store = _store()
        while not store.check([_errors()]):
            now_s = time.monotonic()
            store.set(f"{_NOTES}/{rank}", watchdog.own_note(now_s))
            if rank == 0:
                notes.look(store, now_s)
            if over.wait(_LOOK_S):
                return
    except dist.DistError:  # the launcher is gone, and ends us
        return
    if not over.wait(LEAVE_S):
        end_hard()


class _Notes:
    """What all ranks are doing, as rank 0 reads it in the launcher's store."""

    def __init__(self, world_size: int, limits: watchdog.Limits) -> None:
        self._names = [f"{_NOTES}/{rank}" for rank in range(world_size)]
        self._patience = watchdog.Patience(limits)
        self._seen: dict[str, tuple[bytes, float]] = {}  # a note, and when it was first read

    def look(self, store: dist.TCPStore, now_s: float) -> None:
        """Name the ranks without progress; after too long end the job."""
        if not store.check(self._names):  # before a rank's first note the launcher's own limits hold
            return
        beats = []
        for name, text in zip(self._names, store.multi_get(self._names), strict=True):
            if self._seen.get(name, (b"", 0.0))[0] != text:
                self._seen[name] = text, now_s
            # One that is not renewed is of a rank that cannot even write: what it says grows older.
            beat = watchdog.note_of(text.decode(), self._seen[name][1])
            if beat.place.phase == watchdog.STARTING:
                beat = replace(beat, pid=0)  # imports take their time
            beats.append(beat)
        stuck, is_hopeless = self._patience.judge(beats, now_s)
        if not stuck:
            return
        told = watchdog.tell_stuck(beats, stuck, [""] * len(beats), now_s)
        if is_hopeless:
            sys.stderr.write(f"error: {RankFailedError(told, watchdog.STUCK_ACTION)}\n")
            sys.stderr.flush()
            store.add(_errors(), 1)
        else:
            _log.warning("%s", told)


def _tells_first(failure: Failure) -> bool:
    """Whether this rank's failure is the one to show. The echo of a lost rank lets that rank speak first."""
    deadline = time.monotonic() + (_ECHO_S if failure.lost_peer else 0)
    try:
        store = _store()
        while time.monotonic() < deadline and not store.check([_errors()]):
            time.sleep(0.1)
        return store.add(_errors(), 1) == 1
    except dist.DistError:
        return not failure.lost_peer
