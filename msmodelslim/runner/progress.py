"""What a person sees while a run goes on: a bar on a terminal, one line a layer elsewhere."""

import logging
import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

log = logging.getLogger(__name__)
_HEARTBEAT_S = 10.0  # of silence, after which the phase that goes on is reported again


class LayerProgress:
    """Shows layer, phase, time gone and time left; silent on ranks other than 0.

    Args:
        title: what is being done.
        total: layers to go.
        shown: False for every rank but the one that speaks for the job.
    """

    def __init__(self, title: str, total: int, shown: bool = True) -> None:
        self._title = title
        self._total = total
        self._shown = shown
        self._start = time.perf_counter()
        self._spoke = self._start
        self._done = 0
        self._layer = ""
        self._phase = ""
        self._over = threading.Event()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[phase]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(title, total=total, phase="")

    def __enter__(self) -> "LayerProgress":
        if self._bar is not None:
            self._bar.start()
        elif self._shown:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()

    def phase(self, layer: str, phase: str) -> None:
        """The run now does `phase` in `layer`."""
        self._layer, self._phase = layer, phase
        if self._bar is not None:
            self._bar.update(self._task, phase=f"{layer}: {phase}")

    def sample(self, done: int, total: int) -> None:
        """`done` of `total` samples of the current forward are through."""
        self.phase(self._layer, f"sample {done}/{total}")

    def layer_done(self) -> None:
        """One more layer is finished."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
        elif self._shown:
            self._say("done")

    def _beat(self) -> None:
        """Report what goes on whenever nothing was said for a while; a phase may take long without a call here."""
        while not self._over.wait(max(0.0, self._spoke + _HEARTBEAT_S - time.perf_counter())):
            if time.perf_counter() >= self._spoke + _HEARTBEAT_S:
                self._say(self._phase)

    def _say(self, phase: str) -> None:
        now = time.perf_counter()
        gone = now - self._start
        left = f", about {gone / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        log.info("%s %d/%d %s: %s, %.1f s%s", self._title, self._done, self._total, self._layer, phase, gone, left)
        self._spoke = now
