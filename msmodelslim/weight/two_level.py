"""Integer scale and offset of int4 groups inside int8 channels, by search among the neighbours of min-max's.

ŵ = s1·s2·(q − z), with the channel's s1 as min-max has it. Min-max rounds s2 to the nearest whole number, which clips
the largest weights of many groups; here every group takes what loses least of the weight itself.

Letters: O output rows, I input columns, R rows of a chunk, G groups of a row, E columns of a group.
"""

import torch
from torch import Tensor

from msmodelslim.ir.qparam import INT_RANGE
from msmodelslim.ir.quantize import WeightCodes, quantize_weight
from msmodelslim.ir.scheme import QScheme

_INT8_MAX = 127  # that s2·(q − z) may reach, so that an int8 product can follow
_SCALE_SHIFTS = (0, -2, -1, 1)
_OFFSET_SHIFTS = (0, -1, 1)
_CHUNK_ELEMENTS = 2**18


def search_two_level(
    weight_OI: Tensor, scheme: QScheme, importance_I: Tensor | None, scale_dtype: torch.dtype
) -> tuple[WeightCodes, float, float]:
    """Codes of a whole weight; a few rows at a time, so that temporaries stay small.

    Args:
        weight_OI: finite, any float type.
        scheme: int4 per_group, two_level.
        importance_I: weight of each column's squared errors, above 0; None for 1.
        scale_dtype: the type the channel's scale will be stored in.

    Returns:
        Codes, Σ h·(w − ŵ)², and the same for min-max.
    """
    plain = quantize_weight(weight_OI, scheme, scale_dtype=scale_dtype)
    assert plain.scale_second is not None and plain.offset_second is not None, "two_level has both"
    if importance_I is None:
        importance_I = torch.ones(weight_OI.shape[1], device=weight_OI.device)
    importance_GE = importance_I.unflatten(0, (-1, scheme.group_size))
    codes_OI = torch.empty_like(plain.codes_OI)
    scale_OG, offset_OG = torch.empty_like(plain.scale_second), torch.empty_like(plain.offset_second)
    error = minmax_error = 0.0
    step = max(_CHUNK_ELEMENTS // weight_OI.shape[1], 1)
    for rows in (slice(start, start + step) for start in range(0, len(weight_OI), step)):
        inner_RGE = (weight_OI[rows].float() / plain.scale[rows]).unflatten(1, (-1, scheme.group_size))
        square_R1 = plain.scale[rows].double().square()
        start_RG = plain.scale_second[rows], plain.offset_second[rows]
        steps_RGE = plain.codes_OI[rows].unflatten(1, (-1, scheme.group_size)) - start_RG[1].unsqueeze(2)
        minmax_RG = _error(inner_RGE, steps_RGE, start_RG[0], importance_GE)
        scale_OG[rows], offset_OG[rows], error_RG = _search(inner_RGE, *start_RG, importance_GE, scheme)
        steps_RGE = _steps(inner_RGE, scale_OG[rows], offset_OG[rows], scheme)
        codes_OI[rows] = (steps_RGE + offset_OG[rows].unsqueeze(2)).flatten(1)
        error, minmax_error = (
            error + float((error_RG * square_R1).sum()),
            minmax_error + float((minmax_RG * square_R1).sum()),
        )
    return WeightCodes(codes_OI, plain.scale, None, scale_OG, offset_OG), error, minmax_error


def _search(
    inner_RGE: Tensor, scale_RG: Tensor, offset_RG: Tensor, importance_GE: Tensor, scheme: QScheme
) -> tuple[Tensor, Tensor, Tensor]:
    """The best scale and offset near these, and their error in the channel's units, [R, G]."""
    qmin, qmax = INT_RANGE[scheme.dtype]
    low_RG = inner_RGE.amin(2).clamp_(max=0)
    best_RG = scale_RG, offset_RG
    error_RG = _error(inner_RGE, _steps(inner_RGE, *best_RG, scheme), scale_RG, importance_GE)
    for scale_shift in _SCALE_SHIFTS:
        tried_RG = (scale_RG + scale_shift).clamp_(min=1)
        middle_RG = torch.zeros_like(low_RG) if scheme.symmetric else (-low_RG / tried_RG).round_() + qmin
        for offset_shift in (0,) if scheme.symmetric else _OFFSET_SHIFTS:
            zero_RG = (middle_RG + offset_shift).clamp_(
                0 if scheme.symmetric else qmin, 0 if scheme.symmetric else qmax
            )
            found_RG = _error(inner_RGE, _steps(inner_RGE, tried_RG, zero_RG, scheme), tried_RG, importance_GE)
            better_RG = found_RG < error_RG
            best_RG = torch.where(better_RG, tried_RG, best_RG[0]), torch.where(better_RG, zero_RG, best_RG[1])
            error_RG = torch.minimum(found_RG, error_RG)
    return *best_RG, error_RG


def _steps(inner_RGE: Tensor, scale_RG: Tensor, offset_RG: Tensor, scheme: QScheme) -> Tensor:
    """q − z of the nearest value that is in the range of the codes and of the int8 half."""
    offset_RG1, limit_RG1 = offset_RG.unsqueeze(2), (_INT8_MAX / scale_RG).floor_().unsqueeze(2)
    codes_RGE = (inner_RGE / scale_RG.unsqueeze(2)).add_(offset_RG1).round_().clamp_(*INT_RANGE[scheme.dtype])
    return torch.maximum(torch.minimum(codes_RGE.sub_(offset_RG1), limit_RG1), -limit_RG1)


def _error(inner_RGE: Tensor, steps_RGE: Tensor, scale_RG: Tensor, importance_GE: Tensor) -> Tensor:
    """Σ h·(w/s1 − s2·(q − z))², float64 [R, G]."""
    lost_RGE = inner_RGE - steps_RGE * scale_RG.unsqueeze(2)
    return lost_RGE.square_().mul_(importance_GE).sum(2, dtype=torch.float64)
