"""The recommended way: a `StatStore` collects while samples flow and the ranks agree once a layer.

    msmodelslim check-dp examples/store_rms_smooth.yaml --plugin examples/store_rms_smooth.py
    msmodelslim quant ... --config_path examples/store_rms_smooth.yaml --plugin examples/store_rms_smooth.py

Smoothing by the root mean square: a channel with large activations is divided by a power of two at its norm, and the
linears that read it are multiplied. Squares are summed in floats, whose sum depends on the order of adding; the store
adds in an order that does not depend on the number of ranks.

Letters: T tokens, C channels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from msmodelslim.distributed import DistHelper, StatKind, StatStore
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.processor.smooth_rescale import LayerRescale
from msmodelslim.processor.smooth_subgraphs import Subgraph, declared, refuse_subgraph
from msmodelslim.registry import register


@register("rms_smooth")
class RmsSmoothProcessor(BaseSessionProcessor):
    """Scales the channels between norms and their linears; the layer computes what it did."""

    class Config(BaseModel, frozen=True, extra="forbid"):
        alpha: float = Field(0.5, ge=0, le=1, description="share of a channel's range that is moved into the weights")

    def __init__(self, config: "RmsSmoothProcessor.Config", context: RunContext) -> None:
        super().__init__(config, context)
        self._subgraphs: list[Subgraph] = []
        self._store: StatStore | None = None
        self._helper: DistHelper | None = None
        self._handles: list[RemovableHandle] = []

    def support_distributed(self) -> bool:
        return True

    def rehearse(self, request: BatchProcessRequest) -> None:
        for subgraph in self._find(request):
            refuse_subgraph(subgraph, _modules(request), shifted=False)

    def preprocess(self, request: BatchProcessRequest) -> None:
        modules = _modules(request)
        self._subgraphs = self._find(request)
        self._store = StatStore(request.sample_ids, request.sample_count, device=self.context.device)
        for subgraph in self._subgraphs:
            name = subgraph.targets[0]
            self._store.declare(f"{name}:squares", StatKind.SUM)  # so that a rank without samples lists it too
            self._handles.append(modules[name].register_forward_pre_hook(self._measure(name, request)))
        if dist.is_initialized():
            self._helper = DistHelper(request.module, prefix=request.name)

    def _measure(self, name: str, request: BatchProcessRequest) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            assert self._store is not None, "preprocess made it"
            squares_C = args[0].reshape(-1, args[0].shape[-1]).float().square().sum(0)
            self._store.add_sum(f"{name}:squares", request.sample_id, squares_C)

        return measure

    def postprocess(self, request: BatchProcessRequest) -> None:
        assert self._store is not None, "preprocess made it"
        self._close()
        stats = self._store.agree(self._helper)
        rescale = LayerRescale(_modules(request))
        for subgraph in self._subgraphs:
            squares_C = stats[f"{subgraph.targets[0]}:squares"].value
            if squares_C is None:
                continue  # no sample reached it, on any rank
            problem = rescale.apply(subgraph, self._factors(squares_C))
            if problem:
                what = f"not scaled by {self.registered_name}"
                self.context.record.fallbacks.append({"module": subgraph.source, "what": what, "why": problem})
        self.context.record.rewritten += rescale.commit()
        self._store = self._helper = None

    def abort(self) -> None:
        self._close()

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _factors(self, squares_C: Tensor) -> Tensor:
        """What a channel is divided by: a power of two."""
        octaves_C = squares_C.clamp(min=torch.finfo(torch.float32).tiny).double().log2() / 2
        return torch.exp2((self.config.alpha * (octaves_C - octaves_C.median())).round().clamp(-8, 8)).float()

    def _find(self, request: BatchProcessRequest) -> list[Subgraph]:
        return declared(self.context.adapter.structure(request.module), request.name, ["norm-linear"])


def _modules(request: BatchProcessRequest) -> dict[str, nn.Module]:
    return dict(request.module.named_modules(prefix=request.name))
