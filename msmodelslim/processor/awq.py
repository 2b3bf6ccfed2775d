"""AWQ: weights of channels with large activations are scaled up before they are rounded, and their inputs down.

s = mean|x|^r / mean|w|^(1 − r), centred on 1, with the r that costs the outputs of the rounded weights least; |w| is
taken relative to the largest of its group.

Source: AWQ, arXiv:2306.00978; the weight's part as in llm-compressor's duo scaling.
"""

from typing import Any, Self

from pydantic import Field, model_validator

from msmodelslim.ir.scheme import LinearScheme, QScope
from msmodelslim.processor.flex_smooth_quant import grid
from msmodelslim.processor.linear_quant import WeightConfig, refuse_weight
from msmodelslim.processor.smooth import SmoothConfig, SmoothProcessor
from msmodelslim.processor.smooth_search import UNCHANGED, Exponents, Formula, Plan
from msmodelslim.registry import register


@register("awq")
class AwqProcessor(SmoothProcessor):
    """Protects the weights that matter most to the outputs, for weights that will be rounded to few bits."""

    class Config(SmoothConfig, frozen=True, extra="forbid"):
        weight_qconfig: WeightConfig = Field(description="how the consumers' weights will be quantized")
        n_grid: int = Field(20, gt=0, description="steps of the exponent r from 0 to 1")
        duo_scaling: bool = Field(True, description="false leaves the weights' part out: s = mean|x|^r")

        @model_validator(mode="after")
        def _is_supported(self) -> Self:
            weight = self.weight_qconfig
            if weight.ext.group_size and weight.scope is not QScope.PER_GROUP:
                raise ValueError(
                    f"weight_qconfig.ext.group_size is for per_group; take it away or write scope: per_group, not "
                    f"{weight.scope}"
                )
            refuse_weight(weight)
            return self

    @classmethod
    def examples(cls) -> list[dict[str, Any]]:
        return [{"weight_qconfig": {"dtype": "int4", "scope": "per_group", "ext": {"group_size": 32}}}]

    def plan(self) -> Plan:
        duo = self.config.duo_scaling
        tried = [UNCHANGED] + [Exponents(r, 1 - r if duo else 0.0) for r in grid(self.config.n_grid)]
        formula = Formula(act="mean", weight="relative_mean", group="max", normalize=True)
        return Plan(formula, UNCHANGED, (lambda _: tried,), LinearScheme(self.config.weight_qconfig.scheme()))
