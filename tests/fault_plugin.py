"""Steps of a recipe that go wrong on purpose, on one rank, at a chosen layer and moment.

Not part of the package: a run sees them through the entry-point group for plug-ins, as it sees other people's steps.
"""

import logging
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel

from msmodelslim.distributed import sync_base_operation
from msmodelslim.errors import InvalidModelError
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest
from msmodelslim.registry import register


class _FaultConfig(BaseModel, frozen=True, extra="forbid"):
    how: Literal["bug", "warn", "user", "shape", "kill", "sleep", "file_limit", "full_disk"]
    rank: int = 1
    layer: int = 1
    phase: Literal["preprocess", "forward", "postprocess"] = "postprocess"
    seconds: float = 600  # of a sleep
    limit_bytes: int = 50_000  # how far a rank may write into a file
    deaf: tuple[int, ...] = ()  # ranks that ignore SIGTERM
    disk: str = ""  # to fill
    folder: str = ""  # where the time of the fault is noted


@register("fault")
class FaultProcessor(BaseSessionProcessor):
    """Changes nothing, but fails as its options say."""

    Config: ClassVar[Any] = _FaultConfig

    def pre_run(self) -> None:
        if _rank() in self.config.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def preprocess(self, request: BatchProcessRequest) -> None:
        if self.config.phase == "forward" and request.name.endswith(f".{self.config.layer}"):
            handle = request.module.mlp.register_forward_pre_hook(lambda *_: (handle.remove(), self._fail())[0])
        self._come_to(request, "preprocess")

    def postprocess(self, request: BatchProcessRequest) -> None:
        self._come_to(request, "postprocess")

    def support_distributed(self) -> bool:
        return True

    def _come_to(self, request: BatchProcessRequest, phase: str) -> None:
        if phase == self.config.phase and request.name.endswith(f".{self.config.layer}"):
            self._fail()

    def _fail(self) -> None:
        how, here = self.config.how, _rank() == self.config.rank
        if here:
            (Path(self.config.folder) / "fault").write_text(repr(time.time()))
        if how == "shape":  # all ranks come to the same call
            sync_base_operation(torch.ones(2 if here else 1), "max", name="model.layers.1.stat")
        elif here:
            _FAULTS[how](self.config)


@register("lonely")
class LonelyProcessor(BaseSessionProcessor):
    """Says nothing about several ranks, so it may not run on them."""


@register("lonely_too")
class LonelyTooProcessor(BaseSessionProcessor):
    """Another one."""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _bug(_: _FaultConfig) -> None:
    torch.ones(2).view(3)


def _user(_: _FaultConfig) -> None:
    raise InvalidModelError("model.layers.1.w has 3 NaN", "mend the checkpoint")


def _file_limit(config: _FaultConfig) -> None:
    """From now on the kernel refuses what this process writes beyond that byte of any file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (config.limit_bytes, resource.RLIM_INFINITY))


def _full_disk(config: _FaultConfig) -> None:
    """Fill the file system that the result goes to."""
    with (Path(config.disk) / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


_FAULTS = {
    "warn": lambda config: logging.getLogger("msmodelslim.fault").warning("something odd"),
    "bug": _bug,
    "user": _user,
    "kill": lambda config: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda config: time.sleep(config.seconds),
    "file_limit": _file_limit,
    "full_disk": _full_disk,
}
