"""A histogram that can be merged in any order, bit for bit, and the ranges that are read off it once at the end.

Bins are 2^j wide for a whole j, just wide enough that 4096 of them reach from the smallest to the largest value; x lies
in bin floor(x/2^j). Widening is exact: a bin of width 2^(j+1) is two neighbours together. So batches, samples and
ranks give the same counts whatever their order: agree on the largest j, widen to it, add. Exact zeros, which have an
error of 0 in every scheme, are counted apart.

Letters: B bins, C candidates for an end of the range, K codes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from msmodelslim.ir.mx import floor_log2
from msmodelslim.ir.qparam import INT_RANGE
from msmodelslim.ir.scheme import QScheme
from msmodelslim.observer.min_max import InputRange

BINS = 4096
#: of the width of a bin, as a power of two; the identity of merging
SMALLEST_EXPONENT = -126
_HALF = BINS // 2
_HALF_LOG2 = _HALF.bit_length() - 1
_ROUNDS = 8  # of searching one end with the other fixed


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


class HistogramObserver:
    """Watches the inputs of linears during a forward, as `MinMaxObserver` does; only accumulates.

    Args:
        sample_id: says which sample is being forwarded.
    """

    def __init__(self, sample_id: Callable[[], int]) -> None:
        self.ranges: dict[str, InputRange] = {}
        self.histograms: dict[str, DyadicHistogram] = {}
        self._sample_id = sample_id
        self._handles: list[RemovableHandle] = []

    def watch(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Measure the first positional argument of every call of `module` under `name`."""
        found, histogram = InputRange.empty(device), DyadicHistogram(device)
        self.ranges[name], self.histograms[name] = found, histogram

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel():
                low, high = torch.aminmax(args[0])
                found.add(low.float(), high.float(), self._sample_id(), keep=False)
                histogram.add(args[0])

        self._handles.append(module.register_forward_pre_hook(measure))

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def percentile_range(
    histogram: DyadicHistogram, minimum: Tensor, maximum: Tensor, lower: float = 0.01, upper: float = 99.99
) -> tuple[Tensor, Tensor]:
    """Values below which `lower` and `upper` per cent of what was counted lie, read linearly within a bin.

    Args:
        histogram: what was counted.
        minimum, maximum: exact extrema of the same values; the range stays within them.
        lower, upper: per cent.

    Returns:
        Two float32 scalars on the CPU.

    Raises:
        ValueError: nothing was counted, or not 0 <= lower < upper <= 100.
    """
    if not 0 <= lower < upper <= 100:
        raise ValueError(f"percentiles {lower} and {upper}; give two numbers from 0 to 100, the lower one first")
    counts_B, width, zeros = _parts(histogram)
    # Zeros are a bin without a width, between the negative and the positive ones.
    masses = torch.cat((counts_B[:_HALF], zeros.reshape(1), counts_B[_HALF:]))
    starts = torch.cat((torch.arange(-_HALF, 1), torch.arange(_HALF))) * width
    widths = torch.full_like(starts, width)
    widths[_HALF] = 0
    through = masses.cumsum(0)
    ends = []
    for share in (lower / 100, upper / 100):
        target = share * through[-1]
        at = int(torch.searchsorted(through, target).clamp_(max=BINS))
        inside = (target - (through[at] - masses[at])) / masses[at].clamp(min=1)
        ends.append(starts[at] + widths[at] * inside)
    low, high = (end.clamp(minimum.cpu().double(), maximum.cpu().double()).float() for end in ends)
    return low, high


def mse_range(histogram: DyadicHistogram, minimum: Tensor, maximum: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor]:
    """The range whose codes lose the least square error, of all ranges that end at a bin's edge.

    Symmetric: one end, all candidates. Asymmetric: one end at a time with the other fixed, until neither moves.

    Args:
        histogram, minimum, maximum: as in `percentile_range`.
        scheme: int8 or int4; says how many codes there are and whether the range is symmetric.

    Returns:
        Two float32 scalars on the CPU; symmetric: the negative of the other.

    Raises:
        ValueError: nothing was counted.
    """
    counts_B, width, _ = _parts(histogram)
    sums = _Moments(counts_B, width)
    low, high = minimum.cpu().double().clamp(max=0), maximum.cpu().double().clamp(min=0)
    edges = torch.arange(1, _HALF + 1, dtype=torch.float64) * width
    qmin, qmax = INT_RANGE[scheme.dtype]
    if scheme.symmetric:
        absmax = torch.maximum(-low, high)
        ends_C = torch.cat((absmax.reshape(1), edges[edges < absmax]))
        best = ends_C[sums.errors(ends_C / qmax, torch.zeros_like(ends_C), qmin, qmax).argmin()].float()
        return -best, best
    highs_C = torch.cat((high.reshape(1), edges[edges < high]))
    lows_C = torch.cat((low.reshape(1), -edges[-edges > low]))
    if float(low) < 0:
        lows_C = torch.cat((lows_C, torch.zeros(1, dtype=torch.float64)))
    if float(high) > 0:
        highs_C = torch.cat((highs_C, torch.zeros(1, dtype=torch.float64)))
    for _round in range(_ROUNDS):
        before = float(low), float(high)
        for is_low in (False, True):
            ends_C = lows_C if is_low else highs_C
            low_C, high_C = (ends_C, high.expand_as(ends_C)) if is_low else (low.expand_as(ends_C), ends_C)
            scale_C = ((high_C - low_C) / (qmax - qmin)).clamp_(min=torch.finfo(torch.float32).tiny)
            offset_C = (-low_C / scale_C).round_() + qmin
            best = ends_C[sums.errors(scale_C, offset_C, qmin, qmax).argmin()]
            low, high = (best, high) if is_low else (low, best)
        if before == (float(low), float(high)):
            break
    return low.float(), high.float()


