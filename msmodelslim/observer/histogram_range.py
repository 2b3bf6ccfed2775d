"""The ranges that are read off a histogram, once, when all samples have been counted.

Letters: B bins, H bins of one sign, C candidates for an end of the range, K codes, T thresholds, L levels.
"""

import torch
from torch import Tensor

from msmodelslim.ir.mx import E4M3_MAX
from msmodelslim.ir.qparam import INT_RANGE
from msmodelslim.ir.scheme import QDType, QScheme
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
        scheme: int8, int4 or fp8_e4m3; says which codes there are and whether the range is symmetric.

    Returns:
        Two float32 scalars on the CPU; symmetric: the negative of the other.

    Raises:
        ValueError: nothing was counted.
    """
    counts_B, width, _ = _parts(histogram)
    sums = _Moments(counts_B, width)
    low, high = minimum.cpu().double().clamp(max=0), maximum.cpu().double().clamp(min=0)
    edges = torch.arange(1, _HALF + 1, dtype=torch.float64) * width
    code_K = _codes(scheme.dtype)
    if scheme.symmetric:
        absmax = torch.maximum(-low, high)
        ends_C = torch.cat((absmax.reshape(1), edges[edges < absmax]))
        best = ends_C[sums.errors(ends_C / code_K[-1], torch.zeros_like(ends_C), code_K).argmin()].float()
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
            scale_C = ((high_C - low_C) / (code_K[-1] - code_K[0])).clamp_(min=torch.finfo(torch.float32).tiny)
            offset_C = (-low_C / scale_C).round_() + code_K[0]
            best = ends_C[sums.errors(scale_C, offset_C, code_K).argmin()]
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
    best = torch.maximum(-minimum, maximum).cpu().double()
    if filled >= levels:
        bins_T = torch.arange(levels, filled + 1)
        end = bins_T[_divergences(size_H, bins_T, levels).argmin()] * width
        best = torch.minimum(best, end.double())
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

    def errors(self, scale_C: Tensor, offset_C: Tensor, code_K: Tensor) -> Tensor:
        """Square error of each candidate, float64 [C]."""
        value_CK = (code_K - offset_C.unsqueeze(1)) * scale_C.unsqueeze(1)
        between_CK = (value_CK[:, 1:] + value_CK[:, :-1]) / 2
        # The first bin whose middle is at or above the boundary of two codes.
        bin_CK = (between_CK / self._width - 0.5).ceil_().add_(_HALF).clamp_(0, BINS).to(torch.int64)
        below_CK, sum_below_CK = (through[bin_CK] for through in self._through[:2])
        # Were all at the last code; then, boundary by boundary, what lies below it moves down by one code.
        moved_C = ((sum_below_CK - between_CK * below_CK) * value_CK.diff(dim=1)).sum(1)
        count, total, square = (through[-1] for through in self._through)
        return square - 2 * value_CK[:, -1] * total + value_CK[:, -1].square() * count + 2 * moved_C


def _codes(dtype: QDType) -> Tensor:
    """What the codes of a type stand for at scale 1, in rising order, float64 [K]."""
    if dtype is QDType.FP8_E4M3:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        return every[every.abs() <= E4M3_MAX].unique()
    low, high = INT_RANGE[dtype]
    return torch.arange(low, high + 1, dtype=torch.float64)


def _parts(histogram: DyadicHistogram) -> tuple[Tensor, float, Tensor]:
    """Counts in float64, width of a bin, number of zeros; on the CPU."""
    counts_B, zeros = histogram.counts_B.cpu().double(), histogram.zeros.cpu().double()
    if not counts_B.sum() + zeros:
        raise ValueError("the histogram is empty: no token was seen; calibrate with at least one")
    return counts_B, 2.0 ** int(histogram.exponent), zeros


def _divergences(size_H: Tensor, bins_T: Tensor, levels: int) -> Tensor:
    """Σ P·log(P/Q) when |x| is clipped after each of `bins_T` bins, float64 [T]; infinite where Q lacks what P has."""
    zero = torch.zeros(1, dtype=torch.float64)
    through, through_filled, through_entropy = (
        torch.cat((zero, part.cumsum(0))) for part in (size_H, (size_H > 0).double(), torch.xlogy(size_H, size_H))
    )
    total, inside_T, last_T = through[-1], through[bins_T], size_H[bins_T - 1]
    # Bin h of t is in level floor(h·levels/t), so level l begins at ceil(l·t/levels).
    start_TL = -(-torch.arange(levels + 1) * bins_T.unsqueeze(1) // levels)
    mass_TL, filled_TL = (through_of[start_TL].diff(dim=1) for through_of in (through, through_filled))
    spread_TL = mass_TL / filled_TL.clamp(min=1)
    tail_T = total - inside_T
    with_tail_T = last_T + tail_T
    own_T = through_entropy[bins_T - 1] + torch.xlogy(with_tail_T, with_tail_T)
    cross_T = torch.xlogy(mass_TL, spread_TL).sum(1) + torch.xlogy(tail_T, spread_TL[:, -1])
    loss_T = (own_T - cross_T) / total + (inside_T / total).log()
    return loss_T.masked_fill_((last_T == 0) & (tail_T > 0), torch.inf)
