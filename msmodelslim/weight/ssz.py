"""The scale with the least squared error, block by block (`ssz`).

Letters: O output rows, I input columns.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from msmodelslim.ir.scheme import QDType, QScheme, QScope
from msmodelslim.registry import register
from msmodelslim.weight.base import Gram, Rounded, WeightMethod, importance, improvement, refuse_weight
from msmodelslim.weight.minmax import MinMax
from msmodelslim.weight.scale_search import Algo, search_weight
from msmodelslim.weight.two_level import search_two_level

_SCOPES = (QScope.PER_CHANNEL, QScope.PER_GROUP)


@register("ssz")
class Ssz(WeightMethod):
    """Scale (and offset) with the least squared error for every block; int8 and int4, per_channel and per_group.

    For two_level it searches the groups' integer scales and offsets near min-max's; `algo`, `step` and `negative_scale`
    are for all other schemes.
    """

    class Ext(WeightMethod.Ext, frozen=True):
        algo: Algo = Field(Algo.EXACT, description="search: global optimum, alternating least squares, or a grid")
        step: int = Field(50, ge=1, description="rounds of als, at most")
        importance: bool = Field(False, description="weigh each column's error by the mean square of its input")
        negative_scale: bool = Field(
            False, description="allow scales below zero (symmetric only), for engines that just multiply by the scale"
        )

    def __init__(self, ext: Any) -> None:
        super().__init__(ext)
        self.needs_gram = ext.importance

    @classmethod
    def supports(cls, scheme: QScheme) -> bool:
        return scheme.dtype in (QDType.INT8, QDType.INT4) and scheme.scope in _SCOPES and MinMax.supports(scheme)

    def cost(self, out_features: int, in_features: int) -> float:
        return {Algo.EXACT: 400.0, Algo.ALS: 10.0 * self.ext.step, Algo.GRID: 150.0}[self.ext.algo] * (
            out_features * in_features
        )

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
        if scheme.two_level:
            codes, error, minmax_error = search_two_level(weight_OI, scheme, importance_I, scale_dtype)
        else:
            algo, rounds, negative = self.ext.algo, self.ext.step, self.ext.negative_scale
            codes, error, minmax_error = search_weight(
                weight_OI, scheme, importance_I, scale_dtype, algo, rounds, negative
            )
        record = improvement(error, minmax_error)
        if self.ext.importance and importance_I is None:
            record |= {"fallback": "no importance", "why": "no calibration token reached it"}
        return Rounded(codes, record)
