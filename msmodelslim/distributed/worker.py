"""One rank: what runs in each process of a job, started by `launch` or by torchrun (then see `outer_launcher`).

A rank sets its threads, device and process group up, calls the entry, and waits at the end for the others. Its error
is written down at once, before anything else can fail; then it leaves without ceremony, because cleaning up with
ranks that are gone can hang. A started rank ends itself when the process that started it is gone.
"""

import faulthandler
import json
import logging
import os
import pkgutil
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from msmodelslim import device
from msmodelslim.distributed import watchdog
from msmodelslim.distributed.dist_setup import setup_distributed
from msmodelslim.distributed.failure import Catch, Failure, failure_of, was_told

LEAVE_S = 5.0  # from a polite end to a hard one, for a rank whose job is over
_LOOK_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSetup:
    """What a rank needs to know besides its job; plain data.

    Args:
        device: kind of device.
        device_ids: index of each rank of this machine.
        threads: CPU threads of each rank; None is its share of the cores.
        pin: keep each rank on its own slice of the cores.
        log_level: of this package, a number of `logging`.
    """

    device: str
    device_ids: tuple[int, ...]
    threads: int | None
    pin: bool
    log_level: int


def work(task: dict[str, Any]) -> None:
    """The main function of a process that `launch` started. `task` is what it wrote to "job.json"."""
    rank, folder = int(os.environ["RANK"]), Path(task["folder"])
    setup = RankSetup(**{**task["setup"], "device_ids": tuple(task["setup"]["device_ids"])})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the starting process decides
    signal.signal(signal.SIGTERM, leave)
    # Open for good: a signal after the handler is gone would kill the process.
    stacks = os.open(watchdog.stack_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(watchdog.STACK_SIGNAL, file=stacks, all_threads=False)
    watchdog.start_beats(watchdog.beat_file(folder, rank))
    threading.Thread(target=_follow, args=(task["parent"], folder), daemon=True).start()
    _log_as(rank, setup.log_level)
    try:
        with Catch() as caught:
            run_entry(task["entry"], task["job"], setup)
    except SystemExit as left:
        if watchdog.has_ended():
            was_told()
            _exit(128 + signal.SIGTERM)
        _report(failure_of(left, rank, watchdog.place()), folder)  # the entry left by itself
    if caught.error is not None:
        _report(failure_of(caught.error, rank, watchdog.place()), folder)
    watchdog.end_beats(watchdog.FINISHED)
    dist.destroy_process_group()


def _log_as(rank: int, level: int) -> None:
    """Every line of this package says which rank it is from; other packages only warn."""
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s rank {rank}: %(message)s", force=True)
    package = logging.getLogger("msmodelslim")
    for handler in list(package.handlers):  # of the process this one was forked from
        package.removeHandler(handler)
    package.setLevel(level)


def run_entry(entry: str, job: dict[str, Any], setup: RankSetup) -> None:
    """Threads, device and process group as `setup` says, then the entry, then the wait for the other ranks."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place, local_size = int(os.environ["LOCAL_RANK"]), len(setup.device_ids)
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    if setup.pin and sys.platform == "linux":
        os.sched_setaffinity(0, core_slice(cores, place, local_size))
    device.set_threads(setup.device, setup.threads or max(1, len(cores) // local_size))
    watchdog.note(phase=watchdog.STARTING)
    function: Callable[[dict, int, int], None] = pkgutil.resolve_name(entry)
    index = setup.device_ids[place]
    device.set_current(setup.device, index)
    backend = device.collective_backend(setup.device)
    with watchdog.waiting("the other ranks"):
        setup_distributed(rank, world_size, backend, device_index=index)
    _log.info("Rank %d/%d initialized on device %s:%d with backend %s", rank, world_size, setup.device, index, backend)
    function(job, rank, world_size)
    with watchdog.waiting("the end of the job"):
        dist.barrier()


def core_slice(cores: list[int], place: int, count: int) -> set[int]:
    """The cores of the `place`-th of `count` ranks: equal runs, or one core shared by several where there are fewer."""
    if len(cores) < count:
        return {cores[place % len(cores)]}
    return set(cores[len(cores) * place // count : len(cores) * (place + 1) // count])


def _report(failure: Failure, folder: Path) -> NoReturn:
    if not _is_written(failure, folder):
        was_told()  # a full disk may be the very failure, and this makes room
        if not _is_written(failure, folder) and not failure.lost_peer:
            _log.error("%s (and %s takes no report of it)", failure.error(), folder)
    was_told()
    _exit(1)


def _is_written(failure: Failure, folder: Path) -> bool:
    path = watchdog.error_file(folder, failure.rank)
    aside = path.with_suffix(".part")
    try:
        aside.write_text(json.dumps(failure.plain()))
        aside.rename(path)
    except OSError:
        return False
    return True


def _exit(code: int) -> NoReturn:
    """Leave at once: what runs at a normal end could wait for ranks that are gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave(signum: int, _: FrameType | None) -> NoReturn:
    """SIGTERM: unwind, so that every `with` block cleans up after itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watchdog.end_beats(watchdog.TERMINATED)
    sys.exit(128 + signum)


def _follow(parent: int, folder: Path) -> None:
    """End this process, and what the job left on disk, when the one that started it is gone."""
    while os.getppid() == parent and folder.exists():
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    end_hard()


def end_hard() -> None:
    """End this rank and its own children, which share its process group where the launcher gave it one."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_S)
    os._exit(1)
