"""The ranges that are read off a histogram, once, when all samples have been counted.

Letters: B bins, H bins of one sign, C candidates for an end of the range, K codes.
"""

import torch
from torch import Tensor

from msmodelslim.ir.qparam import INT_RANGE
from msmodelslim.ir.scheme import QScheme
from msmodelslim.observer.histogram import BINS, DyadicHistogram

_HALF = BINS // 2
_ROUNDS = 8  # of searching one end with the other fixed


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
