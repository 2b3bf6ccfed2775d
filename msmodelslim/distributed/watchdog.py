"""What each rank is doing, noted by the ranks in small files that the starting process reads.

A rank notes its place (layer, processor, phase) and, around each collective, what it waits for. The watch in the
starting process reads these notes: it names a rank that makes no progress and what the others do meanwhile, and after a
failure it kills whoever does not leave by itself. Collectives themselves have no time-out, so a long local phase is no
fault: `beat` now and then says that it goes on.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

_BEAT_BYTES = 2048  # a note is one write of fixed size, so a reader never sees half of one
_WAITING_CHARS = 300


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
        ended: "finished", "terminated" by SIGTERM, or "" while it runs.
    """

    pid: int = 0
    place: Place = field(default_factory=Place)
    waiting: str = ""
    at_s: float = 0.0
    ended: str = ""

    def says(self, now_s: float) -> str:
        doing = f"waits in {self.waiting} at {self.place}" if self.waiting else f"is at {self.place}"
        return self.ended or f"{doing} since {now_s - self.at_s:.0f} s"


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


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Around a collective: this rank waits for the others, so it is not the one that hangs."""
    before = _beat.waiting
    _write(_beat.place, before or what)
    try:
        yield
    finally:
        _write(_beat.place, before)


def start_beats(path: Path) -> None:
    """From now on, notes of this process go to `path`."""
    global _file
    _file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    _write(_beat.place, "")


def end_beats(ended: str) -> None:
    """The last note: this rank leaves on purpose ("finished") or on request ("terminated")."""
    _write(_beat.place, "", ended)


def _write(at: Place, waits_in: str, ended: str = "") -> None:
    global _beat
    _beat = Beat(os.getpid(), at, waits_in[:_WAITING_CHARS], time.monotonic(), ended)
    if _file is not None:
        text = json.dumps(asdict(_beat)).encode()
        os.pwrite(_file, text[:_BEAT_BYTES].ljust(_BEAT_BYTES), 0)


def read_beat(path: Path) -> Beat | None:
    """The latest note in `path`; None before the first."""
    if not path.exists():
        return None
    text = path.read_text(errors="replace").strip()
    if not text.endswith("}"):
        return None
    found = json.loads(text)
    return Beat(**{**found, "place": Place(**found["place"])})


@dataclass
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


def stuck_ranks(beats: Sequence[Beat | None], now_s: float, limit_s: float) -> list[int]:
    """Ranks that hold up the run: silent for `limit_s` outside a collective, or, if none is, all that wait in one.

    A rank that waits while another works is not stuck; when every running rank waits, they wait for different things.
    """
    running = {rank: one for rank, one in enumerate(beats) if one is not None and not one.ended}
    silent = [rank for rank, one in running.items() if now_s - one.at_s > limit_s]
    working = [rank for rank, one in running.items() if not one.waiting]
    if working:
        return [rank for rank in working if rank in silent]
    return silent if len(silent) == len(running) else []


def tell_stuck(beats: Sequence[Beat | None], stuck: Sequence[int], stacks: Sequence[str], now_s: float) -> str:
    """ "rank 1 makes no progress: it is at …, in save (saver.py:12); meanwhile rank 0 waits in …"."""

    def says(rank: int) -> str:
        one = beats[rank]
        where = f" ({stacks[rank]})" if stacks[rank] else ""
        return f"rank {rank} {'has not started' if one is None else one.says(now_s)}{where}"

    others = [says(rank) for rank in range(len(beats)) if rank not in stuck]
    return f"no progress: {'; '.join(says(rank) for rank in stuck)}" + (
        f"; meanwhile {'; '.join(others)}" if others else ""
    )


def is_alive(pid: int) -> bool:
    """Whether the process exists; one that ended but was not yet collected by its parent counts as gone."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill_group(pid: int) -> None:
    """SIGKILL for a worker and its own children: each worker leads a process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it left in between
        return
