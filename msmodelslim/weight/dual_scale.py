"""The best outer scale of every wide block of mxfp4 blocks (`dualscale`).

Min-max brings a wide block's largest weight to 6. The exponents of the blocks of 32 inside adapt to any power of two,
so all outer scales that differ lie within one octave; it is walked in even steps, with the best exponents for each.

Letters: O output rows, I input columns, R rows of a chunk, W wide blocks of a row, E columns of a wide block.
"""

import torch
from torch import Tensor

from msmodelslim.ir.mx import in_blocks, outer_scale, spread
from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import MX_BLOCK, QDType, QScheme, QScope
from msmodelslim.registry import register
from msmodelslim.weight.mx_search import ExponentSearch, Found, best_exponents, element_codes

_CHUNK_ELEMENTS = 2**18
_STEPS = 16  # of an octave


def search_outer_scales(weight_OI: Tensor, scheme: QScheme, importance_I: Tensor | None) -> Found:
    """Codes of a whole weight; a few rows at a time, so that temporaries stay small.

    Args:
        weight_OI: finite, any float type.
        scheme: mxfp4 dual_scale.
        importance_I: weight of each column's squared errors, above 0; None for 1.

    Returns:
        Codes, Σ h·(w − ŵ)², and the same for min-max.
    """
    columns, width = weight_OI.shape[1], scheme.dual_block
    importance_WE = None if importance_I is None else in_blocks(importance_I, width)
    codes, exponents, outers = [], [], []
    error = minmax_error = 0.0
    for part_OI in weight_OI.split(max(_CHUNK_ELEMENTS // columns, 1)):
        part_RI = part_OI.float()
        outer_RW, exponent_RB, error_RW, minmax_RW = _search(in_blocks(part_RI, width), importance_WE)
        exponent_RB = exponent_RB[:, : -(-columns // MX_BLOCK)]
        codes.append(element_codes(part_RI / spread(outer_RW, width, columns), exponent_RB, QDType.MXFP4))
        exponents.append(exponent_RB)
        outers.append(outer_RW)
        error, minmax_error = error + float(error_RW.sum()), minmax_error + float(minmax_RW.sum())
    found = WeightCodes(torch.cat(codes), torch.cat(exponents), scale_second=torch.cat(outers))
    return found, error, minmax_error


def _search(weight_RWE: Tensor, importance_WE: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outer scales [R, W], E8M0 bytes [R, W·E/32], and the loss with them and with min-max, float64 [R, W]."""
    minmax_RW = outer_scale(weight_RWE.abs().amax(2))
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for step in range(_STEPS):
        outer_RW = minmax_RW * 2.0 ** (-step / _STEPS)
        if step:
            outer_RW = outer_RW.clamp_(min=torch.finfo(torch.float32).smallest_normal)
        exponent_RWB, error_RWB, ocp_RWB = best_exponents(
            weight_RWE / outer_RW.unsqueeze(2), QDType.MXFP4, importance_WE
        )
        square_RW = outer_RW.double().square()
        error_RW = error_RWB.sum(2) * square_RW
        if best is None:
            best = outer_RW, exponent_RWB, error_RW, ocp_RWB.sum(2) * square_RW
            continue
        better_RW = error_RW < best[2]
        best = (
            torch.where(better_RW, outer_RW, best[0]),
            torch.where(better_RW.unsqueeze(2), exponent_RWB, best[1]),
            torch.minimum(error_RW, best[2]),
            best[3],
        )
    assert best is not None, "min-max's own scale is always tried"
    return best[0], best[1].flatten(1), best[2], best[3]


@register("dualscale")
class DualScale(ExponentSearch):
    """The outer scale of every wide block, with the best exponents inside, that loses least; mxfp4 dual_scale."""

    dtypes = (QDType.MXFP4,)
    scope = QScope.DUAL_SCALE

    def cost(self, out_features: int, in_features: int) -> float:
        return _STEPS * super().cost(out_features, in_features)

    def _search(self, weight_OI: Tensor, scheme: QScheme, importance_I: Tensor | None) -> Found:
        return search_outer_scales(weight_OI, scheme, importance_I)
