"""Round the linears of a decoder layer, and calibrate the range of their inputs where the scheme is static.

Letters: O output rows, I input columns.
"""

from itertools import product
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator
from torch import nn

from msmodelslim.distributed.dist_helper import DistHelper
from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.quantize import WeightCodes, act_qparam, refuse_shape
from msmodelslim.ir.scheme import LinearScheme, QDType, QScheme, QScope
from msmodelslim.observer.gram import GramObserver
from msmodelslim.processor.act_range import DUAL_BLOCK, ActConfig, ActRanges, FoundRange
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.processor.patterns import Pattern, Selection
from msmodelslim.processor.rounding import deal_linears, round_weights
from msmodelslim.registry import lookup, names, nearest, register
from msmodelslim.weight.base import Gram, WeightMethod

FP8_BLOCK = (128, 128)


class Act(NamedTuple):
    """Activation half of a supported pair; `sym` holds the symmetries that may be asked for."""

    dtype: QDType
    scope: QScope
    sym: tuple[bool, ...] = (True,)


class Weight(NamedTuple):
    """Weight half of a supported pair."""

    dtype: QDType
    scopes: tuple[QScope, ...]
    sym: tuple[bool, ...] = (True,)
    two_level: bool = False


_ANY = (True, False)
_CHANNEL, _GROUP, _BLOCK = QScope.PER_CHANNEL, QScope.PER_GROUP, QScope.PER_BLOCK
_TENSOR, _TOKEN, _MIX, _DUAL = QScope.PER_TENSOR, QScope.PER_TOKEN, QScope.PD_MIX, QScope.DUAL_SCALE
_NO_ACT = Act(QDType.FLOAT, _TENSOR, _ANY)
_ACT_METHODS = {(QDType.FLOAT, _TENSOR): "none", (QDType.MXFP4, _DUAL): "dualscale"}  # of all others min-max

#: Every pair that can be deployed; what is not here is refused when the recipe is read.
PAIRS: tuple[tuple[Act, Weight], ...] = (
    (_NO_ACT, Weight(QDType.INT8, (_CHANNEL, _GROUP), _ANY)),  # W8A16
    (_NO_ACT, Weight(QDType.INT4, (_CHANNEL, _GROUP), _ANY)),  # W4A16
    (_NO_ACT, Weight(QDType.MXFP8, (_BLOCK,))),
    (_NO_ACT, Weight(QDType.MXFP4, (_BLOCK,))),
    (Act(QDType.INT8, _TENSOR, _ANY), Weight(QDType.INT8, (_CHANNEL,))),  # W8A8 static
    (Act(QDType.INT8, _TOKEN, _ANY), Weight(QDType.INT8, (_CHANNEL,))),  # W8A8 dynamic
    (Act(QDType.INT8, _TOKEN), Weight(QDType.INT8, (_GROUP,), _ANY)),
    (Act(QDType.INT8, _TOKEN, _ANY), Weight(QDType.INT4, (_CHANNEL, _GROUP))),  # W4A8
    (Act(QDType.INT8, _TOKEN), Weight(QDType.INT4, (_GROUP,), _ANY, two_level=True)),
    (Act(QDType.INT4, _TOKEN), Weight(QDType.INT4, (_CHANNEL, _GROUP), _ANY)),  # W4A4
    (Act(QDType.INT8, _MIX, (False,)), Weight(QDType.INT8, (_CHANNEL,))),  # prefill dynamic, decode static
    (Act(QDType.FP8_E4M3, _TOKEN), Weight(QDType.FP8_E4M3, (_CHANNEL,))),
    (Act(QDType.FP8_E4M3, _TENSOR), Weight(QDType.FP8_E4M3, (_CHANNEL, _TENSOR))),
    (Act(QDType.FP8_E4M3, _BLOCK), Weight(QDType.FP8_E4M3, (_BLOCK,))),  # 128 features a token, 128x128 weights
    (Act(QDType.MXFP8, _BLOCK), Weight(QDType.MXFP8, (_BLOCK,))),
    (Act(QDType.MXFP8, _BLOCK), Weight(QDType.MXFP4, (_BLOCK,))),
    (Act(QDType.MXFP4, _BLOCK), Weight(QDType.MXFP4, (_BLOCK,))),
    (Act(QDType.MXFP4, _DUAL), Weight(QDType.MXFP4, (_DUAL,))),
)


