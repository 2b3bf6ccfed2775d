"""Scale and offset of a block from its extrema, and codes from scale and offset.

Integers: q = clamp(round(x/s + o)), x ≈ (q − o)·s, rounding half to even; a symmetric scheme has no offset o.
fp8: code = x/s rounded to E4M3, saturating.
"""

import torch
from torch import Tensor

from msmodelslim.ir.mx import E4M3_MAX, e4m3_round
from msmodelslim.ir.scheme import QDType, QScheme

INT_RANGE = {QDType.INT8: (-128, 127), QDType.INT4: (-8, 7)}
_LARGEST = {QDType.INT8: 127.0, QDType.INT4: 7.0, QDType.FP8_E4M3: E4M3_MAX}


def qparam(minimum: Tensor, maximum: Tensor, scheme: QScheme, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale and offset that make the extrema of each block representable, and zero exactly.

    A block of zeros has scale 1 and offset 0. An infinity or a NaN in a block gives a scale of infinity or NaN.

    Args:
        minimum, maximum: of each block; float32 or float64, any shape.
        scheme: dtype and symmetry.
        scale_dtype: the scale is rounded to it before the offset is chosen.

    Returns:
        Scale and offset (an integer in the range of the codes, None when symmetric), type and shape of `minimum`.
    """
    low, high = minimum.clamp(max=0), maximum.clamp(min=0)  # so that zero has a code
    zero = (low == 0) & (high == 0)
    if scheme.symmetric:
        scale = divide(torch.maximum(-low, high), _LARGEST[scheme.dtype])
        return storable(scale, scale_dtype).masked_fill_(zero, 1), None
    qmin, qmax = INT_RANGE[scheme.dtype]
    scale = divide(high, qmax - qmin) - divide(low, qmax - qmin)  # divided first, so that the range cannot overflow
    scale = storable(scale, scale_dtype).masked_fill_(zero, 1)
    # Only a scale that was rounded down can push the offset out of range.
    offset = ((-low / scale).round_() + qmin).clamp_(qmin, qmax)
    return scale, offset.masked_fill_(zero, 0)


def extrema(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Smallest and largest value along an axis; a NaN in it makes both NaN."""
    return x.amin(dim, keepdim), x.amax(dim, keepdim)  # many times faster on a CPU than aminmax over an axis


def divide(x: Tensor, steps: float) -> Tensor:
    """x / steps, correctly rounded on every device."""
    # By a tensor: accelerators multiply by the rounded reciprocal of a plain number, which is not the same quotient.
    return x / torch.full((), steps, dtype=x.dtype, device=x.device)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest normal number above zero of a type, in the type of `scale`; infinity and NaN stay."""
    limits = torch.finfo(dtype)
    rounded = scale.to(dtype).to(scale.dtype).clamp_(min=limits.smallest_normal)
    return rounded.masked_fill_(rounded.isinf() & scale.isfinite(), limits.max)


def to_codes(x: Tensor, scale: Tensor, offset: Tensor | None, scheme: QScheme) -> Tensor:
    """Codes of x: integers in the type of x, or float8_e4m3fn. The offset is added before the rounding."""
    scaled = x / scale
    if scheme.dtype is QDType.FP8_E4M3:
        return e4m3_round(scaled)
    return (scaled if offset is None else scaled.add_(offset)).round_().clamp_(*INT_RANGE[scheme.dtype])
