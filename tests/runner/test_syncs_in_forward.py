"""Steps that communicate while samples flow: who shares a forward with them, and what a rank without samples gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from msmodelslim.distributed import sync_base_operation
from msmodelslim.errors import UnsupportedError
from msmodelslim.model.base import ProcessRequest
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext, RunRecord
from msmodelslim.processor.group import GroupProcessor
from msmodelslim.recipe import Step
from msmodelslim.registry import register
from msmodelslim.runner.base import share_forwards
from msmodelslim.runner.layer_wise_runner import LayerWiseRunner
from msmodelslim.runner.spare import from_rank_zero
from tests.registry_copy import own_registry
from tests.run_ranks import RankRunner

CPU = torch.device("cpu")


class Syncing(BaseSessionProcessor):
    """Notes the largest value of each call, over all ranks, and how often it is called."""

    registered_name = "syncing"
    seen: list[float]

    def syncs_in_forward(self) -> bool:
        return True

    def shares_forward(self) -> bool:
        return True

    def preprocess(self, request: BatchProcessRequest) -> None:
        self.seen = []

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            largest = args[0].max().reshape(1).clone()
            self.seen.append(float(sync_base_operation(largest, "max")))

        self._handle = request.module.register_forward_pre_hook(measure)

    def postprocess(self, request: BatchProcessRequest) -> None:
        self._handle.remove()
        self.context.record.warnings.append(f"{request.name} {self.seen}")


class Counting(Syncing):
    """Does not communicate; notes which samples it sees."""

    registered_name = "counting"

    def syncs_in_forward(self) -> bool:
        return False

    def preprocess(self, request: BatchProcessRequest) -> None:
        self.seen = []
        self._handle = request.module.register_forward_pre_hook(lambda *_: self.seen.append(request.sample_id))


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Adapter:
    """Two layers that double."""

    layer_names = ("0", "1")

    def enable_kv_cache(self, model: nn.Module, need: bool) -> None:
        pass

    def generate_model_visit(self, model: nn.Module, device: torch.device) -> Any:
        for name in self.layer_names:
            yield ProcessRequest(name, model.get_submodule(name))

    def generate_model_forward(self, model: nn.Module, inputs: dict[str, Any], device: torch.device) -> Any:
        x = inputs["x"]
        for name in self.layer_names:
            x = yield ProcessRequest(name, model.get_submodule(name), (x,))


def run_on(rank: int, ranks: int, samples: list[float]) -> list[str]:
    context = RunContext(Adapter(), nn.Sequential(Doubling(), Doubling()), CPU, RunRecord())  # type: ignore[arg-type]
    inputs = [{"x": torch.tensor([value])} for value in samples]
    ids = list(range(rank, len(samples), ranks))
    LayerWiseRunner(
        context,
        [Syncing(None, context), Counting(None, context)],
        [inputs[index] for index in ids],
        ids,
        len(samples),
        rounds=-(-len(samples) // ranks),
        spare=inputs[0] if len(samples) < ranks else None,
    ).run()
    return context.record.warnings


def run_on_two(rank: int, samples: list[float]) -> list[str]:
    return run_on(rank, 2, samples)


def test_every_rank_calls_a_syncing_step_equally_often_and_others_see_each_sample_once(run_ranks: RankRunner) -> None:
    zero, one = run_ranks(2, run_on_two, [1.0, 5.0, 3.0])
    # Rank 1 has sample 1 alone and repeats it beside sample 2.
    assert zero == ["0 [5.0, 5.0]", "0 [0, 2]", "1 [10.0, 10.0]", "1 [0, 2]"]
    assert one == ["0 [5.0, 5.0]", "0 [1]", "1 [10.0, 10.0]", "1 [1]"]


def test_a_rank_without_samples_forwards_sample_0_for_a_syncing_step_alone(run_ranks: RankRunner) -> None:
    zero, one = run_ranks(2, run_on_two, [4.0])
    assert zero == ["0 [4.0]", "0 [0]", "1 [8.0]", "1 [0]"]
    assert one == ["0 [4.0]", "0 []", "1 [8.0]", "1 []"]


def outputs_of_rank_zero(rank: int) -> list[Any]:
    own = [torch.tensor([1.5, -2.0], dtype=torch.bfloat16), (torch.tensor(7), None, torch.zeros(0, 3))]
    return [from_rank_zero(one if rank == 0 else None, CPU) for one in own]


def test_outputs_travel_from_rank_0_as_tensors_or_tuples(run_ranks: RankRunner) -> None:
    for tensor, (number, nothing, empty) in run_ranks(3, outputs_of_rank_zero):
        assert tensor.dtype == torch.bfloat16 and tensor.tolist() == [1.5, -2.0]
        assert number.item() == 7 and nothing is None and empty.shape == (0, 3)


def test_a_step_that_communicates_in_the_forward_shares_it_only_with_its_kind() -> None:
    context = SimpleNamespace()
    one, two, three = Counting(None, context), Syncing(None, context), Syncing(None, context)
    assert share_forwards([one, two, three]) == [[one], [two, three]]
    assert share_forwards([two, one]) == [[two], [one]]


def test_a_group_of_both_kinds_is_refused() -> None:
    with own_registry():
        register("syncing")(Syncing)
        register("counting")(Counting)
        both = tuple(Step(name, Syncing.Config()) for name in ("syncing", "counting"))
        alone = GroupProcessor(GroupProcessor.Config(configs=both[:1]), SimpleNamespace())
        assert alone.syncs_in_forward()
        with pytest.raises(
            UnsupportedError, match=r"group: \['syncing'\] communicate while samples flow and \['counting'\]"
        ):
            GroupProcessor(GroupProcessor.Config(configs=both), SimpleNamespace())