class WeightConfig(BaseModel, frozen=True, extra="forbid"):
    dtype: QDType = Field(description="number type of the codes")
    scope: QScope = Field(description="which elements share a scale")
    symmetric: bool = Field(True, description="no offset")
    method: str = Field("minmax", description="how scales and codes are chosen: one of the weight methods below")
    ext: Any = Field({}, validate_default=True, description="options of the method")

    @field_validator("method")
    @classmethod
    def _is_a_method(cls, method: str) -> str:
        if method not in names("weight"):
            raise ValueError(f"write {nearest(method, names('weight'))}")
        return method

    @field_validator("ext")
    @classmethod
    def _is_the_methods(cls, ext: Any, info: ValidationInfo) -> Any:
        if "method" not in info.data:
            return ext  # the method's own mistake is told already
        schema = _method(info.data["method"]).Ext
        if isinstance(ext, schema):
            return ext
        try:
            return schema.model_validate(ext)
        except ValidationError as error:
            raise ValueError(_in_one_line(error, list(schema.model_fields))) from error

    def scheme(self) -> QScheme:
        """The scheme these words mean."""
        group = (self.ext.group_size or 128) if self.scope is QScope.PER_GROUP else 0
        block = FP8_BLOCK if self.dtype is QDType.FP8_E4M3 and self.scope is QScope.PER_BLOCK else (0, 0)
        dual = (self.ext.dual_block_size or DUAL_BLOCK) if self.scope is QScope.DUAL_SCALE else 0
        return QScheme(self.dtype, self.scope, self.symmetric, group, block, self.ext.two_level, dual)


def _in_one_line(error: ValidationError, keys: list[str]) -> str:
    """The mistakes of a method's options as the end of a sentence that names `ext`."""
    told = []
    for one in error.errors():
        key = ".".join(map(str, one["loc"]))
        if one["type"] == "extra_forbidden":
            told.append(f"{key} is no option of this method, write {nearest(key, keys)}")
        else:
            told.append(f"{key} is {one['input']!r}: {one['msg'][:1].lower()}{one['msg'][1:]}")
    return "; ".join(told)


class LinearQConfig(BaseModel, frozen=True, extra="forbid"):
    act: ActConfig = ActConfig()
    weight: WeightConfig

    @model_validator(mode="after")
    def _is_a_pair(self) -> "LinearQConfig":
        act, weight = self.act, self.weight
        if weight.ext.group_size and weight.scope is not QScope.PER_GROUP:
            raise ValueError(
                f"weight.ext.group_size is for per_group; take it away or write scope: per_group, not {weight.scope}"
            )
        if "axes" in weight.ext.model_fields_set and not weight.scheme().is_mx:
            raise ValueError(f"weight.ext.axes is for mxfp8 and mxfp4, not {weight.dtype}; take it away")
        if weight.ext.dual_block_size and weight.scope is not QScope.DUAL_SCALE:
            raise ValueError(f"weight.ext.dual_block_size is for scope dual_scale, not {weight.scope}; take it away")
        fits = any(
            (act.dtype, act.scope) == (a.dtype, a.scope)
            and act.symmetric in a.sym
            and weight.dtype is w.dtype
            and weight.scope in w.scopes
            and weight.symmetric in w.sym
            and weight.ext.two_level == w.two_level
            for a, w in PAIRS
        )
        if not fits and not (act.dtype is QDType.FLOAT and act.scope is not QScope.PER_TENSOR):
            raise ValueError(f"{self.scheme()} is no supported pair; {_offer(weight.dtype)}")
        if not fits:
            raise ValueError(f"act.scope is {act.scope} for a float input; write per_tensor or leave act out")
        if not _method(weight.method).supports(weight.scheme()):
            able = [name for name in names("weight") if _method(name).supports(weight.scheme())]
            raise ValueError(f"weight.method {weight.method} has no {weight.scheme()}; write one of {', '.join(able)}")
        widths = act.scheme().dual_block, weight.scheme().dual_block
        if widths[0] != widths[1]:
            raise ValueError(
                f"dual_block_size is {widths[0]} in act.ext and {widths[1]} in weight.ext, {DUAL_BLOCK} where it is "
                "left out; write one number in both"
            )
        if weight.ext.model_dump().get("negative_scale") and not self._takes_negative_scales():
            raise ValueError(
                "weight.ext.negative_scale is for symmetric int weights of one level and inputs that are not "
                f"calibrated, not for {self.scheme()}; take it away"
            )
        return self

    def _takes_negative_scales(self) -> bool:
        # Of a static input, the weight's scale becomes part of deq_scale, which not every kernel reads with its sign.
        weight = self.weight.scheme()
        plain = weight.dtype in (QDType.INT8, QDType.INT4) and weight.symmetric and not weight.two_level
        return plain and not self.act.scheme().is_static

    def scheme(self) -> LinearScheme:
        """Weight and input schemes as one value."""
        return LinearScheme(self.weight.scheme(), self.act.scheme())


