"""How an error of one rank becomes the error of the job: written down where it happened, raised where it is shown."""

import pkgutil
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from msmodelslim.distributed.watchdog import Place
from msmodelslim.errors import BadSampleError, ModelslimError


class RankFailedError(ModelslimError):
    """A rank ended in a way that is not a user's mistake: an exception, a signal, no progress.

    Args:
        rank: the rank that failed first.
        worker_traceback: its traceback, empty for a signal.
    """

    code = 500

    def __init__(self, message: str, action: str = "", *, rank: int = -1, worker_traceback: str = "") -> None:
        super().__init__(message, action)
        self.rank = rank
        self.worker_traceback = worker_traceback


@dataclass(frozen=True)
class Failure:
    """One rank's error as plain data.

    Args:
        rank: where it happened.
        place: what the rank was doing.
        kind: class of the error, without its module.
        error_class: "module:Class" when it is a `ModelslimError`, else "".
        message: the error's own text.
        action: what to do about it, of a `ModelslimError`.
        raised_at: "file.py:12", the innermost line outside torch.
        lost_peer: raised inside torch's collectives, so most likely the echo of another rank's failure.
        at_s: when, on the machine's monotonic clock.
        traceback: the whole of it.
    """

    rank: int
    place: Place
    kind: str
    error_class: str
    message: str
    action: str
    raised_at: str
    lost_peer: bool
    at_s: float
    traceback: str

    def plain(self) -> dict:
        return asdict(self)

    @classmethod
    def from_plain(cls, found: dict) -> "Failure":
        return cls(**{**found, "place": Place(**found["place"])})

    def error(self) -> ModelslimError:
        """The exception to raise for the job: the same class and message, with rank and place."""
        if not self.error_class:
            return RankFailedError(
                f"rank {self.rank} failed at {self.place}: {self.kind}: {self.message} (raised at {self.raised_at})",
                rank=self.rank,
                worker_traceback=self.traceback,
            )
        cls = pkgutil.resolve_name(self.error_class)
        error = cls.__new__(cls)
        ModelslimError.__init__(error, f"{self.message} (rank {self.rank}, {self.place})", self.action)
        return error


def failure_of(error: BaseException, rank: int, place: Place) -> Failure:
    """Write down `error`, which rank `rank` met at `place`; that of a sample is told of the rank that forwarded it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/torch/" not in frame.filename] or list(frames)
    known = isinstance(error, ModelslimError) and not isinstance(error, RankFailedError)
    cls = type(error)
    return Failure(
        rank=error.rank if isinstance(error, BadSampleError) and error.rank is not None else rank,
        place=place,
        kind=cls.__name__,
        error_class=f"{cls.__module__}:{cls.__qualname__}" if known and "<locals>" not in cls.__qualname__ else "",
        message=error.message if isinstance(error, ModelslimError) else str(error),
        action=error.action if isinstance(error, ModelslimError) else "",
        raised_at=f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "unknown",
        lost_peer=any(_raised_in_collective(one) for one in _chain(error)),
        at_s=time.monotonic(),
        traceback="".join(traceback.format_exception(error)),
    )


class Catch:
    """A `with` block whose error is kept in `error` rather than raised, because other ranks have to hear of it first.

    KeyboardInterrupt and SystemExit pass through.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> "Catch":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False


_when_told: list[Callable[[], None]] = []


def when_told(action: Callable[[], None]) -> None:
    """Do this when this rank's error has been told: what it takes away may be what other ranks work on, and they would
    fail for that before the cause is known."""
    _when_told.append(action)


def was_told() -> None:
    """This rank's error has been told: do what waited for that."""
    while _when_told:
        _when_told.pop()()


def first_of(failures: list[Failure]) -> Failure | None:
    """The failure that caused the others: the earliest that is not the echo of a lost peer, else the earliest."""
    return min(failures, key=lambda one: (one.lost_peer, one.at_s), default=None)


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in found:
        found.append(step)
        step = step.__cause__ or step.__context__
    return found


def _raised_in_collective(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "torch/distributed/" in frames[-1].filename
