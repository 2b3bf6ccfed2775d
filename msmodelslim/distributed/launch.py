"""Starting a job's ranks with torch's elastic launcher, one process a device, and ending them as one.

Only names and plain data go to the ranks: an entry "module:function" and a job that JSON can hold. The engine meets
at a port that it binds itself, so two jobs on one machine do not disturb each other. Whatever happens, the job ends
with one error, and no process, port, temporary file or environment variable of it stays. Where torchrun (or another
launcher) has started the processes already, the job joins them instead.
"""

import faulthandler
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from msmodelslim import device as devices
from msmodelslim.distributed import watchdog
from msmodelslim.distributed.failure import Failure, RankFailedError, first_of
from msmodelslim.distributed.outer_launcher import join, joins_outer_launcher
from msmodelslim.distributed.watchdog import Limits, Watch
from msmodelslim.distributed.worker import RankSetup, work
from msmodelslim.errors import EnvError, ModelslimError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TORCH_SIGNAL = signal.SIGQUIT  # the one signal left to the engine's own handler, which needs at least one
_PLAIN = (str, int, float, bool, type(None))
#: Settings for each rank: threads before any library starts its pool, ranks meet on the loopback, torch stays quiet.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"} if sys.platform == "linux" else {}
_ENGINE_LOGGERS = ("torch.distributed.", "torch.multiprocessing", "torchelastic")
_TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"  # its pool of threads does not survive a fork
_BOOT = """\
import json, os, sys
with open(sys.argv[1]) as file:
    task = json.load(file)
with open(os.path.join(task["folder"], "pid_" + os.environ["RANK"]), "w") as file:
    file.write(str(os.getpid()))
os.environ.update(task["environment"])
sys.path[:] = task["path"]
from msmodelslim.distributed.worker import work
work(task)
"""


def launch(
    entry: str,
    job: dict[str, Any],
    world_size: int,
    *,
    device: str = "cpu",
    device_ids: Sequence[int] = (),
    threads: int | None = None,
    pin: bool = False,
    log_level: int = logging.INFO,
    limits: Limits | None = None,
) -> None:
    """Call `entry(job, rank, world_size)` on every rank, in a process group, and return when all are done.

    Inside a rank that torchrun started, be that rank; then `world_size` is the number of ranks on this machine.

    Args:
        entry: "module:function", importable from the same sys.path.
        job: names and plain data (str, numbers, bool, None, lists, dicts with str keys); tuples arrive as lists.
        world_size: ranks to start, one a device.
        device: kind of device, which decides the backend.
        device_ids: index of each rank's device; by default 0 to world_size - 1.
        threads: CPU threads a rank; by default its share of the cores.
        pin: keep each rank on its own slice of the cores.
        log_level: of this package in the ranks.
        limits: when a rank counts as stuck; by default what the environment says.

    Raises:
        ModelslimError: the first error of any rank, of the class it had there, with rank and place.
        RankFailedError: a rank met another exception, was killed, or made no progress.
        SystemExit: 130 after SIGINT, 143 after SIGTERM, when all ranks are gone.
        TypeError: `job` holds something that is no plain data; names where.
        ValueError: `entry` is not "module:function", or devices and ranks differ in number.
        EnvError: the ranks could not be started, or the outer launcher started another number of them.
    """
    module, _, function = entry.partition(":")
    if not (module and function):
        raise ValueError(f"entry is {entry!r}; write 'module:function'")
    _refuse_objects(job, "job")
    ids = tuple(device_ids) or tuple(range(world_size))
    if world_size < 1 or len(ids) != world_size:
        raise ValueError(f"{world_size} ranks for {len(ids)} devices; give one device a rank, and at least one")
    setup = RankSetup(device=device, device_ids=ids, threads=threads, pin=pin, log_level=log_level)
    if joins_outer_launcher():
        join(entry, job, setup)
        return
    limits = limits or Limits.from_environment()
    folder = Path(tempfile.mkdtemp(prefix="msmodelslim_"))
    environment = dict(os.environ)
    watch = Watch(folder, world_size, limits)
    watch.start()
    with _Signals(watch) as signals, _quiet_engine():
        try:
            forks = devices.start_method(device) == "fork"
            _start(_prepare(folder, entry, job, setup, limits), folder, watch, signals, forks)
        finally:
            signals.hold()
            watch.stop()
            shutil.rmtree(folder, ignore_errors=True)
            _restore_environment(environment)


