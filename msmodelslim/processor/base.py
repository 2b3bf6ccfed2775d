"""What every step of a recipe is: hooks that a runner calls, layer by layer, in the recipe's order.

A run calls, for each processor: `pre_run` once; for each layer `preprocess`, then `process` (the calibration forward,
unless the processor is data free), then `postprocess`; `post_run` once. Before any weight is read, `rehearse` is called
for each layer on meta tensors: it makes the same change of structure as the run will and refuses what cannot work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from msmodelslim.errors import UnsupportedError
from msmodelslim.model.base import ModelSlimPipelineInterfaceV1
from msmodelslim.model.structure import LayerStructure


@dataclass
class BatchProcessRequest:
    """One layer, with the arguments of every sample this rank calibrates on.

    Args:
        name: full module path of the layer ("model.layers.3").
        module: the layer itself.
        datas: (args, kwargs) a sample; None when no processor of the run needs data.
        outputs: what the layer returned, a sample; set by `process`.
        sample_ids: global index of each sample in `datas`.
        sample_count: samples of all ranks together.
        sample_id: global index of the sample being forwarded; -1 outside a forward.
        last_forward: nobody forwards these samples through this layer again, so an input may go once it is used.
        on_sample: told (samples done, samples in all) while a forward goes on.
        input_factors: linear, by full name → what its input columns have been divided by since they were observed, [I];
            None while no step that shares this forward rescales inputs.
    """

    name: str
    module: nn.Module
    datas: list[tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    outputs: list[Any] | None = None
    sample_ids: Sequence[int] = ()
    sample_count: int = 0
    sample_id: int = -1
    last_forward: bool = False
    on_sample: Callable[[int, int], None] = field(default=lambda done, total: None, repr=False)
    input_factors: dict[str, Tensor] | None = field(default=None, repr=False)

    def forward(self) -> None:
        """Call the layer with each sample alone, in order, and keep what it returns in `outputs`."""
        assert self.datas is not None, "a run that needs data has some"
        self.outputs = []
        for index, sample_id in enumerate(self.sample_ids):
            self.sample_id = sample_id
            args, kwargs = self.datas[index]
            if self.last_forward and sample_id:  # sample 0 is looked at once more, to measure what rounding does
                self.datas[index] = ((), {})  # one copy of all activations is enough
            self.outputs.append(self.module(*args, **kwargs))
            self.on_sample(len(self.outputs), len(self.datas))
        self.sample_id = -1

    def expect_rescaling(self) -> None:
        """A step that observes the coming forward will rescale inputs: later steps of this forward observe columns."""
        if self.input_factors is None:
            self.input_factors = {}

    def rescale_inputs(self, linear: str, factor_I: Tensor) -> None:
        """The input columns of a linear are divided by `factor_I` [I] from now on."""
        assert self.input_factors is not None, "rescaling was announced before the forward"
        before_I = self.input_factors.get(linear)
        self.input_factors[linear] = factor_I if before_I is None else before_I * factor_I


@dataclass
class RunRecord:
    """What processors and savers tell the report; every entry is plain data.

    Args:
        modules: full module name → {"scheme", "processor", "weight_error"...}.
        patterns: one entry a pattern: {"processor", "list" ("include"/"exclude"), "pattern", "matches"}.
        rewritten: tensors of the source that a step changed before rounding, or added, by full name ("….weight").
        smoothing: one entry a scaled producer: {"module", "processor", "subgraph", "act_exponent", "weight_exponent"}.
        fallbacks: one entry an exception to the recipe: {"module", "what", "why"}.
        warnings: sentences for the closing summary.
        layers: one entry a layer: {"name", "seconds" and "memory_mib" by phase, "weight_error", "output_error", ...}.
    """

    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    patterns: list[dict[str, Any]] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    smoothing: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class RunContext:
    """What a processor may know of its run, besides the model.

    Args:
        adapter: the model family, opened on the source checkpoint.
        model: the module tree; layers not yet reached are on `meta`.
        device: where layers are computed.
        record: what ends up in the report.
        seed: random numbers come from (seed, module name), never from global state.
    """

    adapter: ModelSlimPipelineInterfaceV1
    model: nn.Module
    device: torch.device
    record: RunRecord
    seed: int = 42

    def structure_if_known(self, layer: nn.Module) -> tuple[LayerStructure, str]:
        """The parts of one decoder layer and "", or no parts and why they are not known."""
        try:
            return self.adapter.structure(layer), ""
        except UnsupportedError as error:
            return LayerStructure(), error.message


class BaseSessionProcessor:
    """One step of a recipe. Its frozen nested `Config` is the step's recipe schema."""

    kind: ClassVar[str] = "processor"
    registered_name: ClassVar[str]
    #: option of `Config` whose items are steps themselves, as in `group`; empty for none
    nested_field: ClassVar[str] = ""

    class Config(BaseModel, frozen=True, extra="forbid"):
        """No options."""

    @classmethod
    def examples(cls) -> list[dict[str, Any]]:
        """Options, as in a recipe, that together exercise the processor; tests of equal bytes run each of them."""
        return [{}]

    def __init__(self, config: Any, context: RunContext) -> None:
        self.config = config
        self.context = context

    @property
    def children(self) -> "Sequence[BaseSessionProcessor]":
        """The steps inside this one, where there are any."""
        return ()

    def pre_run(self) -> None:
        """Once, before the first layer."""

    def rehearse(self, request: BatchProcessRequest) -> None:
        """The change of structure this processor makes to the layer, on meta tensors; raise what cannot work."""

    def preprocess(self, request: BatchProcessRequest) -> None:
        """Before the calibration forward: change structure first, then install observers, then a `DistHelper`."""

    def process(self, request: BatchProcessRequest) -> None:
        """The calibration forward: each sample alone, in order."""
        if request.datas is not None:
            request.forward()

    def postprocess(self, request: BatchProcessRequest) -> None:
        """After the forward: agree on statistics, compute parameters, put the final modules in place."""

    def post_run(self) -> None:
        """Once, after the last layer."""

    def abort(self) -> None:
        """The run failed: give back what outlives it (files, hooks). Called at most once, instead of `post_run`."""

    def is_data_free(self) -> bool:
        """True when no calibration forward is needed."""
        return False

    def shares_forward(self) -> bool:
        """True when `postprocess` leaves alone what a later processor would observe, so both may use one forward."""
        return False

    def rescales_inputs(self) -> bool:
        """True when `postprocess` changes nothing that a later processor would observe but the scale of input columns.

        Such a processor calls `request.expect_rescaling` before the forward and `request.rescale_inputs` after it. Then
        a later processor that `follows_rescaling` may use the same forward.
        """
        return False

    def follows_rescaling(self) -> bool:
        """True when what it observes can be made up for `request.input_factors` in `postprocess`."""
        return False

    def shifts_inputs(self) -> bool:
        """True when `postprocess` takes a constant from input columns, for which no other processor can make up."""
        return False

    def propagates_error(self) -> bool:
        """True when the layers after this one shall be calibrated on its outputs as it is once all steps are done.

        The runner then forwards the samples once more through the finished layer, whatever step asks for it. Otherwise
        the next layer gets the outputs of the last calibration forward, without what was rounded after it.
        """
        return False

    def need_kv_cache(self) -> bool:
        """True when the forward must run with its key-value cache."""
        return False

    def sums_matrices(self) -> bool:
        """True when it adds up float matrices over samples, so that they are dealt for few partial sums."""
        return False

    def syncs_in_forward(self) -> bool:
        """True when its observers communicate while samples flow, so that every rank must forward equally many.

        A rank with fewer samples than another then forwards one again and drops the outcome, so only statistics that do
        not count how often they see a sample, such as extrema, may be collected so. Such a processor shares its forward
        only with others of its kind.
        """
        return False

    def support_distributed(self) -> bool:
        """True when the processor gives the same result on any number of ranks."""
        return False