def refuse_weight(weight: WeightConfig) -> None:
    """Raise ValueError where no supported pair has a weight like this, whatever the input is."""
    fits = any(
        (weight.dtype, weight.ext.two_level) == (w.dtype, w.two_level)
        and weight.scope in w.scopes
        and weight.symmetric in w.sym
        for _, w in PAIRS
    )
    if not fits:
        raise ValueError(f"weight {weight.scheme()} is of no supported pair; {_offer(weight.dtype)}")


def _offer(dtype: QDType) -> str:
    """The pairs for weights of this number type, in words."""
    words = [
        f"weight {'|'.join(w.scopes)}{' two_level' if w.two_level else ''} {_symmetry(w.sym)} with act "
        + ("float" if a.dtype is QDType.FLOAT else f"{a.dtype} {a.scope} {_symmetry(a.sym)}")
        for a, w in PAIRS
        if w.dtype is dtype
    ]
    return f"{dtype} weights go with: " + "; ".join(words) if words else "a weight dtype of float quantizes nothing"


def _symmetry(allowed: tuple[bool, ...]) -> str:
    return "|".join("sym" if symmetric else "asym" for symmetric in allowed)


def _method(name: str) -> type[WeightMethod]:
    return cast(type[WeightMethod], lookup("weight", name))


def _method_examples() -> list[dict[str, Any]]:
    """Every weight method but min-max, on the first scheme of each number type that it supports and that is saved."""
    schemes: list[dict[str, Any]] = [
        {"dtype": "int8", "scope": "per_channel"},
        {"dtype": "int4", "scope": "per_group", "ext": {"group_size": 32}},
        {"dtype": "mxfp8", "scope": "per_block"},
        {"dtype": "mxfp4", "scope": "per_block"},
    ]
    return [
        scheme | {"method": method}
        for method in names("weight")
        for scheme in schemes
        if method != "minmax" and _method(method).supports(WeightConfig.model_validate(scheme).scheme())
    ]


