"""How hard the inputs of linears are to quantize (`std`, `quantile`, `kurtosis`). Weights play no part in it.

A constant input scores 0. Linears that read one tensor share one measurement.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from torch import nn

from msmodelslim.analysis.sharing import shared_names, union
from msmodelslim.errors import BadSampleError
from msmodelslim.observer.min_max import AgreedRange, MinMaxObserver
from msmodelslim.observer.moments import MomentObserver
from msmodelslim.observer.value_counts import ValueCountObserver, quantiles
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.processor.patterns import Selection

_INT8_STEPS = 254  # codes -127 to 127
#: of the largest |x|: an interquartile range below it counts as this much, so that a score stays a finite number
_LEAST_SPREAD = 2.0**-24


class InputAnalysis(BaseSessionProcessor):
    """Scores the selected linears by what flows into them.

    Args:
        config: the metric, and which linears.
    """

    registered_name = "input_analysis"

    class Config(BaseModel, frozen=True, extra="forbid"):
        metric: str
        patterns: tuple[str, ...]

    def __init__(self, config: "InputAnalysis.Config", context: RunContext) -> None:
        super().__init__(config, context)
        self.selection = Selection(config.patterns)
        #: linear → score, once the run is over
        self.scores: dict[str, float] = {}
        #: linears that no token reached
        self.unreached: list[str] = []
        self._groups: list[list[str]] = []
        self._ranges = MinMaxObserver(lambda: -1)
        self._moments: MomentObserver | None = None
        self._counts: ValueCountObserver | None = None
        self._is_shared: Callable[[str], bool] = lambda name: True

    def support_distributed(self) -> bool:
        return True  # extrema and counts are exact, moments are merged in the order of the samples

    def shares_forward(self) -> bool:
        return True

    def rehearse(self, request: BatchProcessRequest) -> None:
        for name, module in request.module.named_modules(prefix=request.name):
            if isinstance(module, nn.Linear):
                self.selection.count(name)

    def preprocess(self, request: BatchProcessRequest) -> None:
        linears = {
            name: module
            for name, module in request.module.named_modules(prefix=request.name)
            if isinstance(module, nn.Linear) and self.selection.selects(name)
        }
        structure, _ = self.context.structure_if_known(request.module)
        self._groups = structure.input_groups(request.name, list(linears))
        self._ranges = MinMaxObserver(lambda: request.sample_id)
        if self.config.metric == "quantile":
            self._counts = ValueCountObserver()
        else:
            self._moments = MomentObserver(lambda: request.sample_id)
        for first, *_ in self._groups:
            linear, device = linears[first], linears[first].weight.device
            self._ranges.watch(first, linear, device)
            if self._moments is not None:
                self._moments.watch(first, linear)
            if self._counts is not None:
                self._counts.watch(first, linear, device)
        self._is_shared = shared_names(request)

    def postprocess(self, request: BatchProcessRequest) -> None:
        self._close()
        share = (request.sample_ids, request.sample_count, self._is_shared)
        ranges = self._ranges.agree(*share)
        moments: Mapping[str, Any] = {} if self._moments is None else self._moments.agree(*share)
        counts: Mapping[str, Any] = {} if self._counts is None else self._counts.agree(*share)
        for group in self._groups:
            first, seen = group[0], ranges[group[0]]
            if seen.first_bad is not None:
                raise BadSampleError(
                    f"{first}: its input is not finite in calibration sample {seen.first_bad}",
                    "take that sample out, or look for what is wrong with the model's weights",
                    sample=seen.first_bad,
                )
            if seen.minimum > seen.maximum:
                self.unreached += group
                continue
            score = self._score(seen, moments.get(first), counts.get(first))
            self.scores |= dict.fromkeys(group, score)
        self._moments = self._counts = None

    def post_run(self) -> None:
        self.scores = union(self.scores)
        self.unreached = sorted(set(union(dict.fromkeys(self.unreached, True))) - set(self.scores))

    def abort(self) -> None:
        self._close()

    def _close(self) -> None:
        for observer in (self._ranges, self._moments, self._counts):
            if observer is not None:
                observer.close()

    def _score(self, seen: AgreedRange, moments: Any, counts_B: Any) -> float:
        low, high = float(seen.minimum), float(seen.maximum)
        if low == high:
            return 0.0
        largest = max(-low, high)
        if self.config.metric == "quantile":
            lower, upper = (min(max(value, low), high) for value in quantiles(counts_B, (0.25, 0.75)))
            return 2 * largest / _INT8_STEPS / max(upper - lower, largest * _LEAST_SPREAD)
        return moments.excess_kurtosis if self.config.metric == "kurtosis" else largest / moments.std
