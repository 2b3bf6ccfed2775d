"""What ranks tell each other beyond the statistics of a layer."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from msmodelslim.distributed import wire
from msmodelslim.distributed.dist_helper import DistHelper
from msmodelslim.processor.base import BatchProcessRequest

T = TypeVar("T")
_CALL = "results of the analysis"


def shared_names(request: BatchProcessRequest) -> Callable[[str], bool]:
    """Tells of a module of the layer, as it is now, whether all ranks hold it."""
    if not dist.is_initialized():
        return lambda name: True
    helper = DistHelper(request.module, prefix=request.name)
    shared = {name for name, _ in request.module.named_modules(prefix=request.name) if helper.is_shared(name)}
    return lambda name: name in shared


def union(own: dict[str, T]) -> dict[str, T]:
    """The entries of all ranks; every rank calls it. Values are plain data, the same wherever a name is twice."""
    where = wire.members(None, _CALL)
    if where is None:
        return own
    return {
        name: value
        for entries in wire.exchange(where, _CALL, {"entries": own})
        for name, value in entries["entries"].items()
    }
