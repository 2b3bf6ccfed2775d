"""Count, mean and central moments of what flows into linears, in float64: the same bits on any number of ranks.

Each sample's moments are taken about its own mean, on whichever rank forwards it. They travel as scalars and are merged
in the order of the global sample numbers, so neither a common pivot nor a common rank is needed, and a mean far from
zero costs no digits.

Source: P. Pébay, Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical
moments, Sandia report SAND2008-6212.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.distributed.stat_agree import StatKind
from msmodelslim.distributed.stat_store import StatStore
from msmodelslim.observer.watcher import Watcher

_ELEMENTS_AT_ONCE = 1 << 22  # 32 MiB in float64
_PARTS = ("count", "mean", "square", "cube", "fourth")


@dataclass(frozen=True)
class Moments:
    """Of a set of numbers: how many, their mean, and the sums of the 2nd, 3rd and 4th powers of (x − mean)."""

    count: float
    mean: float
    square: float
    cube: float
    fourth: float

    @property
    def std(self) -> float:
        """Standard deviation of the whole set (divided by the count)."""
        return math.sqrt(self.square / self.count)

    @property
    def excess_kurtosis(self) -> float:
        """Fourth standardized moment less 3, which is that of a normal distribution; 0 where there is no spread."""
        return self.fourth * self.count / self.square**2 - 3 if self.square else 0.0


def moments_of(x: Tensor) -> Moments:
    """The moments of all elements of x, at least one."""
    parts = x.detach().reshape(-1).split(_ELEMENTS_AT_ONCE)
    return reduce(merged, (_moments_of_part(part.double()) for part in parts))


def merged(one: Moments, other: Moments) -> Moments:
    """The moments of both sets together."""
    n, m = one.count, other.count
    total = n + m
    delta = other.mean - one.mean
    step = delta / total
    square = one.square + other.square + delta * step * n * m
    cube = one.cube + other.cube + delta * step * step * n * m * (n - m)
    cube += 3 * step * (n * other.square - m * one.square)
    fourth = one.fourth + other.fourth + delta * step**3 * n * m * (n * n - n * m + m * m)
    fourth += 6 * step**2 * (n * n * other.square + m * m * one.square) + 4 * step * (n * other.cube - m * one.cube)
    return Moments(total, one.mean + step * m, square, cube, fourth)


def _moments_of_part(x: Tensor) -> Moments:
    mean = x.mean()
    deviation = x - mean
    square = deviation * deviation
    sums = (square.sum(), torch.dot(square, deviation), torch.dot(square, square))
    return Moments(x.numel(), float(mean), *map(float, sums))


class MomentObserver(Watcher):
    """Watches the inputs of linears during a forward; only accumulates, never communicates before `agree`.

    Args:
        sample_id: says which sample is being forwarded.
    """

    def __init__(self, sample_id: Callable[[], int]) -> None:
        super().__init__()
        self._seen: dict[str, dict[int, Moments]] = {}
        self._sample_id = sample_id

    def watch(self, name: str, module: nn.Module) -> None:
        """Measure the first positional argument of every call of `module` under `name`."""
        seen = self._seen[name] = {}

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel():  # an expert that this sample does not reach is handed an empty tensor
                sample, found = self._sample_id(), moments_of(args[0])
                seen[sample] = merged(seen[sample], found) if sample in seen else found

        self._handles.append(module.register_forward_pre_hook(measure))

    def agree(
        self, sample_ids: Sequence[int], sample_count: int, is_shared: Callable[[str], bool]
    ) -> Mapping[str, Moments | None]:
        """The moments over all ranks, None where no token came by; every rank calls it once a layer.

        Args:
            sample_ids: global index of each sample of this rank.
            sample_count: samples of all ranks together.
            is_shared: whether all ranks hold this linear.
        """
        store = StatStore(sample_ids, sample_count)
        for name, seen in self._seen.items():
            for part in _PARTS:
                store.declare(f"{name}:{part}", StatKind.SCALAR)
            for sample in (one for one in sample_ids if one in seen):
                for part, value in zip(_PARTS, astuple(seen[sample]), strict=True):
                    store.add_scalar(f"{name}:{part}", sample, value)
        found = store.agree(is_shared)
        return {name: _all_samples([found[f"{name}:{part}"].value for part in _PARTS]) for name in self._seen}


def _all_samples(parts: list[Tensor | None]) -> Moments | None:
    columns = [part.tolist() for part in parts if part is not None]
    if not columns or not columns[0]:
        return None
    return reduce(merged, (Moments(*row) for row in zip(*columns, strict=True)))
