"""SmoothQuant: the range of a channel is shared out between activations and weights, s = |x|^alpha / |w|^(1 − alpha).

Source: SmoothQuant, arXiv:2211.10438.
"""

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from msmodelslim.processor.smooth import KindName, SmoothConfig, SmoothProcessor
from msmodelslim.processor.smooth_search import Exponents, Formula, Plan
from msmodelslim.processor.smooth_subgraphs import SubgraphKind
from msmodelslim.registry import register


@register("smooth_quant")
class SmoothQuantProcessor(SmoothProcessor):
    """Moves activation range into the weights of the linears behind each norm, half of it unless `alpha` says else."""

    smooths_unfused = False

    class Config(SmoothConfig, frozen=True, extra="forbid"):
        alpha: float = Field(0.5, gt=0, lt=1, description="share of the range that moves into the weights")
        symmetric: bool = Field(True, description="false also centres channels; needs biases at norms and linears")
        enable_subgraph_type: tuple[KindName, ...] = Field(
            ("norm-linear",), min_length=1, description="kinds of producers whose channels are scaled"
        )

        @model_validator(mode="after")
        def _centres_something(self) -> Self:
            refuse_vain_shift(self.symmetric, self.enable_subgraph_type)
            return self

    def plan(self) -> Plan:
        alpha = self.config.alpha
        return Plan(Formula(), Exponents(alpha, 1 - alpha), shift=not self.config.symmetric)


def refuse_vain_shift(symmetric: bool, kinds: Sequence[str]) -> None:
    """Raise where `symmetric: false` would do nothing.

    Raises:
        ValueError: no kind among `kinds` is ever centred.
    """
    if not symmetric and SubgraphKind.NORM_LINEAR not in kinds:
        raise ValueError("symmetric: false centres norm-linear only; add it to enable_subgraph_type, or leave it true")