def _prepare(folder: Path, entry: str, job: dict[str, Any], setup: RankSetup, limits: Limits) -> LaunchConfig:
    """What the ranks read, and what the engine needs to start them."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = str(setup.threads or max(1, cores // len(setup.device_ids)))
    temporary = folder / "tmp"
    temporary.mkdir()
    task = {
        "folder": str(folder),
        "parent": os.getpid(),
        "entry": entry,
        "job": job,
        "setup": asdict(setup),
        "path": [str(Path(one).absolute()) for one in sys.path],
        "environment": {
            **{name: value for name, value in _DEFAULTS.items() if name not in os.environ},
            **dict.fromkeys(_THREAD_VARIABLES, threads),
            "TMPDIR": str(temporary),  # so that no temporary file outlives the job, however it ends
        },
    }
    (folder / "job.json").write_text(json.dumps(task))
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(setup.device_ids),
        run_id=uuid.uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: the engine binds a free one and tells the ranks
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=_TORCH_SIGNAL.name,
        shutdown_timeout=max(1, round(limits.grace_s)),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "engine")),
    )


def _start(config: LaunchConfig, folder: Path, watch: Watch, signals: "_Signals", forks: bool) -> None:
    task = str(folder / "job.json")
    try:
        if forks:
            os.environ.setdefault(_TOKENIZER_THREADS, "false")
            sys.stdout.flush()  # a rank would write what stands in the buffers once more
            sys.stderr.flush()
            with _untouched_heap():
                elastic_launch(replace(config, start_method="fork"), _forked)(task)
        else:
            elastic_launch(config, sys.executable)("-c", _BOOT, task)
    except ChildFailedError as error:
        failures: dict[int, ProcessFailure] = error.failures
    except RendezvousError as error:
        raise EnvError(f"the ranks could not be started: {error}", "see whether 127.0.0.1 can be used") from error
    else:
        return
    codes = {rank: one.exitcode for rank, one in failures.items()} | signals.codes
    raise _job_error(codes, folder, watch) from None


@contextmanager
def _untouched_heap() -> Iterator[None]:
    """A collection in a forked rank would touch, and so copy, all pages of objects that it shares with this process."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _forked(path: str) -> None:
    """What `_BOOT` does, in a process that has all modules already, and its parent's signal handlers and loggers."""
    os.setsid()  # a process group of its own, as the engine gives to a program
    for one in (*_SIGNALS, _TORCH_SIGNAL):
        signal.signal(one, signal.SIG_DFL)
    task = json.loads(Path(path).read_text())
    (Path(task["folder"]) / f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
    os.environ.update(task["environment"])
    faulthandler.disable()  # the engine switches it on; how a rank ended is told once, by the parent
    tempfile.tempdir = task["environment"]["TMPDIR"]  # the parent's choice is kept in the module
    work(task)


def _job_error(codes: dict[int, int], folder: Path, watch: Watch) -> ModelslimError:
    """The one error of a job that failed: the cause, not its echoes on other ranks.

    Args:
        codes: rank → exit code, or minus a signal, of the ranks whose end was seen.
    """
    if watch.verdict:
        return RankFailedError(watch.verdict, watchdog.STUCK_ACTION)
    beats = watch.beats()
    reports = {
        rank: Failure.from_plain(json.loads(path.read_text()))
        for rank in range(len(beats))
        if (path := watchdog.error_file(folder, rank)).exists()
    }
    first = first_of(list(reports.values()))
    if first is not None and not first.lost_peer:
        return first.error()
    pids = watch.pids()
    ended = {rank: code for rank, code in codes.items() if pids.get(rank) not in watch.killed and rank not in reports}
    for rank, code in sorted(ended.items()):
        if code < 0 and -code != signal.SIGTERM:
            return _killed(rank, -code, beats[rank].place)
    for rank, code in sorted(ended.items()):
        if code > 0 and code != 128 + signal.SIGTERM:
            return RankFailedError(f"rank {rank} ended with exit code {code} at {beats[rank].place}", rank=rank)
    gone = [rank for rank, one in enumerate(beats) if not one.ended and rank not in reports and not codes.get(rank, 0)]
    if gone:
        return RankFailedError(f"rank {gone[0]} left at {beats[gone[0]].place}, before the job was done", rank=gone[0])
    stopped = [rank for rank, one in enumerate(beats) if one.ended == watchdog.TERMINATED]
    if stopped and first is None:
        rank = min(stopped, key=lambda rank: beats[rank].at_s)
        return _killed(rank, signal.SIGTERM, beats[rank].place)
    if first is not None:
        return first.error()
    rank = min(codes)
    return RankFailedError(f"rank {rank} ended with exit code {codes[rank]} at {beats[rank].place}", rank=rank)


def _killed(rank: int, signum: int, place: watchdog.Place) -> RankFailedError:
    out_of_memory = signum == signal.SIGKILL
    return RankFailedError(
        f"rank {rank} was killed by signal {signum}{', usually out of memory,' if out_of_memory else ''} at {place}",
        "free memory or use fewer ranks" if out_of_memory else "",
        rank=rank,
    )


def _refuse_objects(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; give names and plain data to ranks, keys as str")
            _refuse_objects(one, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            _refuse_objects(one, f"{where}[{index}]")
    elif type(value) not in _PLAIN:
        raise TypeError(
            f"{where} is {value!r}, a {type(value).__name__}; give names and plain data to ranks, they build the rest"
        )


class _Signals:
    """SIGINT, SIGTERM and SIGHUP end the job and then this process; a second one does not wait for anybody.

    SIGCHLD notes how each rank ended, since the engine tells that only of the first one that it looks at. Only the main
    thread may set handlers; elsewhere a signal does what it did before.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: list[int] = []
        self._holding = False
        self._before: dict[signal.Signals, Any] = {}
        self.codes: dict[int, int] = {}  # rank → exit code, or minus the signal that killed it

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.getsignal(one) for one in (*_SIGNALS, _TORCH_SIGNAL, signal.SIGCHLD)}
            for one in _SIGNALS:
                signal.signal(one, self._handle)
            signal.signal(signal.SIGCHLD, self._note_end)
        return self

    def _note_end(self, _signum: int, _frame: FrameType | None) -> None:
        for rank, pid in self._watch.pids().items():
            if rank in self.codes:
                continue
            try:
                # Looked at, not collected: the engine does that.
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # collected already
                continue
            if found is not None:
                self.codes[rank] = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def hold(self) -> None:
        """From now on a signal waits for the end of the `with` block: nothing may interrupt the cleaning up."""
        self._holding = True

    def _handle(self, signum: int, _: FrameType | None) -> None:
        self._seen.append(signum)
        self._watch.hurry()
        if len(self._seen) > 1:
            self._watch.kill()
        elif not self._holding:
            raise SystemExit(128 + signum)

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        # Also where the handler's exception was lost, or the ranks fell over before it came through.
        if self._seen and not isinstance(error, SystemExit):
            raise SystemExit(128 + self._seen[0]) from error


def _restore_environment(before: dict[str, str]) -> None:
    """Make os.environ equal to `before`, touching only what the engine changed."""
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@contextmanager
def _quiet_engine() -> Iterator[None]:
    """The engine's own log lines and warnings would show each failure again, in other words."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_ENGINE_LOGGERS)]
    loggers = [one for one in map(logging.getLogger, names) if not one.disabled]
    for one in loggers:
        one.disabled = True
    try:
        yield
    finally:
        for one in loggers:
            one.disabled = False
