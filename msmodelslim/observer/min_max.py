"""The range of what flows into a linear over all calibration samples (`minmax`).

Extrema do not depend on the order in which samples come, so shares of the samples on several ranks give the exact range
of all of them. Linears that are handed the same tensor (q, k and v; gate and up) share one measurement. While samples
flow nothing is communicated; `agree` makes one range of all ranks' once a layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.distributed.stat_agree import Stat, StatKind
from msmodelslim.distributed.stat_store import StatStore
from msmodelslim.observer.watcher import Watcher

NO_SAMPLE = torch.iinfo(torch.int64).max
_PARTS = {
    "low": StatKind.MIN,
    "high": StatKind.MAX,
    "bad": StatKind.MIN,
    "lows": StatKind.SCALAR,
    "highs": StatKind.SCALAR,
}


@dataclass
class InputRange:
    """Range of one linear's input so far, on the linear's device.

    Args:
        minimum: smallest value, float32, 0-dimensional or of each column [I]; +inf before any sample.
        maximum: largest value, likewise; -inf before any sample.
        first_bad: global index of the first sample with a non-finite value; `NO_SAMPLE` when there is none.
        per_sample: sample index → [minimum, maximum]; kept only when asked for.
    """

    minimum: Tensor
    maximum: Tensor
    first_bad: Tensor
    per_sample: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, device: torch.device, *shape: int) -> "InputRange":
        """The identity: merging it changes nothing. No shape: one range of all columns."""
        inf = torch.full(shape, torch.inf, device=device)
        return cls(inf, -inf, torch.tensor(NO_SAMPLE, device=device))

    def add(self, low: Tensor, high: Tensor, sample_id: int, keep: bool) -> None:
        """Take in the range of one call."""
        self.minimum = torch.minimum(self.minimum, low)
        self.maximum = torch.maximum(self.maximum, high)
        bad = torch.where((torch.isfinite(low) & torch.isfinite(high)).all(), NO_SAMPLE, sample_id)
        self.first_bad = torch.minimum(self.first_bad, bad)
        if keep:
            both = torch.stack((low, high))
            seen = self.per_sample.get(sample_id)
            if seen is not None:
                both = torch.stack((torch.minimum(seen[0], low), torch.maximum(seen[1], high)))
            self.per_sample[sample_id] = both


@dataclass(frozen=True)
class AgreedRange:
    """Range of one linear's input over all samples of all ranks.

    Args:
        minimum, maximum: float32; minimum above maximum when no token reached the linear.
        first_bad: global index of the first sample with a non-finite value; None when there is none.
        mean: mean over the samples of their own minima and maxima, float64 [2]; None unless asked for.
    """

    minimum: Tensor
    maximum: Tensor
    first_bad: int | None
    mean: Tensor | None


def add_range(store: StatStore, name: str, seen: InputRange, sample_id: int | None) -> None:
    """Put the range of one linear's input into a store, to be read by `agreed_range` after agreement.

    Args:
        store: of the layer; announces the streams in any case.
        name: full name of the linear.
        seen: what this rank saw.
        sample_id: the last sample of this rank; None when it has none.
    """
    for part, kind in _PARTS.items():
        store.declare(f"{name}:{part}", kind)
    if sample_id is None:
        return
    store.add_min(f"{name}:low", sample_id, seen.minimum)
    store.add_max(f"{name}:high", sample_id, seen.maximum)
    store.add_min(f"{name}:bad", sample_id, seen.first_bad)


def agreed_range(found: Mapping[str, Stat], name: str) -> AgreedRange:
    """The range of one linear's input over all ranks, from what the store agreed on."""
    low, high, bad = (found[f"{name}:{part}"].value for part in ("low", "high", "bad"))
    if low is None or high is None or bad is None:  # no rank has a sample
        return AgreedRange(torch.tensor(torch.inf), torch.tensor(-torch.inf), None, None)
    lows, highs = (found[f"{name}:{part}"].value for part in ("lows", "highs"))
    mean = None if lows is None or highs is None else torch.stack((lows, highs)).mean(dim=1)
    return AgreedRange(low, high, None if int(bad) == NO_SAMPLE else int(bad), mean)


def _over_columns(seen: AgreedRange, factor_I: Tensor | None) -> AgreedRange:
    """One range of all columns, each divided by its factor."""
    if not seen.minimum.dim():
        return seen
    ends = (seen.minimum, seen.maximum) if factor_I is None else (seen.minimum / factor_I, seen.maximum / factor_I)
    return AgreedRange(ends[0].amin(), ends[1].amax(), seen.first_bad, seen.mean)


class MinMaxObserver(Watcher):
    """Watches the inputs of linears during a forward; only accumulates, never communicates.

    Args:
        sample_id: says which sample is being forwarded.
        keep_samples: keep each sample's own range as well, for means over samples.
        by_column: keep the range of each column, so that `agree` can rescale them. Not together with `keep_samples`.
    """

    def __init__(self, sample_id: Callable[[], int], keep_samples: bool = False, by_column: bool = False) -> None:
        super().__init__()
        assert not (keep_samples and by_column), "a mean of the samples' ranges cannot be rescaled by column"
        self._by_column = by_column
        self.ranges: dict[str, InputRange] = {}
        self._sample_id = sample_id
        self._keep_samples = keep_samples
        self._last: tuple[Tensor, int, tuple[Tensor, Tensor]] | None = None

    def watch(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Measure the first positional argument of every call of `module` under `name`."""
        columns = (module.get_parameter("weight").shape[1],) if self._by_column else ()
        self.ranges[name] = InputRange.empty(device, *columns)

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel():  # an expert that this sample does not reach is handed an empty tensor
                low, high = self._extrema(args[0])
                self.ranges[name].add(low, high, self._sample_id(), self._keep_samples)

        self._handles.append(module.register_forward_pre_hook(measure))

    def close(self) -> None:
        """Take the hooks away and forget the last tensor."""
        super().close()
        self._last = None

    def agree(
        self,
        sample_ids: Sequence[int],
        sample_count: int,
        is_shared: Callable[[str], bool],
        factors: Mapping[str, Tensor] | None = None,
    ) -> dict[str, "AgreedRange"]:
        """The ranges over all ranks, the same on each; every rank calls it once a layer, also one without samples.

        Args:
            sample_ids: global index of each sample of this rank.
            sample_count: samples of all ranks together.
            is_shared: whether all ranks hold this linear.
            factors: linear → what its input columns have been divided by since, above 0 [I]; only with `by_column`.
        """
        store = StatStore(sample_ids, sample_count)
        for name, seen in self.ranges.items():
            add_range(store, name, seen, sample_ids[-1] if sample_ids else None)
            for sample_id in sorted(seen.per_sample):
                low, high = seen.per_sample[sample_id].tolist()
                store.add_scalar(f"{name}:lows", sample_id, low)
                store.add_scalar(f"{name}:highs", sample_id, high)
        found = store.agree(is_shared)
        ranges = {name: agreed_range(found, name) for name in self.ranges}
        return {name: _over_columns(seen, (factors or {}).get(name)) for name, seen in ranges.items()}

    def _extrema(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            if self._by_column:
                x_TI = x.reshape(-1, x.shape[-1])
                low, high = x_TI.amin(0), x_TI.amax(0)  # a fifth of the time of torch.aminmax over this axis
            else:
                low, high = torch.aminmax(x)
            self._last = (x, x._version, (low.float(), high.float()))
        return self._last[2]
