"""How often each number flows into linears, and quantiles read off that: exact counts, whatever the order or the rank.

There is one bin for each bfloat16 number, so the inputs of a bfloat16 model are counted as they are and their quantiles
are exact; of other types each value counts as the nearest bfloat16, which is within 2^-9 of it. Bins grow with the
values, so a few outliers do not blur the bulk, as they do in a histogram of equal widths.

Letters: B bins.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.distributed.stat_agree import StatKind
from msmodelslim.distributed.stat_store import StatStore
from msmodelslim.observer.watcher import Watcher

BINS = 1 << 16
_ZERO = BINS // 2
_MAGNITUDE = 0x7FFF  # of a bfloat16, all bits but the sign


def count_values(x: Tensor) -> Tensor:
    """How many elements of x round to each bfloat16 number, int64 [B] in the order of the numbers, NaNs at the ends."""
    bits = x.detach().reshape(-1).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    magnitude = bits & _MAGNITUDE
    return torch.bincount(torch.where(bits < 0, -magnitude, magnitude) + _ZERO, minlength=BINS)


def quantiles(counts_B: Tensor, shares: Sequence[float]) -> list[float]:
    """Values below which these shares lie, between two values linearly, as numpy's default.

    Args:
        counts_B: of at least one value.
        shares: 0 to 1.
    """
    through_B = counts_B.cpu().cumsum(0)
    last = int(through_B[-1]) - 1
    found = []
    for share in shares:
        place = share * last
        low = math.floor(place)
        ends = torch.tensor([low, min(low + 1, last)])
        below, above = _numbers(torch.searchsorted(through_B, ends, right=True)).tolist()
        found.append(below + (above - below) * (place - low))
    return found


def _numbers(bins: Tensor) -> Tensor:
    """The bfloat16 numbers that bins stand for, float64."""
    magnitude = (bins - _ZERO).abs().to(torch.int16).view(torch.bfloat16).double()
    return torch.where(bins < _ZERO, -magnitude, magnitude)


class ValueCountObserver(Watcher):
    """Watches the inputs of linears during a forward; only accumulates, never communicates before `agree`."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, Tensor] = {}

    def watch(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Count the first positional argument of every call of `module` under `name`."""
        counts_B = self._counts[name] = torch.zeros(BINS, dtype=torch.int64, device=device)

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel():
                counts_B.add_(count_values(args[0]))

        self._handles.append(module.register_forward_pre_hook(measure))

    def agree(
        self, sample_ids: Sequence[int], sample_count: int, is_shared: Callable[[str], bool]
    ) -> Mapping[str, Tensor | None]:
        """The counts over all ranks, on the CPU, None where there is no sample; every rank calls it once a layer.

        Args:
            sample_ids: global index of each sample of this rank.
            sample_count: samples of all ranks together.
            is_shared: whether all ranks hold this linear.
        """
        store = StatStore(sample_ids, sample_count)
        for name, counts_B in self._counts.items():
            store.declare(f"{name}:values", StatKind.COUNT)
            if sample_ids:
                store.add_count(f"{name}:values", sample_ids[-1], counts_B)
        found = store.agree(is_shared)
        return {name: found[f"{name}:values"].value for name in self._counts}
