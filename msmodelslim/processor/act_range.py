"""The static range of what flows into linears, by the method of a recipe's `act` half.

`minmax` takes the extrema; `histogram` counts all values and gives up rare ones for finer steps. Both only accumulate
while samples flow and agree once a layer. Linears that read one tensor get one range.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from msmodelslim.errors import BadSampleError, UnsupportedError
from msmodelslim.ir.quantize import FP8_BLOCK
from msmodelslim.ir.scheme import MX_BLOCK, QDType, QScheme, QScope
from msmodelslim.observer.histogram import AgreedHistogram, DyadicHistogram, HistogramObserver
from msmodelslim.observer.histogram_range import kl_range, mse_range, percentile_range
from msmodelslim.observer.min_max import AgreedRange, MinMaxObserver


class ActMethod(StrEnum):
    """How the range of an input is found; values are the words of recipes."""

    NONE = "none"
    MINMAX = "minmax"
    HISTOGRAM = "histogram"
    DUALSCALE = "dualscale"


class Criterion(StrEnum):
    """What a range read off a histogram is best for; values are the words of recipes."""

    MSE = "mse"
    PERCENTILE = "percentile"
    KL = "kl"


_OF_METHOD = {"aggregation_type": ActMethod.MINMAX, "dual_block_size": ActMethod.DUALSCALE} | dict.fromkeys(
    ("criterion", "lower", "upper"), ActMethod.HISTOGRAM
)
DUAL_BLOCK = 512  # columns that share an outer scale where a recipe names none


class ActExt(BaseModel, frozen=True, extra="forbid"):
    aggregation_type: Literal["max", "mean"] = Field(
        "max", description="minmax: static range: extrema of all samples, or the mean of the samples' extrema"
    )
    criterion: Criterion = Field(
        Criterion.MSE,
        description="histogram: least square error; values between two percentiles; least change of the distribution",
    )
    lower: float = Field(0.01, ge=0, le=100, description="percentile: per cent of the values that may lie below")
    upper: float = Field(99.99, ge=0, le=100, description="percentile: per cent of the values below its upper end")
    axes: Literal[-1] = Field(-1, description="MX: the axis that blocks lie along, the features")
    dual_block_size: int = Field(
        DUAL_BLOCK, ge=MX_BLOCK, multiple_of=MX_BLOCK, description="dualscale: features that share the outer scale"
    )

    @model_validator(mode="after")
    def _is_a_range(self) -> "ActExt":
        given = [key for key in ("lower", "upper") if key in self.model_fields_set]
        if given and self.criterion is not Criterion.PERCENTILE:
            raise ValueError(f"{given[0]} is for criterion percentile, not {self.criterion}; take it away")
        if self.lower >= self.upper:
            raise ValueError(f"lower is {self.lower:g} and upper {self.upper:g}; the lower end comes first")
        return self

    def refuse(self, method: ActMethod, scheme: QScheme) -> None:
        """Raise `ValueError` for options of another method, and for those that the scheme cannot use."""
        if "axes" in self.model_fields_set and not scheme.is_mx:
            raise ValueError(f"ext.axes is for mxfp8 and mxfp4, not {scheme.dtype}; take it away")
        for key in sorted(self.model_fields_set - {"axes"}):
            if _OF_METHOD[key] is not method:
                raise ValueError(f"ext.{key} is for method {_OF_METHOD[key]}, not {method}; take it away")
        if self.aggregation_type == "mean" and not scheme.is_static:
            raise ValueError(
                f"ext.aggregation_type mean averages a calibrated range, and {scheme} takes its own at run time; take "
                "it away, or write scope: per_tensor or pd_mix"
            )
        if method is not ActMethod.HISTOGRAM:
            return
        if not scheme.is_static:
            raise ValueError(
                f"method histogram calibrates a range, and {scheme} takes its own at run time; write method: minmax, "
                "or scope: per_tensor or pd_mix"
            )
        if scheme.dtype is QDType.FP8_E4M3 and self.criterion is Criterion.KL:
            raise ValueError(
                "criterion kl compares evenly spaced codes, and fp8_e4m3 has none; write mse or percentile"
            )


class ActConfig(BaseModel, frozen=True, extra="forbid"):
    dtype: QDType = Field(QDType.FLOAT, description="number type of the input's codes; float leaves it alone")
    scope: QScope = Field(QScope.PER_TENSOR, description="what shares a scale; per_tensor and pd_mix are calibrated")
    symmetric: bool = Field(True, description="no offset")
    method: ActMethod = Field(
        ActMethod.NONE,
        description="how the range is found; none only for float, histogram only where calibrated, "
        "dualscale only for dual_scale",
    )
    ext: ActExt = ActExt()

    @model_validator(mode="after")
    def _is_the_methods(self) -> "ActConfig":
        if (self.dtype is QDType.FLOAT) != (self.method is ActMethod.NONE):
            raise ValueError(
                f"act.method is {self.method} with act.dtype {self.dtype}; float goes with none, all else with minmax "
                "or histogram"
            )
        if (self.scope is QScope.DUAL_SCALE) != (self.method is ActMethod.DUALSCALE):
            raise ValueError(
                f"act.method is {self.method} with act.scope {self.scope}; dualscale goes with dual_scale and "
                "with nothing else"
            )
        self.ext.refuse(self.method, self.scheme())
        return self

    def scheme(self) -> QScheme:
        """The scheme these words mean."""
        if self.dtype is QDType.FLOAT:
            return QScheme()
        block = (1, FP8_BLOCK) if self.dtype is QDType.FP8_E4M3 and self.scope is QScope.PER_BLOCK else (0, 0)
        dual_block = self.ext.dual_block_size if self.scope is QScope.DUAL_SCALE else 0
        return QScheme(self.dtype, self.scope, self.symmetric, block=block, dual_block=dual_block)

    def follows_rescaling(self) -> bool:
        """Whether the range of rescaled inputs is known from the ranges of their columns."""
        return self.method is not ActMethod.HISTOGRAM and self.ext.aggregation_type == "max"

    @staticmethod
    def histogram_examples() -> list[dict[str, Any]]:
        """Words of a recipe that together exercise the histogram."""
        words = (
            ("int8", "per_tensor", False, "mse"),
            ("int8", "per_tensor", True, "percentile"),
            ("int8", "per_tensor", False, "kl"),
            ("int8", "pd_mix", False, "mse"),
            ("fp8_e4m3", "per_tensor", True, "mse"),
        )
        return [
            {"dtype": dtype, "scope": scope, "symmetric": symmetric, "method": "histogram", "ext": {"criterion": one}}
            for dtype, scope, symmetric, one in words
        ]


@dataclass(frozen=True)
class FoundRange:
    """The range of one linear's input.

    Args:
        low, high: float32 scalars.
        record: plain data for the report: how it was found and what was seen.
    """

    low: Tensor
    high: Tensor
    record: dict[str, Any]


class ActRanges:
    """Observes the inputs of the linears of one layer and finds their ranges.

    Args:
        act: a static scheme and its method.
        sample_id: says which sample is being forwarded.
        by_column: keep what is needed to find the ranges of rescaled inputs; for an `act` that `follows_rescaling`.
    """

    def __init__(self, act: ActConfig, sample_id: Callable[[], int], by_column: bool = False) -> None:
        self._ext = act.ext
        self._scheme = act.scheme()
        self._observer: MinMaxObserver | HistogramObserver
        if act.method is ActMethod.HISTOGRAM:
            self._observer = HistogramObserver(sample_id)
        else:
            self._observer = MinMaxObserver(sample_id, act.ext.aggregation_type == "mean", by_column)

    def watch(self, linears: Mapping[str, nn.Linear]) -> None:
        """Measure the inputs of linears, by full name."""
        for name, linear in linears.items():
            self._observer.watch(name, linear, linear.weight.device)

    def close(self) -> None:
        """Take the hooks away."""
        self._observer.close()

    def agree(
        self,
        sample_ids: Sequence[int],
        sample_count: int,
        is_shared: Callable[[str], bool],
        factors: Mapping[str, Tensor] | None = None,
    ) -> dict[str, FoundRange]:
        """The ranges over all ranks, the same on each; every rank calls it once a layer, also one without samples.

        Args:
            sample_ids: global index of each sample of this rank.
            sample_count: samples of all ranks together.
            is_shared: whether all ranks hold this linear.
            factors: linear → what its input columns have been divided by since [I]; only with `by_column`.

        Raises:
            BadSampleError: an input was not finite; names the linear and the first sample.
            UnsupportedError: no sample reached a linear on any rank; names it.
        """
        if isinstance(self._observer, MinMaxObserver):
            return {
                name: FoundRange(*_extrema(name, seen), {})
                for name, seen in self._observer.agree(sample_ids, sample_count, is_shared, factors).items()
            }
        return self._clipped(self._observer.agree(sample_ids, sample_count, is_shared).items())

    def _clipped(self, agreed: Iterable[tuple[str, AgreedHistogram]]) -> dict[str, FoundRange]:
        found: dict[str, FoundRange] = {}
        known: dict[bytes, FoundRange] = {}  # linears that read one tensor have equal histograms
        for name, seen in agreed:
            low, high = _extrema(name, seen.range)
            key = _content(seen.histogram, low, high)
            if key not in known:
                known[key] = self._clip(seen.histogram, low, high)
            found[name] = known[key]
        return found

    def _clip(self, histogram: DyadicHistogram, low: Tensor, high: Tensor) -> FoundRange:
        ext = self._ext
        match ext.criterion:
            case Criterion.PERCENTILE:
                ends = percentile_range(histogram, low, high, ext.lower, ext.upper)
            case Criterion.KL:
                ends = kl_range(histogram, low, high, self._scheme)
            case Criterion.MSE:
                ends = mse_range(histogram, low, high, self._scheme)
        record = {
            "act_method": f"histogram {ext.criterion}",
            "act_range": [float(end) for end in ends],
            "act_extrema": [float(low), float(high)],
        }
        return FoundRange(*ends, record)


def _extrema(name: str, seen: AgreedRange) -> tuple[Tensor, Tensor]:
    if seen.first_bad is not None:
        raise BadSampleError.of_input(name, seen.first_bad)
    if seen.minimum > seen.maximum:
        raise UnsupportedError(
            f"{name}: no calibration sample reached it, so its static activation scale is undefined",
            "give more samples, exclude it, or choose a dynamic scheme (act scope per_token)",
        )
    low, high = (seen.minimum, seen.maximum) if seen.mean is None else seen.mean.float()
    return low, high


def _content(histogram: DyadicHistogram, low: Tensor, high: Tensor) -> bytes:
    """What a range depends on, to be compared."""
    facts = torch.stack((histogram.exponent.double(), histogram.zeros.double(), low.double(), high.double()))
    return histogram.counts_B.numpy().tobytes() + facts.numpy().tobytes()
