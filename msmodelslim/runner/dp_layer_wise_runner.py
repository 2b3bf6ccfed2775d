"""One layer at a time on many devices: each rank calibrates on its own share of the samples.

This runner lives in the process that the user started. It checks that the run can be distributed, then starts one
process a device; in each of them the run's entry builds everything anew and drives a `LayerWiseRunner`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from msmodelslim.distributed.launch import launch
from msmodelslim.distributed.outer_launcher import outer_rank, outer_world_size
from msmodelslim.errors import UnsupportedError
from msmodelslim.processor.base import BaseSessionProcessor

log = logging.getLogger(__name__)


class DPLayerWiseRunner:
    """Starts one rank a device, or runs on the only one.

    Args:
        entry: "module:function", called as `entry(job, rank, world_size)` in each rank.
        job: plain data for it.
        device: kind of the devices.
        device_ids: one index a rank.
        steps: processors and saver of the run, asked whether they may run on several ranks.
        alone: does the whole run in this process, for one device.
        threads: CPU threads a rank; None is its share of the cores.
        joins: True when an outer launcher started this process as one of several ranks.
    """

    def __init__(
        self,
        entry: str,
        job: dict[str, Any],
        device: str,
        device_ids: Sequence[int],
        steps: Sequence[BaseSessionProcessor],
        alone: Callable[[], None],
        threads: int | None = None,
        joins: bool = False,
    ) -> None:
        self._entry = entry
        self._job = job
        self._device = device
        self._device_ids = list(device_ids)
        self._steps = list(steps)
        self._alone = alone
        self._threads = threads
        self._joins = joins

    def run(self) -> None:
        """The whole run, on all devices.

        Raises:
            UnsupportedError: some steps cannot run on several ranks; names all of them, before anything is started.
            ModelslimError: what the first failing rank raised.
        """
        if len(self._device_ids) <= 1 and not self._joins:
            log.warning("Number of devices <= 1, falling back to single-device execution")
            self._alone()
            return
        refuse_unsupported(self._steps)
        if not outer_rank():
            ranks = outer_world_size() if self._joins else len(self._device_ids)
            log.info("Starting distributed execution with %d devices: %s", ranks, self._device_ids)
        launch(
            self._entry,
            self._job,
            len(self._device_ids),
            device=self._device,
            device_ids=self._device_ids,
            threads=self._threads,
            pin=self._device == "cpu",
            log_level=log.getEffectiveLevel(),
        )


def refuse_unsupported(steps: Sequence[BaseSessionProcessor]) -> None:
    """Raise when some step, or a step inside it, cannot run on several ranks, naming all of them."""
    unsupported = list(dict.fromkeys(name for step in steps for name in _unsupported(step)))
    if unsupported:
        raise UnsupportedError(
            f"The following processors do not support distributed quantization: {unsupported}",
            "run on one device, or override support_distributed() once the step gives the same result on any number",
        )


def _unsupported(step: BaseSessionProcessor) -> list[str]:
    inner = [name for child in step.children for name in _unsupported(child)]
    return inner or ([] if step.support_distributed() else [step.registered_name])
