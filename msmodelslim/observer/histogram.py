"""A histogram that can be merged in any order, bit for bit, and its use on what flows into linears.

Bins are 2^j wide for a whole j, just wide enough that 4096 of them reach from the smallest to the largest value; x lies
in bin floor(x/2^j). Widening is exact: a bin of width 2^(j+1) is two neighbours together. So batches, samples and
ranks give the same counts whatever their order: agree on the largest j, widen to it, add. Exact zeros, which have an
error of 0 in every scheme, are counted apart.

Letters: B bins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.distributed.stat_agree import StatKind
from msmodelslim.distributed.stat_store import StatStore
from msmodelslim.ir.mx import floor_log2
from msmodelslim.observer.min_max import AgreedRange, InputRange, add_range, agreed_range
from msmodelslim.observer.watcher import Watcher

BINS = 4096
#: of the width of a bin, as a power of two; the identity of merging
SMALLEST_EXPONENT = -126
_HALF = BINS // 2
_HALF_LOG2 = _HALF.bit_length() - 1
_BINS_OF_2_TO = "bins of 2^"


class DyadicHistogram:
    """Counts of what was added; only accumulates.

    Args:
        device: where the counts live.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        #: int64 [4096]: bin b holds floor(x/2^j) = b - 2048; without exact zeros
        self.counts_B = torch.zeros(BINS, dtype=torch.int64, device=device)
        #: j, int32 scalar
        self.exponent = torch.tensor(SMALLEST_EXPONENT, dtype=torch.int32, device=device)
        #: exact zeros, int64 scalar
        self.zeros = torch.tensor(0, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, counts_B: Tensor, exponent: int) -> "DyadicHistogram":
        """The histogram of these counts, in bins of width 2^exponent."""
        histogram = cls(counts_B.device)
        histogram.counts_B += counts_B
        histogram.exponent.fill_(exponent)
        return histogram

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Count every element of x; infinities and NaNs are left out."""
        if not x.numel():
            return
        values = x.detach().float().flatten()
        low, high = values.aminmax()
        absmax = torch.maximum(-low, high)
        if not bool(absmax.isfinite()):
            values = values[values.isfinite()]
            absmax = values.abs().amax() if values.numel() else torch.zeros_like(absmax)
        exponent = floor_log2(absmax).to(torch.int32) + (1 - _HALF_LOG2)
        self._widen(torch.maximum(self.exponent, exponent))
        bins = torch.ldexp(values, -self.exponent).floor_()
        # A negative value that vanishes beside the width is still below zero.
        bins = torch.where(values < 0, bins.clamp(max=-1), bins)
        index = bins.to(torch.int64).add_(_HALF)
        zeros = (values == 0).sum()
        self.counts_B += torch.bincount(index, minlength=BINS)
        self.counts_B[_HALF] -= zeros
        self.zeros += zeros

    def merge(self, other: "DyadicHistogram") -> None:
        """Take in what another one counted."""
        exponent = torch.maximum(self.exponent, other.exponent)
        self._widen(exponent)
        self.counts_B += other.widened(exponent)
        self.zeros += other.zeros

    def widened(self, exponent: Tensor) -> Tensor:
        """The counts with bins of width 2^exponent, which is not below this one's own."""
        bins = torch.arange(BINS, device=self.counts_B.device)
        shift = (exponent - self.exponent).clamp(max=_HALF_LOG2 + 1)  # then only bins -1 and 0 are left
        index = ((bins - _HALF) >> shift) + _HALF
        return torch.zeros_like(self.counts_B).scatter_add_(0, index, self.counts_B)

    def _widen(self, exponent: Tensor) -> None:
        self.counts_B = self.widened(exponent)
        self.exponent = exponent


@dataclass(frozen=True)
class AgreedHistogram:
    """What flowed into one linear over all samples of all ranks.

    Args:
        range: its exact extrema.
        histogram: its counts.
    """

    range: AgreedRange
    histogram: DyadicHistogram


class HistogramObserver(Watcher):
    """Watches the inputs of linears during a forward, as `MinMaxObserver` does; only accumulates before `agree`.

    Args:
        sample_id: says which sample is being forwarded.
    """

    def __init__(self, sample_id: Callable[[], int]) -> None:
        super().__init__()
        self.ranges: dict[str, InputRange] = {}
        self.histograms: dict[str, DyadicHistogram] = {}
        self._sample_id = sample_id
        self._last: tuple[Tensor, int, tuple[Tensor, Tensor, DyadicHistogram]] | None = None

    def watch(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Measure the first positional argument of every call of `module` under `name`."""
        found, histogram = InputRange.empty(device), DyadicHistogram(device)
        self.ranges[name], self.histograms[name] = found, histogram

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel():  # an expert that this sample does not reach is handed an empty tensor
                low, high, counted = self._counted(args[0])
                found.add(low, high, self._sample_id(), keep=False)
                histogram.merge(counted)

        self._handles.append(module.register_forward_pre_hook(measure))

    def close(self) -> None:
        """Take the hooks away and forget the last tensor."""
        super().close()
        self._last = None

    def agree(
        self, sample_ids: Sequence[int], sample_count: int, is_shared: Callable[[str], bool]
    ) -> dict[str, AgreedHistogram]:
        """What all ranks saw, the same on each; every rank calls it once a layer, also one without samples.

        Counts of different widths are different streams, so that one agreement is enough: the widths of all ranks are
        known only after it.

        Args:
            sample_ids, sample_count, is_shared: as for `MinMaxObserver`.
        """
        store = StatStore(sample_ids, sample_count)
        for name, seen in self.ranges.items():
            last = sample_ids[-1] if sample_ids else None
            add_range(store, name, seen, last)
            store.declare(f"{name}:zeros", StatKind.COUNT)
            if last is not None:
                own = self.histograms[name]
                store.add_count(f"{name}:zeros", last, own.zeros)
                store.add_count(f"{name}:{_BINS_OF_2_TO}{int(own.exponent)}", last, own.counts_B)
        found = store.agree(is_shared)
        agreed = {name: AgreedHistogram(agreed_range(found, name), DyadicHistogram()) for name in self.ranges}
        for stream, stat in found.items():
            name, _, part = stream.partition(":")
            if part.startswith(_BINS_OF_2_TO) and stat.value is not None:
                exponent = int(part.removeprefix(_BINS_OF_2_TO))
                agreed[name].histogram.merge(DyadicHistogram.of(stat.value, exponent))
            elif part == "zeros" and stat.value is not None:
                agreed[name].histogram.zeros += stat.value
        return agreed

    def _counted(self, x: Tensor) -> tuple[Tensor, Tensor, DyadicHistogram]:
        """Extrema and counts of one tensor; counted once when several linears are handed it."""
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            low, high = torch.aminmax(x)
            histogram = DyadicHistogram(x.device)
            histogram.add(x)
            self._last = (x, x._version, (low.float(), high.float(), histogram))
        return self._last[2]
