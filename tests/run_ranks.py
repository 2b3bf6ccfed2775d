"""`run_ranks(n, function, *args)`: call `function(rank, *args)` on n real ranks over gloo, in processes of their own.

The processes are forked from a server that has imported torch once, so a call costs a tenth of a second and leaves
nothing behind. `function` must be importable by name (a module-level function); arguments and results are pickled.
"""

import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

_TRIES = 3
_NOT_MET = 77  # exit code of a rank that did not find the others
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["__main__", "pytest", "torch.distributed", "tests.warm"])


class _NotMetError(Exception):
    """The ranks did not find each other: on a busy machine gloo may meet a stranger at a port. Worth another try."""


class RanksTimeoutError(AssertionError):
    """Some ranks gave no answer in time; they were killed."""


class RankRunner:
    """What the `run_ranks` fixture gives: call it for results, or ask for the errors of every rank."""

    def __call__(self, world_size: int, function: Callable, *args: Any, timeout_s: float = 60) -> list[Any]:
        """The result of every rank, in rank order; raises the error of the lowest rank that failed."""
        answers = _run(world_size, function, args, timeout_s)
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                error.add_note(f"(on rank {rank} of {world_size})")
                raise error
        return [result for result, _ in answers]

    def errors(self, world_size: int, function: Callable, *args: Any, timeout_s: float = 60) -> list[Exception | None]:
        """The error of every rank, None where there was none."""
        return [error for _, error in _run(world_size, function, args, timeout_s)]


@pytest.fixture
def run_ranks() -> RankRunner:
    return RankRunner()


def _run(world_size: int, function: Callable, args: tuple, timeout_s: float) -> list[tuple[Any, Exception | None]]:
    for _ in range(_TRIES - 1):
        with suppress(_NotMetError):
            return _run_once(world_size, function, args, timeout_s)
    return _run_once(world_size, function, args, timeout_s)


def _run_once(world_size: int, function: Callable, args: tuple, timeout_s: float) -> list[tuple[Any, Exception | None]]:
    call = _packed((function, args))
    workers, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            here, there = _CONTEXT.Pipe()
            worker = _CONTEXT.Process(
                target=_work, args=(there, rank, world_size, f"{folder}/store", sys.path, call), daemon=True
            )
            worker.start()
            there.close()
            workers.append(worker)
            pipes.append(here)
        try:
            return _collect(pipes, workers, timeout_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _collect(pipes: list[Connection], workers: list, timeout_s: float) -> list[tuple[Any, Exception | None]]:
    answers: dict[int, tuple[Any, Exception | None]] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in answers]
            raise RanksTimeoutError(f"ranks {missing} gave no answer within {timeout_s} s; answered: {answers}")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answers[rank] = _unpacked(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                workers[rank].join()
                if workers[rank].exitcode == _NOT_MET:
                    raise _NotMetError(f"rank {rank}") from None
                answers[rank] = None, ChildProcessError(f"rank {rank} ended with code {workers[rank].exitcode}")
    return [answers[rank] for rank in range(len(pipes))]


def _work(pipe: Connection, rank: int, world_size: int, store: str, path: list[str], call: bytes) -> None:
    torch.set_num_threads(1)
    sys.path[:] = path
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    result, error = None, None
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=10),
        )
    except RuntimeError:  # torch has several kinds of it for this
        os._exit(_NOT_MET)
    try:
        function, args = _unpacked(call)
        result = function(rank, *args)
    except Exception as failure:  # whatever the function under test raises is the answer
        failure.add_note("".join(traceback.format_exception(failure)))
        error = failure
    pipe.send_bytes(_answer(result, error))
    while True:  # others may still need this rank's sockets; whoever started it ends it when all have answered
        signal.pause()


def _answer(result: Any, error: Exception | None) -> bytes:
    answer = _packed((result, error))
    try:
        _unpacked(answer)
    except TypeError:  # an error whose class cannot be made from its args
        return _packed((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return answer


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)  # plain pickle cannot read float8 tensors back
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
