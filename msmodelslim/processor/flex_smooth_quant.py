"""SmoothQuant with the exponents that cost each layer least: s = |x|^alpha / |w|^beta.

First alpha is tried from 0 to 1 with beta = 1 − alpha, then beta from 0 to 1 with the best alpha. The cost is that of
8-bit weights and 8-bit dynamic activations unless `qconfig` says else: what is best there can be far from best for
4-bit weights.

`FlexStatsCollector` is the other way to get statistics over ranks: whole activations, merged before they are used. Our
own processors send sums instead, but a processor may be made data-parallel with it (see the data-parallel guide).
"""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

from msmodelslim.distributed import DistHelper, sync_gather_tensor_lists
from msmodelslim.ir.scheme import LinearScheme, QDType, QScheme, QScope
from msmodelslim.processor.linear_quant import LinearQConfig
from msmodelslim.processor.smooth import SmoothConfig, SmoothProcessor
from msmodelslim.processor.smooth_search import UNCHANGED, Exponents, Formula, Plan, Stage
from msmodelslim.registry import register

_W8A8 = LinearScheme(QScheme(QDType.INT8, QScope.PER_CHANNEL), QScheme(QDType.INT8, QScope.PER_TOKEN))
STEPS = 20  # of an exponent's way from 0 to 1


@register("flex_smooth_quant")
class FlexSmoothQuantProcessor(SmoothProcessor):
    """Moves range between activations and weights as far as costs least in 8 bits, or in the scheme of `qconfig`."""

    class Config(SmoothConfig, frozen=True, extra="forbid"):
        alpha: float | None = Field(None, ge=0, le=1, description="exponent of the activations; searched when left out")
        beta: float | None = Field(None, ge=0, le=1, description="exponent of the weights; searched when left out")
        qconfig: LinearQConfig | None = Field(
            None, description="how the consumers will be quantized; int8 per_channel, act int8 per_token when left out"
        )
        group_method: Literal["mean", "max"] = Field(
            "mean", description="query heads that share a value: mean of their factors, or one from their largest sizes"
        )

    def plan(self) -> Plan:
        alpha, beta = self.config.alpha, self.config.beta
        start = Exponents(0.0 if alpha is None else alpha, 0.0 if beta is None else beta)
        stages: tuple[Stage, ...] = ()
        if alpha is None:
            stages += (partial(try_alphas, beta=beta),)
        if beta is None:
            stages += (try_betas,)
        qconfig = self.config.qconfig
        return Plan(
            Formula(group=self.config.group_method), start, stages, _W8A8 if qconfig is None else qconfig.scheme()
        )


def grid(steps: int = STEPS) -> list[float]:
    """0, 1/steps, …, 1."""
    return [step / steps for step in range(steps + 1)]


def try_alphas(_: Exponents, beta: float | None) -> list[Exponents]:
    """No change, then every alpha with this beta, or with 1 − alpha when it is None."""
    return [UNCHANGED] + [Exponents(alpha, round(1 - alpha, 9) if beta is None else beta) for alpha in grid()]


def try_betas(best: Exponents) -> list[Exponents]:
    """The best so far, then its alpha with every beta."""
    return [best] + [Exponents(best.act, beta) for beta in grid() if beta != best.weight]


class StatKey(StrEnum):
    """What `FlexStatsCollector.act_stats` holds of a module."""

    TENSOR = "tensor"


class FlexStatsCollector:
    """Keeps what modules are called with, and merges it over ranks.

    Attributes:
        act_stats: module name → {StatKey.TENSOR: one [tokens, channels] tensor a call, on the CPU}.

    Args:
        sample_id: says which sample is being forwarded, by its global number. With it the merged list is in the order
            that one device with all samples would give; without it, rank after rank.
    """

    def __init__(self, sample_id: Callable[[], int] | None = None) -> None:
        self.act_stats: dict[str, dict[StatKey, list[Tensor]]] = {}
        self._sample_id = sample_id
        self._samples: dict[str, list[int]] = {}

    def create_hook(self, name: str) -> Callable[..., None]:
        """A hook before or after a module's forward: keeps the first argument, never communicates.

        Args:
            name: full name of the module. Make the hook on every rank, whether or not its samples reach the module.
        """
        tensors = self.act_stats.setdefault(name, {StatKey.TENSOR: []})[StatKey.TENSOR]
        samples = self._samples.setdefault(name, [])

        def keep(_: nn.Module, args: tuple[Any, ...], *__: Any) -> None:
            tensors.append(args[0].detach().to("cpu").reshape(-1, args[0].shape[-1]))
            if self._sample_id is not None:
                samples.append(self._sample_id())

        return keep

    def sync_act_stats(self, dist_helper: DistHelper | None = None, on_cpu: bool = True) -> None:
        """Merge the lists of every module that all ranks hold; others stay as they are. Every rank calls it once.

        Args:
            dist_helper: says which modules are shared; all of them when None.
            on_cpu: keep the merged tensors in host memory.

        Raises:
            ValueError: a hook was made under a name that no rank has a module of.
        """
        for name in sorted(self.act_stats):
            if dist_helper is not None and not dist_helper.is_all(name):
                raise ValueError(f"{name!r} is no module of the DistHelper; give create_hook the module's full name")
            if dist_helper is None or dist_helper.is_shared(name):
                order = None if self._sample_id is None else self._samples[name]
                merged = sync_gather_tensor_lists(self.act_stats[name][StatKey.TENSOR], on_cpu, order=order, name=name)
                self.act_stats[name][StatKey.TENSOR] = merged