def kl_range(histogram: DyadicHistogram, minimum: Tensor, maximum: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor]:
    """The range that changes the distribution of |x| least, by Kullback and Leibler's measure; for both signs alike.

    For each bin's edge t: P is what lies below t, with all that lies above put into its last bin. Q is what lies below
    t, evenly spread over the filled bins of each of the levels that the codes of one sign can tell apart.

    Args:
        histogram, minimum, maximum, scheme: as in `mse_range`.

    Returns:
        Two float32 scalars on the CPU: -t and t, within the extrema when asymmetric.

    Raises:
        ValueError: nothing was counted.

    Source: TensorRT's entropy calibration (S. Migacz, 8-bit inference with TensorRT, 2017).
    """
    counts_B, width, _ = _parts(histogram)
    size_H = counts_B[_HALF:] + counts_B[:_HALF].flip(0)
    levels = INT_RANGE[scheme.dtype][1] + 1
    filled = int(size_H.nonzero().max()) + 1 if size_H.any() else 0
    absmax = torch.maximum(-minimum, maximum).cpu().double()
    best, best_loss = absmax, torch.inf
    for bins in range(levels, filled + 1):
        loss = _divergence(size_H, bins, levels)
        if loss < best_loss:
            best, best_loss = torch.minimum(absmax, torch.tensor(bins * width)), loss
    if scheme.symmetric:
        return -best.float(), best.float()
    return torch.maximum(-best, minimum.cpu().double()).float(), torch.minimum(best, maximum.cpu().double()).float()


class _Moments:
    """Running count, sum and sum of squares over the bins, each taken at its middle."""

    def __init__(self, counts_B: Tensor, width: float) -> None:
        middle_B = (torch.arange(BINS, dtype=torch.float64) - _HALF + 0.5) * width
        start = torch.zeros(1, dtype=torch.float64)
        self._width = width
        self._through = [torch.cat((start, (counts_B * middle_B**power).cumsum(0))) for power in range(3)]

    def errors(self, scale_C: Tensor, offset_C: Tensor, qmin: int, qmax: int) -> Tensor:
        """Square error of each candidate, float64 [C]."""
        value_CK = (torch.arange(qmin, qmax + 1) - offset_C.unsqueeze(1)) * scale_C.unsqueeze(1)
        between_CK = (value_CK[:, 1:] + value_CK[:, :-1]) / 2
        # The first bin whose middle is at or above the boundary of two codes.
        bin_CK = (between_CK / self._width - 0.5).ceil_().add_(_HALF).clamp_(0, BINS).to(torch.int64)
        whole = torch.zeros_like(bin_CK[:, :1])
        bin_CK = torch.cat((whole, bin_CK, whole + BINS), dim=1)
        count_CK, sum_CK, square_CK = (through[bin_CK].diff(dim=1) for through in self._through)
        return (square_CK - 2 * value_CK * sum_CK + value_CK.square() * count_CK).sum(1)


def _parts(histogram: DyadicHistogram) -> tuple[Tensor, float, Tensor]:
    """Counts in float64, width of a bin, number of zeros; on the CPU."""
    counts_B, zeros = histogram.counts_B.cpu().double(), histogram.zeros.cpu().double()
    if not counts_B.sum() + zeros:
        raise ValueError("the histogram is empty: no token was seen; calibrate with at least one")
    return counts_B, 2.0 ** int(histogram.exponent), zeros


def _divergence(size_H: Tensor, bins: int, levels: int) -> float:
    """Σ P·log(P/Q) when |x| is clipped after `bins` bins."""
    inside = size_H[:bins]
    clipped = inside.clone()
    clipped[-1] += size_H[bins:].sum()
    level = torch.arange(bins) * levels // bins
    filled = inside > 0
    mass = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, inside)
    share = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, filled.double())
    spread_out = torch.where(filled, (mass / share.clamp(min=1))[level], 0)
    seen = clipped > 0
    if (spread_out[seen] == 0).any() or not seen.any():
        return torch.inf
    p, q = clipped[seen] / clipped.sum(), spread_out[seen] / spread_out.sum()
    return float((p * (p / q).log()).sum())
