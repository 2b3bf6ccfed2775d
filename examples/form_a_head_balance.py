"""Form A: statistics that the ranks agree on inside the forward, in somebody's own processor.

    msmodelslim check-dp examples/form_a_head_balance.yaml --plugin examples/form_a_head_balance.py
    msmodelslim quant ... --config_path examples/form_a_head_balance.yaml --plugin examples/form_a_head_balance.py

Head by head, attention's values are brought to about the same range, so that one scale for the input of `o_proj` serves
all heads: rows of `v_proj` are multiplied by a power of two, and what they feed in `o_proj` is divided by it. Powers of
two are exact, so the layer computes what it did.

Letters: T tokens, H query heads, K key-value heads, D head width, N values of a head, C = K·D channels.
"""

from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch import Tensor, nn

from msmodelslim.distributed import DistHelper, sync_base_operation
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.processor.smooth_rescale import LayerRescale
from msmodelslim.processor.smooth_subgraphs import Subgraph, declared, refuse_subgraph
from msmodelslim.registry import register


class HeadRangeObserver(nn.Module):
    """Largest |value| of each head in what flows through.

    Args:
        name: its own full name in the model, to ask whether every rank holds it.
        heads: query heads.
    """

    def __init__(self, name: str, heads: int) -> None:
        super().__init__()
        self._name = name
        self._dist_helper: DistHelper | None = None
        self.absmax_H = torch.zeros(heads)  # no buffer: it is not part of the model

    def set_dist_helper(self, helper: DistHelper) -> None:
        self._dist_helper = helper

    def forward(self, x: Tensor) -> Tensor:
        heads = len(self.absmax_H)
        values_HN = x.reshape(-1, heads, x.shape[-1] // heads).transpose(0, 1).flatten(1)
        sync = self._dist_helper is not None and self._dist_helper.is_shared(self._name)
        self.update(values_HN, sync=sync)
        return x

    def update(self, values_HN: Tensor, sync: bool = False) -> None:
        self.absmax_H = torch.maximum(self.absmax_H.to(values_HN.device), values_HN.abs().amax(1).float())
        if sync and dist.is_initialized():
            sync_base_operation(self.absmax_H, op="max", name=self._name)


@register("head_balance")
class HeadBalanceProcessor(BaseSessionProcessor):
    """Scales the heads of `v_proj` and `o_proj`; the layer computes what it did."""

    class Config(BaseModel, frozen=True, extra="forbid"):
        most_doublings: int = Field(4, ge=1, le=16, description="a head is multiplied by at most 2 to this power")

    def __init__(self, config: "HeadBalanceProcessor.Config", context: RunContext) -> None:
        super().__init__(config, context)
        self._subgraphs: list[Subgraph] = []

    def support_distributed(self) -> bool:
        return True

    def syncs_in_forward(self) -> bool:
        return True  # so every rank makes equally many calls, whatever its share of the samples

    def rehearse(self, request: BatchProcessRequest) -> None:
        for subgraph in self._find(request):
            refuse_subgraph(subgraph, _modules(request), shifted=False)

    def preprocess(self, request: BatchProcessRequest) -> None:
        self._subgraphs = self._find(request)
        for subgraph in self._subgraphs:
            (o_name,) = subgraph.targets
            observer = HeadRangeObserver(f"{o_name}.0", subgraph.heads * subgraph.share)
            _put(request, o_name, nn.Sequential(observer, _modules(request)[o_name]))
        # From here on the structure stays as it is, so the topology is looked at now and not before.
        if dist.is_initialized():
            helper = DistHelper(request.module, prefix=request.name)
            for module in request.module.modules():
                if isinstance(module, HeadRangeObserver):
                    module.set_dist_helper(helper)

    def postprocess(self, request: BatchProcessRequest) -> None:
        ranges: dict[str, Tensor] = {}
        for subgraph in self._subgraphs:
            (o_name,) = subgraph.targets
            observer, linear = _modules(request)[o_name].children()
            assert isinstance(observer, HeadRangeObserver), "preprocess put it there"
            ranges[subgraph.source] = observer.absmax_H
            _put(request, o_name, linear)
        rescale = LayerRescale(_modules(request))
        for subgraph in self._subgraphs:
            factor_K = self._factors(ranges[subgraph.source].unflatten(0, (subgraph.heads, -1)).amax(1))
            problem = rescale.apply(subgraph, factor_K.repeat_interleave(subgraph.head_width))
            if problem:
                what = f"not scaled by {self.registered_name}"
                self.context.record.fallbacks.append({"module": subgraph.source, "what": what, "why": problem})
        self.context.record.rewritten += rescale.commit()

    def _factors(self, absmax_K: Tensor) -> Tensor:
        """What `v_proj` is divided by, a key-value head: a power of two, at most 1."""
        doublings_K = (absmax_K.amax() / absmax_K).log2().floor().nan_to_num(0.0, 0.0, 0.0)
        return torch.exp2(-doublings_K.clamp(max=self.config.most_doublings))

    def _find(self, request: BatchProcessRequest) -> list[Subgraph]:
        return declared(self.context.adapter.structure(request.module), request.name, ["ov"])


def _modules(request: BatchProcessRequest) -> dict[str, Any]:
    return dict(request.module.named_modules(prefix=request.name))


def _put(request: BatchProcessRequest, name: str, module: nn.Module) -> None:
    request.module.set_submodule(name.removeprefix(request.name + "."), module)
