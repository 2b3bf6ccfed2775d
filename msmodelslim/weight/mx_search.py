"""The best shared exponent of every microscaling block, instead of the one that its largest element gives.

OCP's rule takes E = floor(log2(largest)) − emax. One more spares the largest elements from saturating and coarsens the
rest, one less does the opposite; no other exponent can win. So each block takes the best of the three, and the rules
that others chose by (`mse_round`, `ceil_x`, `fouroversix`) are all among them.

Letters: O output rows, I input columns, R rows of a chunk, B blocks of 32 columns.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from msmodelslim.ir.mx import (
    E8M0_BIAS,
    E8M0_NAN,
    e2m1_round,
    e2m1_values,
    e4m3_round,
    floor_log2,
    in_blocks,
    power_of_two,
    shared_exponent,
    spread,
)
from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import MX_BLOCK, QDType, QScheme, QScope
from msmodelslim.registry import register
from msmodelslim.weight.base import Gram, Rounded, WeightMethod, importance, improvement, refuse_weight

_CHUNK_ELEMENTS = 2**18
_SHIFTS = (1, -1)  # from the OCP exponent, which wins ties
#: codes, Σ h·(w − ŵ)², and the same for min-max
Found = tuple[WeightCodes, float, float]


def search_exponents(
    weight_OI: Tensor, scheme: QScheme, importance_I: Tensor | None, constants: Sequence[float] = ()
) -> Found:
    """Codes of a whole weight; a few rows at a time, so that temporaries stay small.

    Args:
        weight_OI: finite, any float type.
        scheme: mxfp8 or mxfp4.
        importance_I: weight of each column's squared errors, above 0; None for 1.
        constants: try ceil(log2(largest/c)) for each c, if any, instead of the neighbours of the OCP exponent.

    Returns:
        Codes, Σ h·(w − ŵ)², and the same for the OCP exponents.
    """
    codes, exponents = [], []
    error = ocp_error = 0.0
    for part_OI in weight_OI.split(max(_CHUNK_ELEMENTS // weight_OI.shape[1], 1)):
        part_RI = part_OI.float()
        exponent_RB, error_RB, ocp_RB = best_exponents(part_RI, scheme.dtype, importance_I, constants)
        exponents.append(exponent_RB)
        codes.append(
            element_codes(part_RI, exponent_RB, scheme.dtype).view(torch.uint8)
        )  # float8 cannot be joined everywhere
        error, ocp_error = error + float(error_RB.sum()), ocp_error + float(ocp_RB.sum())
    dtype = torch.float8_e4m3fn if scheme.dtype is QDType.MXFP8 else torch.uint8
    return WeightCodes(torch.cat(codes).view(dtype), torch.cat(exponents)), error, ocp_error


def best_exponents(
    weight_RI: Tensor, dtype: QDType, importance_I: Tensor | None, constants: Sequence[float] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Shared exponents of some rows.

    Args:
        weight_RI: float32; blocks lie along the last axis, of any number.
        dtype, constants: as in `search_exponents`.
        importance_I: weight of each squared error; may have more axes than its columns, as the weight has.

    Returns:
        E8M0 bytes, uint8 [R, B]; Σ h·(w − ŵ)² with them, and with the OCP exponents, float64 [R, B].
    """
    blocks_RBE = in_blocks(weight_RI, MX_BLOCK)
    absmax_RB = blocks_RBE.abs().amax(-1)
    ocp_RB = shared_exponent(absmax_RB, dtype)
    tries = [_ceil_exponent(absmax_RB, c) for c in constants]
    if not constants:
        tries = [(ocp_RB.int() + shift).clamp_(0, E8M0_NAN - 1).to(torch.uint8) for shift in _SHIFTS]
    weighting_BE = None if importance_I is None else in_blocks(importance_I, MX_BLOCK)
    best_RB, ocp_error_RB = ocp_RB, _block_error(blocks_RBE, ocp_RB, dtype, weighting_BE)
    error_RB = ocp_error_RB
    for exponent_RB in tries:
        found_RB = _block_error(blocks_RBE, exponent_RB, dtype, weighting_BE)
        best_RB = torch.where(found_RB < error_RB, exponent_RB, best_RB)
        error_RB = torch.minimum(found_RB, error_RB)
    return best_RB, error_RB, ocp_error_RB


def element_codes(weight_RI: Tensor, exponent_RB: Tensor, dtype: QDType) -> Tensor:
    """Element codes for given exponents: float8_e4m3fn (`mxfp8`) or uint8 (`mxfp4`), [R, I]."""
    scaled = weight_RI * spread(power_of_two(2 * E8M0_BIAS - exponent_RB), MX_BLOCK, weight_RI.shape[1])
    return e4m3_round(scaled) if dtype is QDType.MXFP8 else e2m1_round(scaled)


