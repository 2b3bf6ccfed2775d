"""One run of the command line in processes of its own, watched from outside: how it ended and what it left.

Processes of the run are known by a file that all of them hold open and by a variable in their environment, so that also
one whose parent is gone is found.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.run_ranks import _CONTEXT

REPOSITORY = Path(__file__).parents[1]
_MARK = "MSMODELSLIM_TEST_RUN"
_LOOK_S = 0.05
_CLONE_NEWNS = 0x20000  # linux/sched.h
_TORCH_CACHE = "torchinductor_"  # an empty folder a user, made when transformers is imported
QCONFIG = {
    "act": {"dtype": "int8", "scope": "per_tensor", "symmetric": True, "method": "minmax"},
    "weight": {"dtype": "int8", "scope": "per_channel", "symmetric": True, "method": "minmax"},
}


@dataclass
class Ended:
    """What was seen of a run that is over.

    Args:
        code: exit code, or minus a signal.
        out, err: everything it wrote.
        seconds: from the fault, or the signal, to the last process gone; NaN without a fault.
        processes: how many processes were seen at once, at most.
        left: what is wrong afterwards: processes, ports, temporary files.
    """

    code: int
    out: str
    err: str
    seconds: float
    processes: int
    left: list[str] = field(default_factory=list)

    @property
    def told(self) -> list[str]:
        """Lines that tell of an error."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Run:
    """A started command. `warm` forks it from a process that has torch imported; else `python -m msmodelslim`.

    Args:
        folder: for its files; empty.
        words: the command line, after the program's name.
        environment: variables to set.
        launcher: words of an outer launcher, such as torchrun, between the interpreter and `-m msmodelslim`.
        prefix: words before the interpreter, such as `ip netns exec one`.
        disk: where a warm run sees a file system of 2 MB; what it leaves there is listed in `left_on_disk`.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        environment: dict[str, str] | None = None,
        *,
        warm: bool = True,
        launcher: Sequence[str] = (),
        prefix: Sequence[str] = (),
        disk: Path | None = None,
    ) -> None:
        self.folder = folder
        self._ports: set[int] = set()
        self._most = 0
        self._signalled: float | None = None
        # torchrun never removes its own folder of logs
        self._not_ours = (_TORCH_CACHE, "torchelastic_") if launcher else _TORCH_CACHE
        self._token = uuid.uuid4().hex
        for name in ("temporary", "plugins"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        _write_plugin(folder / "plugins")
        values = {
            _MARK: self._token,
            "TMPDIR": str(folder / "temporary"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{REPOSITORY}:{folder / 'plugins'}",
            **(environment or {}),
        }
        self._marker = folder / "marker"
        self._marker.touch()
        if warm and not launcher and not prefix:
            self._warm: Any = _CONTEXT.Process(target=_command, args=(folder, list(words), values, disk))
            self._warm.start()
            self.pid: int = self._warm.pid
        else:
            self._warm = None
            command = [*prefix, sys.executable, *launcher, "-m", "msmodelslim", *words]
            with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err, self._marker.open() as marker:
                self._cold = subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    env=os.environ | values,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    pass_fds=(marker.fileno(),),
                    start_new_session=True,
                )
            self.pid = self._cold.pid

    def wait_for(self, seen: Any, what: str, timeout_s: float = 90) -> None:
        """Wait until `seen()` is true."""
        deadline = time.monotonic() + timeout_s
        while not seen():
            assert self._code() is None, f"it ended before {what}: {self.err()}"
            assert time.monotonic() < deadline, f"{what} was not seen in {timeout_s} s: {self.err()}"
            self._look()
            time.sleep(_LOOK_S)

    def wait_for_fault(self) -> None:
        self.wait_for((self.folder / "fault").exists, "the fault")

    def err(self) -> str:
        path = self.folder / "err"
        return path.read_text() if path.exists() else ""

    def send(self, signum: int) -> None:
        """Signal the process that was started, as a person or a scheduler does."""
        self._look()
        self._signalled = time.time()
        os.kill(self.pid, signum)

    def finish(self, timeout_s: float = 120, gone_s: float = 20) -> Ended:
        """Wait for the end of the command, then of all its processes; whatever is left is killed and told."""
        deadline = time.monotonic() + timeout_s
        try:
            while (code := self._code()) is None:
                if time.monotonic() > deadline:
                    raise AssertionError(f"no end within {timeout_s} s: {self.err()}")
                self._look()
                time.sleep(_LOOK_S)
            deadline = time.monotonic() + gone_s
            while (left := self._left()) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        finally:
            gone = time.time()
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        started = self._signalled
        if started is None and (self.folder / "fault").exists():
            started = float((self.folder / "fault").read_text())
        return Ended(
            code,
            (self.folder / "out").read_text(),
            self.err(),
            gone - started if started else float("nan"),
            self._most,
            left,
        )

    def _left(self) -> list[str]:
        """Processes, ports and temporary files of the run that are still there."""
        left = [f"process {pid}" for pid in self.processes()]
        left += [f"port {port}" for port in sorted(self._ports & _listening(psutil.net_connections("tcp")))]
        temporary = (path.name for path in (self.folder / "temporary").iterdir())
        return left + [f"temporary {name}" for name in temporary if not name.startswith(self._not_ours)]

    def processes(self) -> list[int]:
        """Processes of this run that are there now."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_mine(pid)]  # noqa: PTH208

    def _is_mine(self, pid: int) -> bool:
        if pid == os.getpid():
            return False
        try:
            if self._token.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            return any(path.readlink() == self._marker for path in Path(f"/proc/{pid}/fd").iterdir())
        except (OSError, ValueError):  # gone meanwhile
            return False

    def _look(self) -> None:
        found = self.processes()
        self._most = max(self._most, len(found))
        for pid in found:
            with suppress(psutil.Error):
                self._ports |= _listening(psutil.Process(pid).net_connections("tcp"))

    def _code(self) -> int | None:
        return self._warm.exitcode if self._warm is not None else self._cold.poll()


