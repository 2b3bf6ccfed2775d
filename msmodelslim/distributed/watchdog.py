"""What each rank is doing, noted by the ranks in small files that the starting process reads.

A rank notes its place (layer, processor, phase) and, around each collective, what it waits for. The watch in the
starting process reads these notes: it names a rank that makes no progress and what the others do meanwhile, and after a
failure it kills whoever does not leave by itself. Collectives themselves have no time-out, so a long local phase is no
fault: `beat` now and then says that it goes on.
"""

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from msmodelslim.errors import EnvError

FINISHED, TERMINATED = "finished", "terminated"
STARTING = "starting"  # the phase before a rank has met the others
STUCK_ACTION = "look at the rank that waits for nobody"
STACK_SIGNAL = signal.SIGUSR1
_BEAT_BYTES = 2048  # a note is one write of fixed size, so a reader never sees half of one
_WAITING_CHARS = 300
_PERIOD_S = 0.2
_START_S = 120.0  # until its first note a rank imports torch, which takes long from a cold disk
_STACK_WAIT_S = 0.3
#: field of `Limits` → the environment variable that sets it
LIMIT_VARIABLES = {"stuck_after_s": "MSMODELSLIM_STUCK_AFTER_S", "give_up_after_s": "MSMODELSLIM_GIVE_UP_AFTER_S"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where in a run a rank is: "model.layers.3, linear_quant, calibrating"."""

    layer: str = ""
    processor: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.layer, self.processor, self.phase) if part) or "the start"


@dataclass(frozen=True)
class Beat:
    """One rank's latest note.

    Args:
        pid: its process.
        place: where it is.
        waiting: the collective it waits in, or "".
        at_s: when it last made progress, on the machine's monotonic clock.
        ended: `FINISHED`, `TERMINATED` (by SIGTERM), or "" while it runs.
    """

    pid: int = 0
    place: Place = field(default_factory=Place)
    waiting: str = ""
    at_s: float = 0.0
    ended: str = ""

    def says(self, now_s: float) -> str:
        doing = f"waits in {self.waiting} at {self.place}" if self.waiting else f"is at {self.place}"
        return self.ended or f"{doing} since {now_s - self.at_s:.0f} s"


def pid_file(folder: Path, rank: int) -> Path:
    return folder / f"pid_{rank}"


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"beat_{rank}"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank}"


def error_file(folder: Path, rank: int) -> Path:
    return folder / f"error_{rank}"


_beat = Beat()
_file: int | None = None


def note(layer: str = "", processor: str = "", phase: str = "") -> None:
    """This rank goes on to another place; counts as progress."""
    _write(Place(layer, processor, phase), "")


def beat() -> None:
    """This rank is still at work at the same place; call it in long loops."""
    _write(_beat.place, _beat.waiting)


def place() -> Place:
    """Where this rank is."""
    return _beat.place


def own_note(now_s: float) -> str:
    """This rank's latest note as text for another machine, whose clock is another: it tells an age, not a time."""
    return json.dumps(asdict(_beat) | {"at_s": now_s - _beat.at_s})


def note_of(text: str, now_s: float) -> Beat:
    """What `own_note` wrote on another machine, on this one's clock."""
    return _beat_of(json.loads(text), now_s)


def _beat_of(found: dict, now_s: float | None = None) -> Beat:
    at_s = found["at_s"] if now_s is None else now_s - found["at_s"]
    return Beat(**{**found, "place": Place(**found["place"]), "at_s": at_s})


@dataclass(frozen=True)
class Traffic:
    """What this rank has sent so far.

    Args:
        collectives: calls of the backend.
        sent_bytes: what this rank gave to them.
        seconds: spent in them, waiting for other ranks included.
    """

    collectives: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0

    def since(self, before: "Traffic") -> "Traffic":
        """What was added to `before`."""
        return Traffic(
            self.collectives - before.collectives,
            self.sent_bytes - before.sent_bytes,
            self.seconds - before.seconds,
        )


_traffic = Traffic()


def traffic() -> Traffic:
    """Counts since this process began."""
    return _traffic


def count_sent(nbytes: int) -> None:
    """One more call of the backend, to which this rank gives so many bytes."""
    global _traffic
    _traffic = replace(_traffic, collectives=_traffic.collectives + 1, sent_bytes=_traffic.sent_bytes + nbytes)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Around a collective: this rank waits for the others, so it is not the one that hangs."""
    global _traffic
    before, start_s = _beat.waiting, time.monotonic()
    _write(_beat.place, before or what)
    try:
        yield
    finally:
        _write(_beat.place, before)
        if not before:
            _traffic = replace(_traffic, seconds=_traffic.seconds + time.monotonic() - start_s)


def start_beats(path: Path) -> None:
    """From now on, notes of this process go to `path`."""
    global _file
    _file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    _write(_beat.place, "")


def end_beats(ended: str) -> None:
    """The last note: this rank leaves on purpose ("finished") or on request ("terminated")."""
    _write(_beat.place, "", ended)


def has_ended() -> bool:
    """Whether `end_beats` was called."""
    return bool(_beat.ended)


def _write(at: Place, waits_in: str, ended: str = "") -> None:
    global _beat
    _beat = Beat(os.getpid(), at, waits_in[:_WAITING_CHARS], time.monotonic(), ended)
    if _file is not None:
        text = json.dumps(asdict(_beat)).encode()
        os.pwrite(_file, text[:_BEAT_BYTES].ljust(_BEAT_BYTES), 0)


def read_beat(path: Path) -> Beat | None:
    """The latest note in `path`; None before the first, and while one is being written."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return _beat_of(found)


@dataclass(frozen=True)
class Limits:
    """How long is too long, in seconds.

    Args:
        stuck_after_s: a rank without progress for so long is named, with what the others do.
        give_up_after_s: after so long the run ends.
        grace_s: from the first failure to SIGKILL for whoever still runs.
    """

    stuck_after_s: float = 300.0
    give_up_after_s: float = 3600.0
    grace_s: float = 5.0

    @classmethod
    def from_environment(cls) -> "Limits":
        """The defaults, or what MSMODELSLIM_STUCK_AFTER_S and MSMODELSLIM_GIVE_UP_AFTER_S say.

        Raises:
            EnvError: one of them is not a number above 0; names both where both are wrong.
        """
        given = {field: os.environ[name] for field, name in LIMIT_VARIABLES.items() if name in os.environ}
        wrong = [f"{LIMIT_VARIABLES[field]} is {word!r}" for field, word in given.items() if not _is_seconds(word)]
        if wrong:
            raise EnvError(", and ".join(wrong), "give seconds, a number above 0 (inf for no limit)")
        return cls(**{field: float(word) for field, word in given.items()})


def _is_seconds(word: str) -> bool:
    try:
        return float(word) > 0
    except ValueError:
        return False


class Patience:
    """When ranks without progress are named, and when the run is given up."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._told_s = time.monotonic()

    def judge(self, beats: Sequence[Beat], now_s: float) -> tuple[list[int], bool]:
        """The ranks to name now, none while there is nothing new to tell; and whether the run has to end."""
        hopeless = stuck_ranks(beats, now_s, self._limits.give_up_after_s)
        stuck = stuck_ranks(beats, now_s, self._limits.stuck_after_s)
        if not hopeless and not (stuck and now_s - self._told_s > self._limits.stuck_after_s):
            return [], False
        self._told_s = now_s
        return hopeless or stuck, bool(hopeless)


class Watch:
    """The starting process's eye on its ranks; runs in a thread of its own.

    Args:
        folder: where the ranks keep their notes.
        world_size: number of ranks.
        limits: how long is too long.
    """

    def __init__(self, folder: Path, world_size: int, limits: Limits) -> None:
        self._folder = folder
        self._world_size = world_size
        self._limits = limits
        self._started_s = time.monotonic()
        self._patience = Patience(limits)
        self._latest = [Beat(place=Place(phase=STARTING), at_s=self._started_s)] * world_size
        self._failed_s: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.verdict = ""  # why the watch itself ended the run
        self.killed: set[int] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and every rank that is still there, with the children of all ranks."""
        self._stop.set()
        self._thread.join()
        self.kill()
        for pid in self.pids().values():
            _kill_group(pid)

    def kill(self) -> None:
        """SIGKILL for every rank that still runs, with its own children."""
        for pid in self.pids().values():
            if is_alive(pid):
                self.killed.add(pid)
                _kill_group(pid)

    def hurry(self) -> None:
        """The run is over; whoever does not leave within the grace time is killed."""
        self._failed_s = self._failed_s or time.monotonic()

    def pids(self) -> dict[int, int]:
        """Rank → process, of the ranks that have started."""
        files = {rank: pid_file(self._folder, rank) for rank in range(self._world_size)}
        return {rank: int(text) for rank, file in files.items() if file.exists() and (text := file.read_text())}

    def beats(self) -> list[Beat]:
        """The latest note of every rank."""
        found = [read_beat(beat_file(self._folder, rank)) for rank in range(self._world_size)]
        self._latest = [new or old for new, old in zip(found, self._latest, strict=True)]
        return self._latest

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            now = time.monotonic()
            beats, pids = self.beats(), self.pids()
            if any(error_file(self._folder, rank).exists() for rank in range(self._world_size)) or any(
                not is_alive(pid) and beats[rank].ended != FINISHED for rank, pid in pids.items()
            ):
                self.hurry()
            if self._failed_s is not None:
                if now - self._failed_s > self._limits.grace_s:
                    self.kill()
                continue
            stuck, is_hopeless = self._patience.judge(beats, now)
            if stuck:
                told = tell_stuck(beats, stuck, self._stacks(beats), now)
                if is_hopeless:
                    self.verdict = told
                    self.kill()
                else:
                    _log.warning("%s", told)

    def _stacks(self, beats: Sequence[Beat]) -> list[str]:
        """Where each rank is in the code; the ranks have installed `faulthandler` for this signal."""
        for beat in beats:
            if beat.pid and is_alive(beat.pid):
                os.kill(beat.pid, STACK_SIGNAL)
        time.sleep(_STACK_WAIT_S)
        return [innermost_line(stack_file(self._folder, rank)) for rank in range(self._world_size)]


def stuck_ranks(beats: Sequence[Beat], now_s: float, limit_s: float) -> list[int]:
    """Ranks that hold up the run: silent for `limit_s` outside a collective, or, if none is, all that wait in one.

    A rank that waits while another works is not stuck; when every running rank waits, they wait for different things.
    """
    running = [rank for rank, one in enumerate(beats) if not one.ended]
    limits_s = [limit_s if one.pid else max(limit_s, _START_S) for one in beats]
    silent = [rank for rank in running if now_s - beats[rank].at_s > limits_s[rank]]
    working = [rank for rank in running if not beats[rank].waiting]
    if working:
        return [rank for rank in working if rank in silent]
    return silent if silent == running else []


def tell_stuck(beats: Sequence[Beat], stuck: Sequence[int], lines: Sequence[str], now_s: float) -> str:
    """One sentence: the ranks without progress, and what the others do meanwhile."""

    def says(rank: int) -> str:
        return f"rank {rank} {beats[rank].says(now_s)}" + (f" ({lines[rank]})" if lines[rank] else "")

    others = [says(rank) for rank in range(len(beats)) if rank not in stuck]
    meanwhile = f"; meanwhile {'; '.join(others)}" if others else ""
    return f"no progress: {'; '.join(says(rank) for rank in stuck)}{meanwhile}"


def innermost_line(path: Path) -> str:
    """ "forward in linear.py:12" of the newest stack that faulthandler wrote, the first frame outside torch."""
    text = path.read_text(errors="replace").rpartition("most recent call first")[2] if path.exists() else ""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', text)
    ours = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{ours[0][2]} in {Path(ours[0][0]).name}:{ours[0][1]}" if ours else ""


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended but was not yet collected by its parent counts as gone."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _kill_group(pid: int) -> None:
    """Each worker leads a process group, so its own children go with it."""
    with suppress(ProcessLookupError):  # it left in between
        os.killpg(pid, signal.SIGKILL)
