"""The one file that says npu, cuda, cpu.

A device is (kind, index). On the CPU an index stands for a slice of the cores: one process each, all of them in the
same memory. torch is imported where it is used, so that the command line can read a device without waiting for it.
"""

import ctypes
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msmodelslim.errors import EnvError, SchemaValidateError

if TYPE_CHECKING:
    import torch

#: kind → backend of its collectives, the kind `auto` prefers first
_BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
_MIB = 1 << 20
_log = logging.getLogger(__name__)


def parse_device(device: str, device_id: list[int] | None) -> tuple[str, tuple[int, ...]]:
    """What the user asked for, as (kind, indices). Nothing is said yet about what the machine has.

    Args:
        device: `npu`, `cuda`, `cpu` or `auto` (the best kind present); or one of them with indices, `npu:0,1`.
        device_id: indices given apart; they win over those in `device`, with a warning.

    Returns:
        One or more indices; when none were given (0,), or one a process that torchrun has started on this machine.

    Raises:
        SchemaValidateError: unknown kind; an index that is no integer, negative, or given twice; all of them at once.
    """
    word, _, rest = (part.strip() for part in device.partition(":"))
    kinds, problems = ("auto", *_BACKENDS), []
    if word.lower() not in kinds:
        problems.append(f"{word!r} is not a device; write one of {', '.join(kinds)}")
    indices: list[int] = []
    for part in rest.split(",") if rest else ():
        try:
            indices.append(int(part))
        except ValueError:
            problems.append(f"{part.strip()!r} is not an index; write it like {word}:0,1")
    if device_id and rest:
        _log.warning("device: --device_id %s is used, not the indices of %s", " ".join(map(str, device_id)), device)
    if device_id:
        indices = list(device_id)
    problems += [f"index {index} is negative" for index in indices if index < 0]
    problems += [f"index {index} is given twice" for index in sorted(set(indices)) if indices.count(index) > 1]
    if problems:
        raise SchemaValidateError(f"device {device!r}: {'; '.join(problems)}", "give each device once, like npu:0,1")
    kind = word.lower()
    # torchrun says how many processes it has started on this machine: one device each.
    given = tuple(indices) or tuple(range(int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return _best() if kind == "auto" else kind, given


def parse_present(device: str, device_id: list[int] | None) -> tuple[str, tuple[int, ...]]:
    """`parse_device`, checked by `check_present`."""
    kind, indices = parse_device(device, device_id)
    check_present(kind, indices)
    return kind, indices


def check_present(kind: str, indices: tuple[int, ...]) -> None:
    """Raise EnvError if the machine lacks one of the devices; one line that says what is there.

    A CPU index is a slice of the cores, so any is there; more of them than cores is a warning, since they share cores.
    """
    here = present()
    if kind == "cpu":
        if len(indices) > here["cpu"]:
            _log.warning(
                "%d ranks share %d cores; more ranks than cores is slower, not faster", len(indices), here["cpu"]
            )
        return
    lacking = [index for index in indices if index >= here.get(kind, 0)]
    if not lacking:
        return
    asked = ", ".join(f"{kind}:{index}" for index in lacking)
    there = ", ".join(f"{name}:0 to {name}:{count - 1}" if count > 1 else f"{name}:0" for name, count in here.items())
    why = " (torch_npu is not installed)" if kind == "npu" and _npu() is None else ""
    raise EnvError(f"{asked} is not on this machine{why}; it has {there}", "choose among these with --device")


def present() -> dict[str, int]:
    """Kind → number of devices, of the kinds that are there, best first. The CPU counts its usable cores."""
    counts = {kind: _accelerator(kind) for kind in _BACKENDS if kind != "cpu"}
    return {kind: part.device_count() for kind, part in counts.items() if part and part.is_available()} | {
        "cpu": _cores()
    }


def torch_device(kind: str, index: int) -> "torch.device":
    """torch's name of the device; the slices of the CPU are all `cpu`."""
    import torch

    return torch.device("cpu") if kind == "cpu" else torch.device(kind, index)


def set_current(kind: str, index: int) -> None:
    """Make the device the one that this process uses when it names a kind alone. Nothing to do on the CPU."""
    if kind != "cpu":
        _accelerator(kind).set_device(index)


def empty_cache(kind: str) -> None:
    """Give memory that is held but not used back to the device; on a CPU, what glibc keeps of freed tensors."""
    if kind != "cpu":
        _accelerator(kind).empty_cache()
    elif sys.platform == "linux" and "CS_GNU_LIBC_VERSION" in os.confstr_names:
        ctypes.CDLL(None).malloc_trim(0)


def collective_backend(kind: str) -> str:
    """Name of the `torch.distributed` backend that works on tensors of this kind."""
    return _BACKENDS[kind]


def start_method(kind: str) -> str:
    """How processes for devices of this kind are started: "fork" or "spawn", as `multiprocessing` calls them.

    A forked process shares what its parent has imported, so it starts at once and needs little memory of its own; an
    accelerator's runtime does not survive a fork.
    """
    return "fork" if kind == "cpu" and sys.platform == "linux" else "spawn"


def set_threads(kind: str, threads: int) -> None:
    """Host threads of this process; results on the CPU depend on their number, so there it is exact.

    Elsewhere host threads only serve the device: never more than there are cores.
    """
    import torch

    torch.set_num_threads(threads if kind == "cpu" else min(threads, _cores()))


def peak_memory_mib(kind: str) -> float:
    """Most memory this process has held so far: on the CPU its resident set, mapped files with it; else tensors."""
    if kind != "cpu":
        return _accelerator(kind).max_memory_allocated() / _MIB
    if sys.platform == "linux":
        # Not getrusage: its figure starts at the peak of the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024  # KiB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MIB


def free_memory_bytes() -> int | None:
    """Host memory that new data can take without pushing other data out; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    lines = Path("/proc/meminfo").read_text(encoding="ascii")
    return int(lines.partition("MemAvailable:")[2].split()[0]) << 10  # KiB


def _best() -> str:
    return next(iter(present()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _accelerator(kind: str) -> Any:
    """torch's module for the kind; None for npu without torch_npu."""
    import torch

    return torch.cuda if kind == "cuda" else _npu()


def _npu() -> Any:
    try:
        importlib.import_module("torch_npu")
    except ImportError:
        return None
    import torch

    return torch.npu  # type: ignore[attr-defined] # there since torch_npu was imported
