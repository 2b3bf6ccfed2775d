"""Twins of the examples' processors, each with one mistake that people make; loaded as a plugin after the examples."""

import os
import signal
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msmodelslim.distributed import DistHelper, sync_base_operation, sync_gather_tensor_lists
from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.registry import register

form_a: Any = sys.modules["msmodelslim_plugin_form_a_head_balance"]
form_b: Any = sys.modules["msmodelslim_plugin_form_b_median_smooth"]


@register("twin_unsupported")
class Unsupported(form_a.HeadBalanceProcessor):
    def support_distributed(self) -> bool:
        return False


@register("twin_undeclared")
class Undeclared(form_a.HeadBalanceProcessor):
    """Communicates in the forward and does not say so."""

    def syncs_in_forward(self) -> bool:
        return False


def _only_accumulate(observer: Any, values_HN: Tensor, sync: bool = False) -> None:
    form_a.HeadRangeObserver.update(observer, values_HN, sync=False)


@register("twin_a_no_sync")
class NoSync(form_a.HeadBalanceProcessor):
    def preprocess(self, request: BatchProcessRequest) -> None:
        super().preprocess(request)
        for module in request.module.modules():
            if isinstance(module, form_a.HeadRangeObserver):
                module.update = partial(_only_accumulate, module)


@register("twin_stale")
class Stale(form_a.HeadBalanceProcessor):
    def preprocess(self, request: BatchProcessRequest) -> None:
        helper = DistHelper(request.module, prefix=request.name)
        super().preprocess(request)
        for module in request.module.modules():
            if isinstance(module, form_a.HeadRangeObserver):
                module.set_dist_helper(helper)


class _Expert(nn.Module):
    """Stands for a routed expert that one rank holds."""

    def forward(self) -> None:
        sync_base_operation(torch.ones(2), op="max")


@register("twin_a_local")
class SyncsLocal(form_a.HeadBalanceProcessor):
    def preprocess(self, request: BatchProcessRequest) -> None:
        if dist.get_rank() == 1:
            request.module.add_module("expert", _Expert())
        super().preprocess(request)

    def postprocess(self, request: BatchProcessRequest) -> None:
        expert = dict(request.module.named_children()).get("expert")
        if expert is not None:
            expert()
            del request.module.expert
        super().postprocess(request)


@register("twin_b_no_sync")
class ListsNotMerged(form_b.MedianSmoothProcessor):
    def postprocess(self, request: BatchProcessRequest) -> None:
        self._collector.sync_act_stats = lambda helper: None
        super().postprocess(request)


@register("twin_if_data")
class SyncsIfData(form_b.MedianSmoothProcessor):
    def postprocess(self, request: BatchProcessRequest) -> None:
        if request.datas:
            super().postprocess(request)
        else:
            self._collector.close()
            self._collector = None


@register("twin_b_local")
class GathersLocal(form_b.MedianSmoothProcessor):
    def preprocess(self, request: BatchProcessRequest) -> None:
        if dist.get_world_size() > 1 and dist.get_rank() == 0:
            request.module.add_module("expert", nn.Identity())
        super().preprocess(request)

    def postprocess(self, request: BatchProcessRequest) -> None:
        for name, module in request.module.named_modules(prefix=request.name):
            if type(module) is nn.Identity:
                sync_gather_tensor_lists([torch.ones(1)], order=[len(name)])
        super().postprocess(request)


@register("twin_means")
class MeanOfMeans(form_b.MedianSmoothProcessor):
    """Takes the mean of the ranks' own medians: the same on every rank, and another on every number of ranks."""

    def postprocess(self, request: BatchProcessRequest) -> None:
        for stats in self._collector.act_stats.values():
            own = torch.cat(stats[form_b.StatKey.TENSOR]).abs().median(0).values
            stats[form_b.StatKey.TENSOR] = [sync_base_operation(own, op="mean").unsqueeze(0)]
            stats[form_b.StatKey.SAMPLE] = [dist.get_rank()]
        self._collector.sync_act_stats = lambda helper: None
        super().postprocess(request)


@register("twin_raw")
class RawCollective(form_b.MedianSmoothProcessor):
    """Calls torch itself, on one rank alone, so nothing notices and all wait for ever."""

    def postprocess(self, request: BatchProcessRequest) -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))
        super().postprocess(request)


@register("twin_fails")
class FailsWithoutData(form_b.MedianSmoothProcessor):
    def postprocess(self, request: BatchProcessRequest) -> None:
        if not request.datas:
            raise ValueError("no sample here")
        super().postprocess(request)


@register("twin_loops")
class NeverReturns(form_b.MedianSmoothProcessor):
    """Is silent outside of any collective."""

    def postprocess(self, request: BatchProcessRequest) -> None:
        while dist.get_rank() == 1:
            pass
        super().postprocess(request)


@register("twin_killed")
class Killed(form_b.MedianSmoothProcessor):
    def postprocess(self, request: BatchProcessRequest) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().postprocess(request)


@register("twin_experts")
class LeavesLocalAlone(form_b.MedianSmoothProcessor):
    """Has a module of its own on each rank, as experts are, and does right by them."""

    def preprocess(self, request: BatchProcessRequest) -> None:
        self._own = f"expert{dist.get_rank()}"
        request.module.add_module(self._own, nn.Identity())
        super().preprocess(request)

    def postprocess(self, request: BatchProcessRequest) -> None:
        shared = self._dist_helper.is_shared(f"{request.name}.{self._own}")
        assert shared == (dist.get_world_size() == 1)
        super().postprocess(request)
        delattr(request.module, self._own)


@register("twin_keeps")
class KeepsItsOwn(form_b.MedianSmoothProcessor):
    """Keeps a number of its own that no result depends on."""

    def postprocess(self, request: BatchProcessRequest) -> None:
        self.largest = max(
            (float(one.abs().max()) for one in self._collector.act_stats[self._subgraphs[0].targets[0]]["tensor"]),
            default=0.0,
        )
        super().postprocess(request)