@register("linear_quant")
class LinearQuantProcessor(BaseSessionProcessor):
    """Puts a `QuantLinear` in place of every selected `nn.Linear` of a layer.

    Linears of one layer that two steps select are refused, unless the later step says `override`: then the earlier
    step keeps them.
    """

    class Config(BaseModel, frozen=True, extra="forbid"):
        qconfig: LinearQConfig = Field(description="schemes of the input (act) and of the weight")
        include: tuple[Pattern, ...] = Field(("*",), min_length=1, description="modules to quantize")
        exclude: tuple[Pattern, ...] = Field((), description="modules to leave alone; wins over include")
        override: bool = Field(False, description="leave linears of an earlier step to it, instead of refusing")
        propagate_error: bool = Field(
            False,
            description="calibrate each layer on the outputs of the quantized layers before it, not of the float ones; "
            "one step's word holds for all, and costs one more forward of each layer",
        )

    def __init__(self, config: "LinearQuantProcessor.Config", context: RunContext) -> None:
        super().__init__(config, context)
        self._scheme = config.qconfig.scheme()
        self._selection = Selection(config.include, config.exclude)
        self._linears: dict[str, nn.Linear] = {}
        self._method = _method(config.qconfig.weight.method)(config.qconfig.weight.ext)
        self._ranges: ActRanges | None = None
        self._grams: GramObserver | None = None
        self._units: list[list[str]] = []  # linears that share a Gram
        self._shared: frozenset[str] | None = None  # linears that all ranks hold; None in a run of one rank

    @classmethod
    def examples(cls) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for act, weight in PAIRS:
            for act_sym, weight_sym, scope in product(act.sym, weight.sym, weight.scopes):
                if act.dtype is QDType.FLOAT and not act_sym:
                    continue  # a float input has no symmetry
                method = _ACT_METHODS.get((act.dtype, act.scope), "minmax")
                half: dict[str, Any] = {
                    "dtype": str(act.dtype),
                    "scope": str(act.scope),
                    "symmetric": act_sym,
                    "method": method,
                }
                ext: dict[str, Any] = {"two_level": weight.two_level}
                if scope is QScope.PER_GROUP:
                    ext["group_size"] = 32
                if scope is QScope.DUAL_SCALE:
                    half["ext"] = {"dual_block_size": 64}
                    ext["dual_block_size"] = 64
                whole = {"dtype": str(weight.dtype), "scope": str(scope), "symmetric": weight_sym, "ext": ext}
                found.append({"qconfig": {"act": half, "weight": whole}})
        dual = found[-1]["qconfig"]  # the last pair
        found.append({"qconfig": dual | {"weight": dual["weight"] | {"method": "dualscale"}}})
        mean = {"dtype": "int8", "scope": "per_tensor", "method": "minmax", "ext": {"aggregation_type": "mean"}}
        found.append({"qconfig": {"act": mean, "weight": {"dtype": "int8", "scope": "per_channel"}}})
        for half in ActConfig.histogram_examples():
            found.append({"qconfig": {"act": half, "weight": {"dtype": half["dtype"], "scope": "per_channel"}}})
        gptq = {"dtype": "int4", "scope": "per_group", "method": "gptq", "ext": {"group_size": 32}}
        found.append({"qconfig": {"weight": gptq}, "propagate_error": True})
        return found + [{"qconfig": {"weight": weight}} for weight in _method_examples()]

    def is_data_free(self) -> bool:
        return not (self._scheme.act.is_static or self._method.needs_gram)

    def sums_matrices(self) -> bool:
        return self._method.needs_gram and not self._method.diagonal_suffices

    def shares_forward(self) -> bool:
        return True  # two steps never touch the same linear, and rounding one does not change what the other sees

    def follows_rescaling(self) -> bool:
        return not self._scheme.act.is_static or self.config.qconfig.act.follows_rescaling()

    def propagates_error(self) -> bool:
        return bool(self.config.propagate_error)

    def support_distributed(self) -> bool:
        return True  # extrema are exact in any order, sums follow a fixed tree, and a weight is rounded once

    def rehearse(self, request: BatchProcessRequest) -> None:
        for name, module in list(request.module.named_modules(prefix=request.name)):
            if isinstance(module, (nn.Linear, QuantLinear)):
                self._selection.count(name)
            if not self._selection.selects(name):
                continue
            if isinstance(module, QuantLinear) and not self.config.override:
                raise UnsupportedError(
                    f"{name}: two linear_quant steps select it ({module.scheme}, then {self._scheme})",
                    "exclude it from one of them, or write override: true in the later one",
                )
            if isinstance(module, nn.Linear):
                refuse_shape(self._scheme, module.out_features, module.in_features, name)
                bias = None if module.bias is None else module.bias.dtype
                quantized = QuantLinear.on_meta(self._scheme, module.out_features, module.in_features, bias)
                _replace(request, name, quantized)

    def pre_run(self) -> None:
        self.context.record.patterns += self._selection.as_records(self.registered_name)

    def preprocess(self, request: BatchProcessRequest) -> None:
        self._linears = {
            name: module
            for name, module in request.module.named_modules(prefix=request.name)
            if isinstance(module, nn.Linear) and self._selection.selects(name)
        }
        if self._scheme.act.is_static:
            by_column = request.input_factors is not None
            self._ranges = ActRanges(self.config.qconfig.act, lambda: request.sample_id, by_column)
            self._ranges.watch(self._linears)
        if dist.is_initialized():
            # Asked now: another step of the same forward may replace its linears before this one finishes.
            helper = DistHelper(request.module, prefix=request.name)
            self._shared = frozenset(name for name in self._linears if helper.is_shared(name))
        if self._method.needs_gram:
            device = self.context.device
            ids, count = request.sample_ids, request.sample_count
            self._grams = GramObserver(ids, count, lambda: request.sample_id, device)
            structure, _ = self.context.structure_if_known(request.module)
            for is_shared in (True, False):  # apart, as all ranks know of the former only
                selected = [name for name in self._linears if self._is_shared(name) is is_shared]
                self._units += structure.input_groups(request.name, selected)
            for unit in self._units:
                self._grams.watch(unit, self._linears[unit[0]], self._method.diagonal_suffices)

    def postprocess(self, request: BatchProcessRequest) -> None:
        ranges: dict[str, FoundRange] = {}
        grams: dict[str, Gram | None] = {}
        owners = self._owners()
        if self._grams is not None:
            self._grams.close()
            found = self._grams.agree(self._is_shared, owners, request.input_factors)
            for unit in self._units:
                seen = found[unit[0]]
                if seen.tokens == 0:
                    grams |= dict.fromkeys(unit, None)
                elif seen.sums is not None:  # else another rank rounds these
                    grams |= dict.fromkeys(unit, Gram(seen.sums, seen.tokens, seen.first_bad))
        rounded = round_weights(
            self._method,
            {name: linear.weight.detach() for name, linear in self._linears.items()},
            self._scheme.weight,
            grams,
            self.context.adapter.dtype,
            owners,
            self.context.device,
        )
        if self._ranges is not None:  # after the weights: a weight that is not finite makes inputs that are not
            self._ranges.close()
            ids, count = request.sample_ids, request.sample_count
            ranges = self._ranges.agree(ids, count, self._is_shared, request.input_factors)
        for name in list(self._linears):
            _replace(request, name, self._deploy(name, self._linears.pop(name), *rounded.pop(name), ranges.get(name)))
        self._ranges = self._grams = self._shared = None
        self._units = []

    def abort(self) -> None:
        for watching in (self._ranges, self._grams):
            if watching is not None:
                watching.close()
        self._linears.clear()
        self._units.clear()

    def _is_shared(self, name: str) -> bool:
        return self._shared is None or name in self._shared

    def _owners(self) -> dict[str, int]:
        """Which rank rounds which of the linears that are dealt out."""
        shapes = {name: linear.weight.shape for name, linear in self._linears.items() if self._is_shared(name)}
        units = [unit for unit in self._units if unit[0] in shapes]
        return deal_linears(self._method, shapes, units, dist.get_world_size() if dist.is_initialized() else 1)

    def _deploy(
        self, name: str, linear: nn.Linear, codes: WeightCodes, record: dict[str, Any], seen: FoundRange | None
    ) -> QuantLinear:
        act_scale = act_offset = None
        if seen is not None:
            low, high = (end.to(self.context.device) for end in (seen.low, seen.high))
            act_scale, act_offset = act_qparam(low, high, self._scheme.act, scale_dtype=self.context.adapter.dtype)
            record |= seen.record
        if "fallback" in record:
            what = f"weight rounded by {record['fallback']} instead of {self._method.registered_name}"
            self.context.record.fallbacks.append({"module": name, "what": what, "why": record["why"]})
        self.context.record.modules[name] = {
            "scheme": str(self._scheme),
            "processor": self.registered_name,
            "method": self._method.registered_name,
            **record,
        }
        return QuantLinear(self._scheme, codes, bias=linear.bias, act_scale=act_scale, act_offset=act_offset)


def _replace(request: BatchProcessRequest, name: str, module: nn.Module) -> None:
    """Put `module` where the layer holds `name` (a full path; the layer itself is never a linear)."""
    request.module.set_submodule(name.removeprefix(request.name + "."), module)
