"""Watched runs of a recipe on so many ranks: processes start as for a real run, and what they note is read back."""

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from msmodelslim.check_dp.events import Event, read_events
from msmodelslim.check_dp.result_files import ResultFiles, read_result
from msmodelslim.check_dp.witness import Witness
from msmodelslim.distributed.launch import launch
from msmodelslim.distributed.outer_launcher import joins_outer_launcher
from msmodelslim.distributed.watchdog import Limits
from msmodelslim.errors import EnvError, ModelslimError
from msmodelslim.model.families import open_model
from msmodelslim.quant_service import QuantJob, open_session, run_session
from msmodelslim.runner.base import witnesses
from msmodelslim.tiny_model import write_samples, write_tiny_model

_SILENT = logging.CRITICAL  # what went wrong is told by the findings
_GRACE_S = 2.0  # from the first failure until the ranks are killed


@dataclass(frozen=True)
class Trial:
    """What was seen of one run.

    Args:
        ranks, samples: how many of each.
        events: by rank, what it noted during this run.
        result: the files it wrote; None when it did not end.
        verdict: why the launcher ended the run; "" when it ended by itself.
    """

    ranks: int
    samples: int
    events: list[list[Event]]
    result: ResultFiles | None
    verdict: str = ""

    @property
    def title(self) -> str:
        return f"{_count(self.ranks, 'rank')}, {_count(self.samples, 'sample')}"


class Trials:
    """Runs of one job, in a folder that is gone afterwards.

    Args:
        job: model path, recipe and plugins; the rest is set here. An empty model path means the tiny model.
        samples: numbers of samples to run on each number of ranks.
        timeout_s: a rank that makes no progress for so long ends the run.
        hang_after_s: ranks that wait in different collectives for so long end it.

    Raises:
        EnvError: this process is itself a rank of a launcher.
        ModelslimError: the recipe does not fit the model.
    """

    def __init__(self, job: QuantJob, samples: tuple[int, ...], timeout_s: float, hang_after_s: float) -> None:
        if joins_outer_launcher():
            raise EnvError("check-dp starts ranks of its own, and a launcher has started this process", "run it alone")
        self._job = job
        self._samples = samples
        self._timeout_s = timeout_s
        self._hang_after_s = hang_after_s
        self._stack = ExitStack()

    def __enter__(self) -> "Trials":
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="msmodelslim_check_")))
            stack.enter_context(_one_thread())
            if self._job.model_path == Path():
                self._job = replace(self._job, model_path=write_tiny_model(self._folder / "model"))
            config = open_model(self._job.model_path, None).checkpoint.config
            for count in self._samples:
                write_samples(self._file(count), count, config)
            first = replace(self._job, dataset=str(self._file(self._samples[0])), save_path=self._folder / "out")
            #: the run as one process sees it, before any weight is read
            self.session = open_session(first)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, ranks: Sequence[int]) -> list[Trial]:
        """Each number of samples on each number of ranks, one rank first; only that if it fails already."""
        found: list[Trial] = []
        for number in sorted({1, *ranks}):
            found += self._run_on(number)
            if number == 1 and any(trial.result is None for trial in found):
                break
        return found

    def _run_on(self, ranks: int) -> list[Trial]:
        """All numbers of samples, one after the other in the same processes; those after a failure are left out."""
        own = self._folder / f"on{ranks}"
        own.mkdir()
        task = {
            "job": replace(self._job, threads=1, leader=os.getpid(), device_ids=tuple(range(ranks))).plain(),
            "folder": str(own),
            "samples": list(self._samples),
            "files": [str(self._file(count)) for count in self._samples],
            "hang_after_s": self._hang_after_s,
        }
        limits = Limits(stuck_after_s=self._timeout_s, give_up_after_s=self._timeout_s, grace_s=_GRACE_S)
        verdict = ""
        try:
            launch(f"{__name__}:{run_rank.__name__}", task, ranks, threads=1, log_level=_SILENT, limits=limits)
        except ModelslimError as error:
            verdict = str(error)
        events = [read_events(own, rank) for rank in range(ranks)]
        trials = []
        for count in self._samples:
            part = [[event for event in one if event.samples == count] for one in events]
            ended = all(any(event.kind == "end" for event in one) for one in part)
            trials.append(Trial(ranks, count, part, read_result(_out(own, count)) if ended else None, verdict))
            shutil.rmtree(_out(own, count), ignore_errors=True)
            if not ended:
                break
        return trials

    def _file(self, count: int) -> Path:
        return self._folder / f"samples_{count}.jsonl"


def run_rank(task: dict[str, Any], rank: int, world_size: int) -> None:
    """One rank's part of the runs; called in a process group that is ready."""
    folder = Path(task["folder"])
    _silence(folder / f"output_{rank}")
    witness = Witness(folder, rank, world_size, task["hang_after_s"])
    witness.install()
    witnesses.append(witness.see)
    for count, file in zip(task["samples"], task["files"], strict=True):
        witness.begin(count)
        job = replace(QuantJob.from_plain(task["job"]), dataset=file, save_path=_out(folder, count))
        try:
            run_session(open_session(job, rank, world_size), time.perf_counter())
        except BaseException as error:
            witness.error(error)
            raise
        witness.end()
        dist.barrier()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes are forked from this one, and threads of torch's pool do not come along."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _silence(file: Path) -> None:
    """From now on what this process prints goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = file.open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log


def _out(folder: Path, count: int) -> Path:
    return folder / f"out_{count}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
