"""A runner on one rank's share of the samples: each sample goes to one rank, and a rank may get none."""

from collections.abc import Sequence
from typing import Any, TypeVar

from msmodelslim.calibration import rank_share
from msmodelslim.distributed import deal
from msmodelslim.processor.base import BaseSessionProcessor, RunContext
from msmodelslim.runner.base import BaseRunner

R = TypeVar("R", bound=BaseRunner)


def runner_on_share(
    cls: type[R],
    context: RunContext,
    steps: Sequence[BaseSessionProcessor],
    samples: Sequence[dict[str, Any]],
    rank: int,
    world_size: int,
    title: str = "quantize",
    propagates: bool = True,
) -> R:
    """The runner of one rank; every rank is given all samples."""
    if any(step.sums_matrices() for step in steps):
        shares = [list(ids) for ids in deal(len(samples), world_size)]
    else:
        every = list(range(len(samples)))
        shares = [rank_share(every, one, world_size) for one in range(world_size)]
    mine = shares[rank]
    held_by = {sample: one for one, share in enumerate(shares) for sample in share}
    return cls(
        context,
        steps,
        [samples[index] for index in mine],
        mine,
        len(samples),
        shown=rank == 0,
        rounds=max(map(len, shares)),
        spare=samples[0] if samples and not all(shares) else None,
        title=title,
        propagates=propagates,
        holders=[held_by[sample] for sample in sorted(held_by)] if world_size > 1 else (),
    )
