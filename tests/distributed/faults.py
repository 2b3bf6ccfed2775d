"""What ranks do in the tests of `launch`: entries that succeed, fail, hang or are killed, each on purpose."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from msmodelslim.distributed import sync_base_operation, watchdog
from msmodelslim.errors import InvalidModelError


def write_facts(job: dict, rank: int, world_size: int) -> None:
    total = sync_base_operation(torch.tensor([rank + 1.0]), "sum")
    facts = {
        "rank": rank,
        "world_size": world_size,
        "total": total.item(),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "cores": sorted(os.sched_getaffinity(0)),
        "job": job,
        "pid": os.getpid(),
        "backend": dist.get_backend(),
    }
    (Path(job["out"]) / f"{rank}.json").write_text(json.dumps(facts))


def fail(job: dict, rank: int, world_size: int) -> None:
    """Rank `job["rank"]` fails as `job["how"]` says, while the others wait for it in a collective or compute."""
    (Path(job["out"]) / f"pid{rank}").write_text(str(os.getpid()))
    if job.get("deaf") == rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watchdog.note("layer 17", "linear_quant", "calibrating")
    tempfile.mkstemp(prefix="left_behind_")
    dist.barrier()
    if rank == job["rank"]:
        time.sleep(0.2)
        (Path(job["out"]) / "fault").write_text(str(time.time()))
        _FAULTS[job["how"]]()
    if job.get("others") == "compute":
        time.sleep(600)
    sync_base_operation(torch.ones(1), "max", name="stat")


def _user_error() -> None:
    raise InvalidModelError("model.layers.1.w has 3 NaN", "mend the checkpoint")


def _bug() -> None:
    torch.ones(2).view(3)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(600)


def _leave() -> None:
    os._exit(0)


_FAULTS = {
    "user": _user_error,
    "bug": _bug,
    "kill": _kill,
    "hang": _hang,
    "exit3": lambda: sys.exit(3),
    "leave": _leave,
    "die": lambda: os._exit(4),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def hang_with_a_child(job: dict, rank: int, world_size: int) -> None:
    """Every rank computes for ever, with a process of its own beside it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(job["out"]) / f"pid{rank}").write_text(str(os.getpid()))
    (Path(job["out"]) / f"pidchild{rank}").write_text(str(child.pid))
    watchdog.note("layer 3", phase="saving")
    time.sleep(600)


def slow_phase(job: dict, rank: int, world_size: int) -> None:
    """Rank 1 saves for longer than a rank may be silent, but says so."""
    if rank == 1:
        for _ in range(20):
            time.sleep(0.1)
            watchdog.beat()
    sync_base_operation(torch.ones(1), "max")


def different_calls(job: dict, rank: int, world_size: int) -> None:
    """Each rank waits for something else, in torch's own collectives."""
    if rank == 0:
        with watchdog.waiting("a barrier"):
            dist.barrier()
    else:
        with watchdog.waiting("a message"):
            dist.recv(torch.ones(1), src=0)


def all_fail(job: dict, rank: int, world_size: int) -> None:
    sync_base_operation(torch.ones(1 + rank), "max", name="stat")


def launch_again(job: dict, rank: int, world_size: int) -> None:
    """A rank that asks for ranks itself gets none: it is one already."""
    from msmodelslim.distributed.launch import launch

    assert threading.current_thread() is threading.main_thread()
    dist.destroy_process_group()
    launch("tests.distributed.faults:write_facts", job, world_size)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