def run(folder: Path, words: Sequence[str], environment: dict[str, str] | None = None, **options: Any) -> Ended:
    """The whole of a command."""
    return Run(folder, words, environment, **options).finish()


def quant_words(
    folder: Path,
    model: Path,
    save_path: Path,
    dataset: Path,
    devices: int,
    process: Sequence[dict[str, Any]] = (),
    spec: dict[str, Any] | None = None,
) -> list[str]:
    """Words of a static W8A8 run with more steps before it; writes the recipe."""
    steps = [*process, {"type": "linear_quant", "qconfig": QCONFIG}]
    content = {
        "apiversion": "modelslim_v1",
        "metadata": {"config_id": "faults"},
        "spec": {"process": steps, "save": [{"type": "compressed_tensors"}], **(spec or {})},
    }
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(content))
    paths = {"model_path": model, "save_path": save_path, "config_path": recipe, "dataset": dataset}
    words = ["quant", *(word for name, path in paths.items() for word in (f"--{name}", str(path))), "--device", "cpu"]
    return (
        [*words, "--device_id", *map(str, range(devices)), "--threads", "1"] if devices else [*words, "--threads", "1"]
    )


def _command(folder: Path, words: list[str], environment: dict[str, str], disk: Path | None) -> None:
    """The child that a warm run is: as if it had been started by its own command line."""
    os.setsid()
    os.environ.update(environment)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    tempfile.tempdir = None
    sys.path.append(environment["PYTHONPATH"].rpartition(":")[2])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(os.open(folder / "marker", os.O_RDONLY), True)
    import tests.fault_plugin  # noqa: F401 - its server looked for plug-ins before this one was there
    from msmodelslim.cli import main

    if disk is not None:
        _mount(disk)
    try:
        sys.exit(main(words))
    finally:
        if disk is not None:
            (folder / "left_on_disk").write_text("\n".join(str(path.relative_to(disk)) for path in disk.rglob("*")))


def _mount(disk: Path) -> None:
    """From here on this process and its children see a small file system at `disk`; nobody else does."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        raise OSError("unshare needs root")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=True)


def _write_plugin(folder: Path) -> None:
    """An installed distribution, as Python sees it, whose entry point is the test's module."""
    info = folder / "fault_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fault_plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[msmodelslim.plugins]\nfault = tests.fault_plugin\n")


def _listening(connections: Sequence[Any]) -> set[int]:
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
