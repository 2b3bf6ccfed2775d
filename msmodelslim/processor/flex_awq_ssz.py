"""AWQ's factors, the mean |x|^alpha, with the alpha that costs least in the scheme that will be deployed.

Source: AWQ, arXiv:2306.00978, section 3.2.
"""

from functools import partial
from typing import Any

from pydantic import Field

from msmodelslim.processor.flex_smooth_quant import try_alphas
from msmodelslim.processor.linear_quant import LinearQConfig
from msmodelslim.processor.smooth import SmoothConfig, SmoothProcessor
from msmodelslim.processor.smooth_search import Exponents, Formula, Plan
from msmodelslim.registry import register


@register("flex_awq_ssz")
class FlexAwqSszProcessor(SmoothProcessor):
    """Scales up the weights of channels with large activations, as far as costs least in the scheme of `qconfig`."""

    class Config(SmoothConfig, frozen=True, extra="forbid"):
        qconfig: LinearQConfig = Field(description="how the consumers will be quantized; `linear_quant`'s own words")
        alpha: float | None = Field(None, ge=0, le=1, description="exponent of the activations; searched when left out")
        beta: float | None = Field(None, ge=0, le=1, description="exponent of the weights; 0 when left out")

    @classmethod
    def examples(cls) -> list[dict[str, Any]]:
        act = {"dtype": "int8", "scope": "per_token", "method": "minmax"}
        return [{"qconfig": {"act": act, "weight": {"dtype": "int8", "scope": "per_channel"}}}]

    def plan(self) -> Plan:
        config = self.config
        beta = 0.0 if config.beta is None else config.beta
        formula = Formula(act="mean", group="max")
        if config.alpha is not None:
            return Plan(formula, Exponents(config.alpha, beta))
        return Plan(formula, Exponents(0.0, beta), (partial(try_alphas, beta=beta),), config.qconfig.scheme())
