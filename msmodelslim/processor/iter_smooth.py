"""SmoothQuant's formula on every kind of producer, one after the other.

Sources: SmoothQuant, arXiv:2211.10438; the centring of `symmetric: false` as in Outlier Suppression+, arXiv:2304.09145.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from msmodelslim.processor.smooth import SmoothConfig, SmoothProcessor
from msmodelslim.processor.smooth_quant import refuse_vain_shift
from msmodelslim.processor.smooth_search import Exponents, Formula, Plan
from msmodelslim.registry import register


@register("iter_smooth")
class IterSmoothProcessor(SmoothProcessor):
    """Moves most of the activation range into the weights of all that reads norms, values and up projections."""

    class Config(SmoothConfig, frozen=True, extra="forbid"):
        alpha: float = Field(0.9, ge=0, le=1, description="share of the range that moves into the weights")
        scale_min: float = Field(1e-5, gt=0, allow_inf_nan=False, description="smallest factor")
        symmetric: bool = Field(True, description="false also centres channels; needs biases at norms and linears")
        group_method: Literal["mean", "max"] = Field(
            "mean", description="query heads that share a value: mean of their factors, or one from their largest sizes"
        )

        @model_validator(mode="after")
        def _centres_something(self) -> Self:
            refuse_vain_shift(self.symmetric, self.enable_subgraph_type)
            return self

    def plan(self) -> Plan:
        alpha, config = self.config.alpha, self.config
        formula = Formula(floor=config.scale_min, group=config.group_method)
        return Plan(formula, Exponents(alpha, 1 - alpha), shift=not config.symmetric)
