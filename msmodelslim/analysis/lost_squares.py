"""Relative square errors over all samples of all ranks: one pair of numbers a sample, added up exactly."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from msmodelslim.distributed.stat_agree import StatKind
from msmodelslim.distributed.stat_store import StatStore
from msmodelslim.errors import BadSampleError

#: of each sample: Σ(y − ŷ)², Σy²
_PARTS = ("lost", "total")


class LostSquares:
    """Sums by module and sample on this rank; only accumulates, never communicates before `agree`."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, list[float]]] = {}

    def add(self, name: str, sample_id: int, found: Tensor, expected: Tensor) -> None:
        """Take in what the quantized module `name` made of a sample, and what the float one makes of it."""
        sums = self._sums.setdefault(name, {}).setdefault(sample_id, [0.0, 0.0])
        sums[0] += square_sum(found.float() - expected.float())
        sums[1] += square_sum(expected.float())

    def agree(
        self, names: Iterable[str], sample_ids: Sequence[int], sample_count: int, is_shared: Callable[[str], bool]
    ) -> dict[str, float | None]:
        """Module → Σ(y − ŷ)² / Σy² over all ranks, None where no sample came by; every rank calls it, then begins anew.

        Args:
            names: all modules, also those that this rank saw nothing of.
            sample_ids: global index of each sample of this rank.
            sample_count: samples of all ranks together.
            is_shared: whether all ranks hold this module.

        Raises:
            BadSampleError: an output is not finite; names module and sample.
        """
        store = StatStore(sample_ids, sample_count)
        names = list(names)
        for name in names:
            seen = self._sums.get(name, {})
            for part in _PARTS:
                store.declare(f"{name}:{part}", StatKind.SCALAR)
            for sample in (one for one in sample_ids if one in seen):
                for part, value in zip(_PARTS, seen[sample], strict=True):
                    store.add_scalar(f"{name}:{part}", sample, value)
        self._sums = {}
        agreed = store.agree(is_shared)
        found: dict[str, float | None] = {}
        for name in names:
            lost, total = (agreed[f"{name}:{part}"] for part in _PARTS)
            for values, what in ((total, "float"), (lost, "quantized")):
                refuse_infinite(name, what, [] if values.value is None else values.value.tolist(), values.sample_ids)
            if lost.value is not None and total.value is not None:
                found[name] = share_lost(lost.value.tolist(), total.value.tolist())
            else:
                found[name] = None
        return found


def share_lost(lost: Sequence[float], total: Sequence[float]) -> float:
    """Σlost / Σtotal, the same in any order; 0 where nothing is lost."""
    whole = math.fsum(total)
    return math.fsum(lost) / whole if whole else math.fsum(lost)


def refuse_infinite(name: str, what: str, values: Sequence[float], sample_ids: Sequence[int]) -> None:
    """Raise BadSampleError for the first sample whose value is not finite."""
    for sample, value in zip(sample_ids, values, strict=True):
        if not math.isfinite(value):
            raise BadSampleError(
                f"{name}: its {what} output is not finite in calibration sample {sample}",
                "take that sample out, or look for what is wrong with the model's weights"
                if what == "float"
                else "choose a scheme of more range for it, or exclude it",
                sample=sample,
            )


def square_sum(x: Tensor) -> float:
    """Σx², added up in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
