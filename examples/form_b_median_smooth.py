"""Form B: activations are kept while samples flow and merged over the ranks afterwards, in somebody's own processor.

    msmodelslim check-dp examples/form_b_median_smooth.yaml --plugin examples/form_b_median_smooth.py
    msmodelslim quant ... --config_path examples/form_b_median_smooth.yaml --plugin examples/form_b_median_smooth.py

Smoothing by the median: a channel whose typical |activation| is large is divided by a power of two at its norm, and the
linears that read it are multiplied. A median needs all values at once; where an extremum, a count, a sum or a number a
sample is enough, `StatStore` is the better choice, since nothing has to be kept.

Letters: T tokens, C channels.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from msmodelslim.distributed import DistHelper, sync_gather_tensor_lists
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.processor.smooth_rescale import LayerRescale
from msmodelslim.processor.smooth_subgraphs import Subgraph, declared, refuse_subgraph
from msmodelslim.registry import register


class StatKey(StrEnum):
    """What is kept of a module."""

    TENSOR = "tensor"  # [T, C] a call
    SAMPLE = "sample"  # global number of the sample of each call


class ActivationCollector:
    """Inputs of linears, call by call; only keeps them until `sync_act_stats`.

    Args:
        sample_id: says which sample is being forwarded.
    """

    def __init__(self, sample_id: Callable[[], int]) -> None:
        self.act_stats: dict[str, dict[StatKey, list[Any]]] = {}
        self._sample_id = sample_id
        self._handles: list[RemovableHandle] = []

    def watch(self, name: str, module: nn.Module) -> None:
        self.act_stats[name] = {StatKey.TENSOR: [], StatKey.SAMPLE: []}
        self._handles.append(module.register_forward_pre_hook(self.create_hook(name)))

    def create_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
            module_stats = self.act_stats[name]
            module_stats[StatKey.TENSOR].append(args[0].to("cpu").reshape(-1, args[0].shape[-1]))
            module_stats[StatKey.SAMPLE].append(self._sample_id())

        return keep

    def sync_act_stats(self, helper: DistHelper | None) -> None:
        """One list of all ranks' tensors a module, in the order of the samples, as one device would hold it."""
        for name, module_stats in self.act_stats.items():
            if helper is None or helper.is_shared(name):
                module_stats[StatKey.TENSOR] = sync_gather_tensor_lists(
                    module_stats[StatKey.TENSOR], on_cpu=True, order=module_stats[StatKey.SAMPLE], name=name
                )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@register("median_smooth")
class MedianSmoothProcessor(BaseSessionProcessor):
    """Scales the channels between norms and their linears; the layer computes what it did."""

    class Config(BaseModel, frozen=True, extra="forbid"):
        alpha: float = Field(0.5, ge=0, le=1, description="share of a channel's range that is moved into the weights")

    def __init__(self, config: "MedianSmoothProcessor.Config", context: RunContext) -> None:
        super().__init__(config, context)
        self._subgraphs: list[Subgraph] = []
        self._collector: ActivationCollector | None = None
        self._dist_helper: DistHelper | None = None

    def support_distributed(self) -> bool:
        return True

    def rehearse(self, request: BatchProcessRequest) -> None:
        for subgraph in self._find(request):
            refuse_subgraph(subgraph, _modules(request), shifted=False)

    def preprocess(self, request: BatchProcessRequest) -> None:
        modules = _modules(request)
        self._subgraphs = self._find(request)
        self._collector = ActivationCollector(lambda: request.sample_id)
        for subgraph in self._subgraphs:
            self._collector.watch(subgraph.targets[0], modules[subgraph.targets[0]])
        if dist.is_initialized():
            self._dist_helper = DistHelper(request.module, prefix=request.name)

    def postprocess(self, request: BatchProcessRequest) -> None:
        assert self._collector is not None, "preprocess made it"
        self._collector.close()
        self._collector.sync_act_stats(self._dist_helper)  # on every rank, also on one without samples
        rescale = LayerRescale(_modules(request))
        for subgraph in self._subgraphs:
            tensors = self._collector.act_stats[subgraph.targets[0]][StatKey.TENSOR]
            factor_C = self._factors(torch.cat(tensors).float()).to(self.context.device)
            problem = rescale.apply(subgraph, factor_C)
            if problem:
                what = f"not scaled by {self.registered_name}"
                self.context.record.fallbacks.append({"module": subgraph.source, "what": what, "why": problem})
        self.context.record.rewritten += rescale.commit()
        self._collector = self._dist_helper = None

    def abort(self) -> None:
        if self._collector is not None:
            self._collector.close()

    def _factors(self, x_TC: Tensor) -> Tensor:
        """What a channel is divided by: a power of two."""
        median_C = x_TC.abs().median(dim=0).values.clamp(min=torch.finfo(torch.float32).tiny)
        octaves_C = median_C.double().log2()
        return torch.exp2((self.config.alpha * (octaves_C - octaves_C.median())).round().clamp(-8, 8)).float()

    def _find(self, request: BatchProcessRequest) -> list[Subgraph]:
        return declared(self.context.adapter.structure(request.module), request.name, ["norm-linear"])


def _modules(request: BatchProcessRequest) -> dict[str, nn.Module]:
    return dict(request.module.named_modules(prefix=request.name))
