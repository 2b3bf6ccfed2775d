"""How a run on several devices ends when something goes wrong: `python -m benchmarks.faults [--repeat N]`.

Each fault is put into the whole command, on a tiny model, on two ranks (four where it says so), with an earlier result
at the target. The table tells the seconds from the fault to the last process and port gone, the exit code, what the
person saw, and what was left behind: nothing, or the run of this program fails.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.workload import store
from tests import fixtures
from tests.command_run import Run, quant_words
from tests.test_faults import hashes, write_samples


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        name: in words.
        steps: options of the faulty steps.
        devices: ranks.
        send: signal to the command, when the fault is reached.
        limits: environment of the command.
    """

    name: str
    steps: tuple[dict[str, Any], ...]
    devices: int = 2
    send: int | None = None
    limits: dict[str, str] = field(default_factory=dict)


_SLEEP = ({"how": "sleep"},)
FAULTS = (
    Fault("user's error in the forward", ({"how": "user", "phase": "forward"},)),
    Fault("bug in the forward", ({"how": "bug", "phase": "forward"},)),
    Fault("bug in the forward, 4 ranks", ({"how": "bug", "phase": "forward", "rank": 2},), 4),
    Fault("statistic of another shape", ({"how": "shape"},)),
    Fault("write refused by the kernel", ({"how": "file_limit"},)),
    Fault("SIGKILL of a rank", ({"how": "kill"},)),
    Fault("SIGKILL of a rank, 4 ranks", ({"how": "kill", "rank": 3},), 4),
    Fault(
        "error; the other rank computes and ignores SIGTERM",
        ({"how": "sleep", "rank": 0, "phase": "preprocess", "deaf": [0]}, {"how": "user", "phase": "preprocess"}),
    ),
    Fault("SIGINT to the command", _SLEEP, send=signal.SIGINT),
    Fault("SIGTERM to the command", _SLEEP, send=signal.SIGTERM),
    Fault("SIGTERM, and both ranks ignore it", ({"how": "sleep", "deaf": [0, 1]},), send=signal.SIGTERM),
    Fault("SIGKILL of the command", _SLEEP, send=signal.SIGKILL),
    Fault(
        "a rank hangs; limit 5 s",
        _SLEEP,
        limits={"MSMODELSLIM_STUCK_AFTER_S": "2", "MSMODELSLIM_GIVE_UP_AFTER_S": "5"},
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs of each fault; the slowest counts")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        model, dataset = fixtures.t_dense(folder / "model"), write_samples(folder / "samples.jsonl", 7)
        done = Run(folder / "first", quant_words(folder / "in", model, folder / "earlier", dataset, 1)).finish()
        assert done.code == 0, done.err
        for fault in FAULTS:
            found = [measure(folder, model, dataset, fault) for _ in range(args.repeat)]
            rows.append(max(found, key=lambda row: row["seconds"]))
            print(f"{fault.name}: {rows[-1]['seconds']} s", file=sys.stderr)
    store("faults", {"faults": rows, "repeat": args.repeat})
    show(rows)
    if any(row["left"] for row in rows):
        sys.exit("something was left behind")


def measure(folder: Path, model: Path, dataset: Path, fault: Fault) -> dict[str, Any]:
    """One row: the fault in one run of the command."""
    place = Path(tempfile.mkdtemp(dir=folder))
    target = place / "results" / "out"
    shutil.copytree(folder / "earlier", target)
    steps = [{"type": "fault", "folder": str(place / "run"), **step} for step in fault.steps]
    words = quant_words(place / "in", model, target, dataset, fault.devices, steps)
    run = Run(place / "run", [*words, "--overwrite"], fault.limits, warm=False)
    run.wait_for_fault()
    if fault.send is not None:
        run.send(fault.send)
    ended = run.finish()
    left = list(ended.left)
    left += [f"file {path.name}" for path in target.parent.iterdir() if path != target]
    if hashes(target) != hashes(folder / "earlier"):
        left.append("a changed earlier result")
    seen = [line for line in ended.err.splitlines() if not line.startswith("INFO ")]
    return {
        "fault": fault.name,
        "ranks": fault.devices,
        "seconds": round(ended.seconds, 2),
        "exit_code": ended.code,
        "seen": seen,
        "left": left,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("fault", "seconds", "exit", "seen", "left", title="from the fault to the last process and port gone")
    for row in rows:
        seen = "\n".join(row["seen"])
        table.add_row(row["fault"], f"{row['seconds']:.2f}", str(row["exit_code"]), seen, ", ".join(row["left"]) or "–")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