class ExponentSearch(WeightMethod):
    """What the methods of this file share; they differ in their number types and options."""

    dtypes: ClassVar[tuple[QDType, ...]]
    scope: ClassVar[QScope] = QScope.PER_BLOCK

    class Ext(WeightMethod.Ext, frozen=True):
        importance: bool = Field(False, description="weigh each column's error by the mean square of its input")

    def __init__(self, ext: Any) -> None:
        super().__init__(ext)
        self.needs_gram = ext.importance

    @classmethod
    def supports(cls, scheme: QScheme) -> bool:
        return scheme.dtype in cls.dtypes and scheme.scope is cls.scope and scheme.symmetric

    def cost(self, out_features: int, in_features: int) -> float:
        return 40.0 * out_features * in_features

    def quantize(
        self,
        weight_OI: Tensor,
        scheme: QScheme,
        *,
        scale_dtype: torch.dtype = torch.float32,
        name: str = "weight",
        gram: Gram | None = None,
    ) -> Rounded:
        self.refuse_scheme(scheme, name)
        refuse_weight(weight_OI, scheme, name)
        importance_I = importance(gram, weight_OI.shape[1], name) if self.ext.importance else None
        codes, error, ocp_error = self._search(weight_OI, scheme, importance_I)
        record = improvement(error, ocp_error)
        if self.ext.importance and importance_I is None:
            record |= {"fallback": "no importance", "why": "no calibration token reached it"}
        return Rounded(codes, record)

    def _search(self, weight_OI: Tensor, scheme: QScheme, importance_I: Tensor | None) -> Found:
        return search_exponents(weight_OI, scheme, importance_I)


@register("mx_search")
class MxSearch(ExponentSearch):
    """The best of three shared exponents for every block of 32; mxfp8 and mxfp4."""

    dtypes = (QDType.MXFP8, QDType.MXFP4)


@register("mse_round")
class MseRound(ExponentSearch):
    """`mx_search` for mxfp8: both ways of rounding log2 of the largest element are among its three exponents."""

    dtypes = (QDType.MXFP8,)


@register("fouroversix")
class FourOverSix(ExponentSearch):
    """`mx_search` for mxfp4: scaling the largest element to 4 and to 6 are among its three exponents."""

    dtypes = (QDType.MXFP4,)


@register("ceil_x")
class CeilX(ExponentSearch):
    """`mx_search` for mxfp4, or the rule E = ceil(log2(largest/c)) where `c` or a range of c is given."""

    dtypes = (QDType.MXFP4,)

    class Ext(ExponentSearch.Ext, frozen=True):
        c: float = Field(7.25, ge=6, le=12, description="constant of the rule; min-max where that is better")
        enable_search: bool | None = Field(
            None, description="each block's best exponent; left out: true unless c is given"
        )
        search_min: float = Field(6, ge=6, le=12, description="search: smallest c whose exponents are tried")
        search_max: float = Field(12, ge=6, le=12, description="search: largest c whose exponents are tried")
        search_step: float = Field(0.25, gt=0, description="search: from one c to the next")

        @model_validator(mode="after")
        def _is_a_range(self) -> Self:
            if self.search_min > self.search_max:
                raise ValueError(f"search_min is {self.search_min:g} and search_max {self.search_max:g}; swap them")
            return self

    def _search(self, weight_OI: Tensor, scheme: QScheme, importance_I: Tensor | None) -> Found:
        return search_exponents(weight_OI, scheme, importance_I, self._constants())

    def _constants(self) -> tuple[float, ...]:
        """Values of c to try; none to search around the OCP exponent."""
        ext = self.ext
        searches = "c" not in ext.model_fields_set if ext.enable_search is None else ext.enable_search
        if not searches:
            return (ext.c,)
        if (ext.search_min, ext.search_max) == (6, 12):
            return ()  # the neighbours of the OCP exponent are all that c from 6 to 12 gives, and one more
        # The exponents fall as c grows, by one at most on the way from 6 to 12: the ends of the grid have them all.
        steps = math.floor((ext.search_max - ext.search_min) / ext.search_step + 1e-9)
        return ext.search_min, ext.search_min + steps * ext.search_step


def _ceil_exponent(absmax: Tensor, c: float) -> Tensor:
    """E8M0 byte of ceil(log2(absmax/c)), from the bits."""
    ratio = absmax / c
    floor = floor_log2(ratio)
    is_power = power_of_two((floor + E8M0_BIAS).clamp_(0, E8M0_NAN - 1).to(torch.uint8)) == ratio
    return (floor + (~is_power).int() + E8M0_BIAS).clamp_(0, E8M0_NAN - 1).to(torch.uint8)


def _block_error(blocks_RBE: Tensor, exponent_RB: Tensor, dtype: QDType, weighting_BE: Tensor | None) -> Tensor:
    """Σ h·(w − ŵ)² of each block, float64."""
    scaled_RBE = blocks_RBE * power_of_two(2 * E8M0_BIAS - exponent_RB).unsqueeze(-1)
    values_RBE = e4m3_round(scaled_RBE).float() if dtype is QDType.MXFP8 else e2m1_values(e2m1_round(scaled_RBE))
    lost_RBE = (scaled_RBE - values_RBE).double().square_()
    if weighting_BE is not None:
        lost_RBE *= weighting_BE
    return lost_RBE.sum(-1) * power_of_two(exponent_RB, torch.float64).square()
