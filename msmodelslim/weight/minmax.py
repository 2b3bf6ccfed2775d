"""Plain rounding with scales from the extrema (`minmax`)."""

import torch
from torch import Tensor

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quantize import quantize_weight, refuse_shape
from msmodelslim.ir.scheme import LinearScheme, QScheme
from msmodelslim.registry import register
from msmodelslim.weight.base import Gram, Rounded, WeightMethod


@register("minmax")
class MinMax(WeightMethod):
    """Scale from the extrema of each block, codes by rounding; any scheme."""

    @classmethod
    def supports(cls, scheme: QScheme) -> bool:
        try:
            refuse_shape(LinearScheme(scheme), 1, scheme.group_size or 1, "weight")
        except UnsupportedError:
            return False
        return True

    def cost(self, out_features: int, in_features: int) -> float:
        return 4.0 * out_features * in_features

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
        return Rounded(quantize_weight(weight_OI, scheme, scale_dtype=scale_dtype, name=name), {})
