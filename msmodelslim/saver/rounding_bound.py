"""How far rounding to codes can move a weight: what is further off than that was not caused by rounding.

Letters: O output rows, I input columns, R rows of a chunk.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from msmodelslim.ir.quantize import WeightCodes, dequantize_weight
from msmodelslim.ir.scheme import MX_BLOCK, QDType, QScheme, QScope

_CHUNK_ELEMENTS = 1 << 18  # float32 elements a step: 1 MiB each of source, result and bound
_TILE = 128
_EXTREMES = {QDType.INT8: (-128, 127), QDType.INT4: (-8, 7)}


@dataclass(frozen=True)
class RowErrors:
    """What became of each output row; all float64 [O].

    Args:
        errors: ‖w − ŵ‖.
        bounds: the largest ‖w − ŵ‖ that rounding can cause; without clipping, where the error is below that already.
        sizes: ‖w‖.
    """

    errors: Tensor
    bounds: Tensor
    sizes: Tensor

    @property
    def relative(self) -> float:
        """‖W − Ŵ‖ / ‖W‖ of the whole weight; 0 for an all-zero weight that stayed one."""
        size = float(self.sizes.square().sum().sqrt())
        error = float(self.errors.square().sum().sqrt())
        return error / size if size else (float("inf") if error else 0.0)

    def unexplained(self, slack: float) -> Tensor:
        """Indices of rows off by more than `slack` bounds, or that are no numbers."""
        return (~(self.errors <= slack * self.bounds)).nonzero().squeeze(1)

    def beyond(self, share: float, most: float, rows: float) -> Tensor:
        """Indices of rows off by more than `share` of their size, where that is no exception.

        Error feedback lets a small row pay for what others lost, so single rows may be far off. More than `rows` of all
        rows, or the weight as a whole, are not, nor is a row by more than `most` of its size.
        """
        limits = torch.maximum(share * self.sizes, self.bounds)
        over_O = ~(self.errors <= limits)
        far_O = ~(self.errors <= torch.maximum(most * self.sizes, self.bounds))
        exceptions = int(over_O.sum()) <= max(1, rows * len(over_O)) and self.relative <= share
        return (far_O if exceptions else over_O).nonzero().squeeze(1)


def row_errors(source_OI: Tensor, codes: WeightCodes, scheme: QScheme) -> RowErrors:
    """Compare a weight with what its codes stand for, some rows at a time."""
    errors, bounds, sizes = [], [], []
    for start, part in _row_chunks(codes, scheme):
        weight_RI = source_OI[start : start + part.codes_OI.shape[0]].float()
        errors.append((weight_RI - dequantize_weight(part, scheme)).norm(dim=1))
        bounds.append(_row_reach(part, scheme, errors[-1]))
        sizes.append(weight_RI.norm(dim=1))
    return RowErrors(*(torch.cat(parts).double() for parts in (errors, bounds, sizes)))


def _row_reach(codes: WeightCodes, scheme: QScheme, errors_R: Tensor) -> Tensor:
    """‖…‖ of `_reach` over each row; what clipping may add is looked at only where the error needs it."""
    if scheme.dtype not in _EXTREMES or scheme.scope is QScope.PER_GROUP:
        return _reach(codes, scheme).norm(dim=1)
    bounds_R = (codes.scale.flatten().abs() * 0.5 * math.sqrt(codes.codes_OI.shape[1])).expand(len(errors_R)).clone()
    over_R = ~(errors_R <= bounds_R)
    if over_R.any():
        lowest, highest = _EXTREMES[scheme.dtype]
        codes_RI = codes.codes_OI[over_R]
        outermost_R = ((codes_RI == lowest) | (codes_RI == highest)).sum(1)
        bounds_R[over_R] *= (1 + (1.5**2 / 0.5**2 - 1) * outermost_R / codes_RI.shape[1]).sqrt()
    return bounds_R


def _reach(codes: WeightCodes, scheme: QScheme) -> Tensor:
    """For each weight the largest error of rounding to the nearest code, and of clipping at the outermost codes."""
    columns = codes.codes_OI.shape[1]
    if scheme.dtype in _EXTREMES:
        lowest, highest = _EXTREMES[scheme.dtype]
        outermost_RI = (codes.codes_OI == lowest) | (codes.codes_OI == highest)
        if codes.scale_second is not None:
            inner_RI = codes.scale_second.repeat_interleave(scheme.group_size, dim=1)
            # The inner scale is a whole number: rounded down, 15 steps of it miss up to 7.5 of a group's range.
            return codes.scale * (0.5 + 0.5 * inner_RI + outermost_RI * (7.5 + 0.5 * inner_RI))
        # Offset and stored scale are rounded, too: together they move the range's ends by less than one step.
        return _spread(codes.scale, scheme, codes.codes_OI.shape[0], columns) * (0.5 + 1.0 * outermost_RI)
    if scheme.dtype is QDType.MXFP4:
        size_RI = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[(codes.codes_OI & 7).int()]
        # Steps of 0.5 below 2, 1 below 4, then 2; what lies between 6 and 8 saturates.
        steps_RI = torch.where(size_RI < 2, 0.25, torch.where(size_RI < 4, 0.5, torch.where(size_RI < 6, 1.0, 2.0)))
    else:
        size_RI = codes.codes_OI.float().abs()
        exponent_RI = torch.frexp(size_RI).exponent - 1
        steps_RI = torch.exp2((exponent_RI.clamp(min=-6) - 4).float())  # E4M3: 8 steps an octave, half of one
        # MX blocks saturate between 448 and 512; other scales make the largest weight 448, but for their own rounding.
        steps_RI = torch.where(size_RI >= 448, 64.0 if scheme.is_mx else 18.0, steps_RI)
    if scheme.is_mx:
        power_RG = torch.exp2(codes.scale.float() - 127)
        if codes.scale_second is not None:
            steps_RI *= codes.scale_second.repeat_interleave(scheme.dual_block, dim=1)[:, :columns]
        return steps_RI * power_RG.repeat_interleave(MX_BLOCK, dim=1)[:, :columns]
    return steps_RI * _spread(codes.scale, scheme, codes.codes_OI.shape[0], columns)


def _spread(scale: Tensor, scheme: QScheme, rows: int, columns: int) -> Tensor:
    """The scale shaped to broadcast over [rows, columns]."""
    if scheme.scope is QScope.PER_GROUP:
        return scale.repeat_interleave(scheme.group_size, dim=1)
    if scheme.scope is QScope.PER_BLOCK:
        wide = scale.repeat_interleave(scheme.block[1] or _TILE, dim=1)[:, :columns]
        return wide.repeat_interleave(scheme.block[0] or _TILE, dim=0)[:rows]
    return scale


def _row_chunks(codes: WeightCodes, scheme: QScheme) -> Iterator[tuple[int, WeightCodes]]:
    """First row and codes of consecutive parts, never cutting a tile."""
    rows, columns = codes.codes_OI.shape
    tile = scheme.block[0] or _TILE
    step = max(_CHUNK_ELEMENTS // columns // tile, 1) * tile

    def cut(tensor: Tensor | None, start: int, per: int) -> Tensor | None:
        return None if tensor is None else tensor[start // per : -(-(start + step) // per)]

    for start in range(0, rows, step):
        per_tile = tile if scheme.scope is QScope.PER_BLOCK and not scheme.is_mx else 1
        whole = scheme.scope is QScope.PER_TENSOR
        scale = codes.scale if whole else codes.scale[start // per_tile : -(-(start + step) // per_tile)]
        yield (
            start,
            WeightCodes(
                codes.codes_OI[start : start + step],
                scale,
                codes.offset if whole else cut(codes.offset, start, per_tile),
                cut(codes.scale_second, start, 1),
                cut(codes.offset_second, start, 1),
            ),
        )
