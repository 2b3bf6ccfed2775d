"""What one rank notes while it is being checked, and how it is read back: a file of JSON lines, one an event.

A rank that hangs or is killed leaves what it had noted until then. Beside the lines each rank keeps one small note of
the collective it is in, which the others look at.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_NOTE_BYTES = 1024


@dataclass(frozen=True)
class Event:
    """One thing that happened on one rank.

    Args:
        kind: "call" (a collective begins), "topology", "helper", "is_shared", "stale", "local_sync", "state",
            "streams", "hang", "error" or "end" (of a run).
        samples: of the run it belongs to.
        layer, processor, phase: where the rank was.
        site: "file.py:12", the line that asked for it.
        what: in words.
        facts: plain data, by kind.
    """

    kind: str
    samples: int
    layer: str = ""
    processor: str = ""
    phase: str = ""
    site: str = ""
    what: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Layer, processor and phase, as far as known."""
        return ", ".join(part for part in (self.layer, self.processor, self.phase) if part) or "the start"


class EventWriter:
    """Appends to the file of one rank; each event is one write."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._note = os.open(_note_path(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)

    def add(self, event: Event) -> None:
        os.write(self._file, json.dumps(asdict(event)).encode() + b"\n")

    def note(self, number: int, call: str, at_s: float) -> None:
        """This rank is in its collective `number`; `call` is "" when it is in none."""
        text = json.dumps({"number": number, "call": call[: _NOTE_BYTES // 4], "at_s": at_s}).encode()
        os.pwrite(self._note, text[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)


def read_events(folder: Path, rank: int) -> list[Event]:
    """Everything that a rank has noted; a line cut short by a kill is left out."""
    path = _path(folder, rank)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [Event(**json.loads(line)) for line in lines]


def read_note(folder: Path, rank: int) -> dict[str, Any] | None:
    """A rank's note of its collective; None before the first."""
    path = _note_path(folder, rank)
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # ValueError: empty, just made
        return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"events_{rank}.jsonl"


def _note_path(folder: Path, rank: int) -> Path:
    return folder / f"note_{rank}"
