"""The one engine of the smoothing family: move range from activations into weights, where nothing is left at run time.

A preset says how a factor follows from what a forward shows (`Plan`); the engine does the rest. It looks at the inputs
of each subgraph's consumers in one forward, lets the ranks agree, scales up-down, ov, linear-linear and norm-linear in
this order (each sees the weights as the ones before left them), and puts the new tensors in place when all are known.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch import Tensor, nn

from msmodelslim.distributed import DistHelper, StatStore
from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.quantize import refuse_shape
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.processor.patterns import Pattern, Selection
from msmodelslim.processor.smooth_rescale import LayerRescale
from msmodelslim.processor.smooth_search import Case, Exponents, ExponentSearch, Plan, weight_size
from msmodelslim.processor.smooth_statistics import InputStatistics, InputStats
from msmodelslim.processor.smooth_subgraphs import (
    NormReaders,
    Subgraph,
    SubgraphKind,
    declared,
    open_inputs,
    refuse_subgraph,
)

KindName = Literal["norm-linear", "linear-linear", "ov", "up-down"]


class SmoothConfig(BaseModel, frozen=True, extra="forbid"):
    """Options that all presets have."""

    enable_subgraph_type: tuple[KindName, ...] = Field(
        ("norm-linear", "linear-linear", "ov", "up-down"),
        min_length=1,
        description="kinds of producers whose channels are scaled",
    )
    include: tuple[Pattern, ...] | None = Field(
        None, min_length=1, description="producers to scale (norm, v, up); all when left out"
    )
    exclude: tuple[Pattern, ...] | None = Field(None, description="producers to leave alone; wins over include")


class SmoothProcessor(BaseSessionProcessor, ABC):
    """Scales the channels between the producers and consumers of a layer; the layer computes what it did.

    Attributes:
        chosen: full name of each scaled producer → its exponents.
    """

    def __init__(self, config: Any, context: RunContext) -> None:
        super().__init__(config, context)
        self.chosen: dict[str, Exponents] = {}
        self._plan = self.plan()
        self._selection = Selection(("*",) if config.include is None else config.include, config.exclude or ())
        self._store: StatStore | None = None
        self._losses: StatStore | None = None
        self._shared: DistHelper | None = None
        self._subgraphs: list[Subgraph] = []
        self._selected = 0  # in the whole model, counted by the rehearsal
        self._inputs: InputStatistics | None = None
        self._readers: NormReaders | None = None

    @abstractmethod
    def plan(self) -> Plan:
        """What this preset makes of the engine."""

    #: whether linears without a producer that could be scaled are smoothed, too
    smooths_unfused: ClassVar[bool] = True

    def sums_matrices(self) -> bool:
        return bool(self._plan.stages) and self._plan.scheme.act.is_float

    def rescales_inputs(self) -> bool:
        return not self._plan.shift

    def follows_rescaling(self) -> bool:
        return True

    def shifts_inputs(self) -> bool:
        return self._plan.shift

    def support_distributed(self) -> bool:
        return True  # every decision follows from what the ranks agreed on

    def rehearse(self, request: BatchProcessRequest) -> None:
        for declared_ in self._declared(request):
            self._selection.count(declared_.source)
            if not self._selection.selects(declared_.source):
                continue
            self._selected += 1
            subgraph = open_inputs(declared_, request.module, request.name)
            modules = _modules(request)
            refuse_subgraph(subgraph, modules, self._plan.shift)
            if self._plan.stages:
                for name in subgraph.targets:
                    rows, columns = modules[name].get_parameter("weight").shape
                    refuse_shape(self._plan.scheme, rows, columns, name)

    def pre_run(self) -> None:
        self.context.record.patterns += self._selection.as_records(self.registered_name)
        if not self._selected:
            kinds = ", ".join(self.config.enable_subgraph_type)
            self.context.record.warnings.append(
                f"{self.registered_name} scales nothing: no producer of this model's layers is selected ({kinds})"
            )

    def preprocess(self, request: BatchProcessRequest) -> None:
        if self._store is None:
            self._store = StatStore(request.sample_ids, request.sample_count, device=self.context.device)
            self._losses = StatStore(request.sample_ids, request.sample_count)  # float64, which not every device has
        selected = [one for one in self._declared(request) if self._selection.selects(one.source)]
        self._subgraphs = [open_inputs(one, request.module, request.name) for one in selected]
        modules = _modules(request)
        if dist.is_available() and dist.is_initialized():
            self._shared = DistHelper(request.module, prefix=request.name)
            self._refuse_half_shared(self._shared)
        for subgraph in self._subgraphs:
            refuse_subgraph(subgraph, modules, self._plan.shift)
        self._inputs = InputStatistics(self._store, request.sample_count, lambda: request.sample_id)
        order = list(modules)  # about as data flows, so that the cause is told, not its echoes
        for subgraph in sorted(self._subgraphs, key=lambda one: order.index(one.targets[0])):
            first = modules[subgraph.targets[0]]
            width = first.get_parameter("weight").shape[1]
            self._inputs.watch(
                subgraph.targets[0],
                first,
                mean=self._plan.formula.act == "mean",
                gram=self._plan.needs_gram(width),
                tokens=self._plan.needs_tokens(width),
            )
        if self.rescales_inputs():
            request.expect_rescaling()
        norms = [one.source for one in self._subgraphs if one.kind is SubgraphKind.NORM_LINEAR]
        self._readers = NormReaders(request.module, request.name, norms, lambda: request.sample_id)

    def postprocess(self, request: BatchProcessRequest) -> None:
        assert self._inputs is not None and self._readers is not None and self._losses is not None, "preprocess ran"
        factors = request.input_factors or {}
        self._inputs.close()
        self._readers.close()
        self._readers.refuse_others(self._subgraphs)
        stats = {
            name: seen if name not in factors else seen.rescaled(factors[name])
            for name, seen in self._inputs.agree(self._shared).items()
        }
        rescale = LayerRescale(_modules(request))
        search = ExponentSearch(self._plan, self._losses, self.context.adapter.dtype, self._shared)
        kinds = self._kinds(request)
        for kind in SubgraphKind:
            if kind in kinds:
                self._scale(self._cases(kind, stats, rescale), search, rescale)
        if self.rescales_inputs():
            for name, factor_I in rescale.input_factors().items():
                request.rescale_inputs(name, factor_I)
        self.context.record.rewritten += rescale.commit()
        self._inputs = self._readers = self._shared = None

    def abort(self) -> None:
        for watching in (self._inputs, self._readers):
            if watching is not None:
                watching.close()

    def _declared(self, request: BatchProcessRequest) -> list[Subgraph]:
        return declared(self.context.adapter.structure(request.module), request.name, self._kinds(request))

    def _kinds(self, request: BatchProcessRequest) -> tuple[str, ...]:
        unfused = self.smooths_unfused and self.context.adapter.structure(request.module).unfused
        return (*self.config.enable_subgraph_type, *([SubgraphKind.NON_FUSION] if unfused else []))

    def _cases(self, kind: SubgraphKind, stats: dict[str, InputStats], rescale: LayerRescale) -> list[Case]:
        cases = []
        for subgraph in self._subgraphs:
            if subgraph.kind is not kind:
                continue
            seen = stats.get(subgraph.targets[0])
            if seen is None:
                self._fall_back(subgraph, f"no calibration sample reached {subgraph.targets[0]}")
                continue
            weight_I = weight_size(rescale, subgraph.targets, self._plan.formula, self._plan.scheme.weight)
            if not torch.isfinite(weight_I).all():
                raise InvalidModelError(
                    f"{', '.join(subgraph.targets)}: a weight is infinite or NaN",
                    f"check the checkpoint for damage, or exclude {subgraph.source} from smoothing",
                )
            cases.append(Case(subgraph, seen, self._act_size(subgraph, seen), weight_I))
        return cases

    def _scale(self, cases: list[Case], search: ExponentSearch, rescale: LayerRescale) -> None:
        for case, exponents in zip(cases, search.choose(cases, rescale), strict=True):
            subgraph, seen = case.subgraph, case.stats
            if exponents is None:
                self._fall_back(subgraph, f"the squares of the inputs of {subgraph.targets[0]} overflow")
                continue
            factor_C = case.factors(exponents, self._plan.formula)
            shift_C = (seen.minimum_I + seen.maximum_I) / 2 if self._is_shifted(subgraph) else None
            problem = rescale.apply(subgraph, factor_C, shift_C)
            if problem:
                self._fall_back(subgraph, problem)
            else:
                self.chosen[subgraph.source] = exponents
                self.context.record.smoothing.append(
                    {
                        "module": subgraph.source,
                        "processor": self.registered_name,
                        "subgraph": str(subgraph.kind),
                        "act_exponent": exponents.act,
                        "weight_exponent": exponents.weight,
                    }
                )

    def _act_size(self, subgraph: Subgraph, seen: InputStats) -> Tensor:
        if self._is_shifted(subgraph):
            return (seen.maximum_I - seen.minimum_I) / 2
        if self._plan.formula.act == "absmax":
            return seen.absmax_I
        assert seen.mean_I is not None, "the mean was asked for"
        return seen.mean_I

    def _is_shifted(self, subgraph: Subgraph) -> bool:
        return self._plan.shift and subgraph.kind is SubgraphKind.NORM_LINEAR

    def _fall_back(self, subgraph: Subgraph, why: str) -> None:
        self.context.record.fallbacks.append(
            {"module": subgraph.source, "what": f"not scaled by {self.registered_name}", "why": why}
        )

    def _refuse_half_shared(self, shared: DistHelper) -> None:
        """Raise where some ranks hold a subgraph's member and others do not: their factors would differ.

        Raises:
            UnsupportedError: names the subgraph and the member.
        """
        for subgraph in self._subgraphs:
            members = (subgraph.source, *subgraph.targets)
            alone = [name for name in members if shared.is_local_only(name)]
            if alone and len(alone) < len(members):
                raise UnsupportedError(
                    f"{subgraph.source}: {', '.join(alone)} is on some ranks only, so ranks would scale it differently",
                    f"exclude {subgraph.source} from smoothing",
                )


def _modules(request: BatchProcessRequest) -> dict[str, nn.Module]:
    """Full name → module of a layer."""
    return dict(request.module.named_modules(prefix=request.name))
