"""A directory that appears at its place whole, or not at all.

Everything is written to a hidden sibling, `.<name>.partial-<pid>`, and renamed at the end; all ranks of a job write to
the same one, named after the process that leads it. What an earlier result left at the place is moved aside first and
removed last, so a crash in between loses neither.
"""

import os
import re
import shutil
from pathlib import Path


class OutputDirectory:
    """The hidden sibling, and the ways it ends.

    Args:
        target: where the result shall be; replaced as a whole if it exists.
        leader: process whose number the sibling carries; this one when left out.
    """

    def __init__(self, target: Path, leader: int | None = None) -> None:
        self.target = target.resolve()  # a link keeps pointing there
        self._leader = os.getpid() if leader is None else leader
        self.partial = self._sibling("partial", self._leader)

    def open(self) -> None:
        """Create the sibling. Those of processes that are gone are removed; a result they moved aside is put back."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self.partial.mkdir()

    def commit(self) -> None:
        """Flush to disk and put the sibling in place of the target."""
        for path in [*self.partial.rglob("*"), self.partial]:
            _sync(path)
        aside = self._sibling("old", self._leader)
        replaces = self.target.exists()
        if replaces:
            self.target.rename(aside)
        self.partial.rename(self.target)
        _sync(self.target.parent)
        if replaces:
            shutil.rmtree(aside)

    def discard(self) -> None:
        """Remove the sibling, if it is there; several ranks may do so at once."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _sibling(self, what: str, pid: int) -> Path:
        return self.target.parent / f".{self.target.name}.{what}-{pid}"

    def _sweep(self) -> None:
        ours = re.compile(rf"\.{re.escape(self.target.name)}\.(partial|old)-(\d+)")
        for path in sorted(self.target.parent.iterdir()):
            found = ours.fullmatch(path.name)
            # This run has not made one yet: what carries its number is older.
            if found is None or (int(found[2]) != self._leader and _is_running(int(found[2]))):
                continue
            if found[1] == "old" and not self.target.exists():
                path.rename(self.target)
            else:
                shutil.rmtree(path)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # someone else's process
        return True
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
