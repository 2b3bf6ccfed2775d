"""Smoothing on several ranks gives the bits of one rank; activations merged over ranks are those of one rank, too."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from msmodelslim.distributed import DistHelper, shard_rank
from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.model.structure import LayerStructure
from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.processor.flex_smooth_quant import FlexStatsCollector, StatKey
from msmodelslim.processor.linear_quant import LinearQConfig
from tests.processor.smooth_driver import EVERY_KIND, NAME, PRESETS, TinyLayer, inputs, smooth, smoother
from tests.run_ranks import RankRunner, run_ranks

__all__ = ["run_ranks"]

SAMPLES = 5
W4A16_GROUPS = {"weight": {"dtype": "int4", "scope": "per_group", "ext": {"group_size": 8}}}


def bfloat16_layer() -> TinyLayer:
    return TinyLayer(4, 2, bias=True).randomize().to(torch.bfloat16)


def share(rank: int, world_size: int, how: str) -> list[int]:
    if how == "shards":
        return [i for i in range(SAMPLES) if shard_rank(i, world_size) == rank]
    return list(range(rank, SAMPLES, world_size))


def smoothed(rank: int, how: str, every_preset: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Weights and exponents, by preset."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    own = share(rank, world_size, how)
    samples = inputs(SAMPLES, dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for preset, options in every_preset.items():
        layer = bfloat16_layer()
        processor = smoother(layer, layer.structure(), preset, **options, enable_subgraph_type=EVERY_KIND)
        for _ in range(2 if preset == "awq" else 1):  # a second layer with the same store
            smooth(layer, [samples[i] for i in own], processor, own, SAMPLES)
        found[preset] = (dict(layer.state_dict()), processor.chosen)
    return found


@pytest.mark.parametrize(("world_size", "how"), [(3, "shards"), (7, "cyclic")])
def test_ranks_give_the_bits_of_one_rank(run_ranks: RankRunner, world_size: int, how: str) -> None:
    expected = smoothed(0, how, PRESETS)
    for found in run_ranks(world_size, smoothed, how, PRESETS):
        for preset, (tensors, chosen) in expected.items():
            assert found[preset][1] == chosen, preset
            for name, tensor in tensors.items():
                assert torch.equal(found[preset][0][name], tensor), f"{preset} {name}"


def weight_only(rank: int) -> tuple[dict[str, Tensor], Any]:
    own = share(rank, dist.get_world_size() if dist.is_initialized() else 1, "cyclic")
    samples = inputs(SAMPLES, dtype=torch.bfloat16)
    layer = bfloat16_layer()
    processor = smoother(layer, layer.structure(), "flex_awq_ssz", qconfig=W4A16_GROUPS)
    smooth(layer, [samples[i] for i in own], processor, own, SAMPLES)
    return dict(layer.state_dict()), processor.chosen


def test_a_weight_only_search_is_split_over_ranks_without_a_trace(run_ranks: RankRunner) -> None:
    tensors, chosen = weight_only(0)
    assert LinearQConfig.model_validate(W4A16_GROUPS).scheme().act.is_float
    for found, exponents in run_ranks(3, weight_only):
        assert exponents == chosen
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def with_a_bad_sample(rank: int, preset: str) -> str:
    own = share(rank, dist.get_world_size(), "cyclic")
    samples = inputs(SAMPLES, dtype=torch.bfloat16)
    samples[2][0, 1, 7] = torch.inf
    layer = bfloat16_layer()
    try:
        smooth(
            layer,
            [samples[i] for i in own],
            smoother(layer, layer.structure(), preset, **PRESETS[preset]),
            own,
            SAMPLES,
        )
    except InvalidModelError as error:
        return str(error)
    return ""


def test_every_rank_names_the_bad_sample_that_one_rank_saw(run_ranks: RankRunner) -> None:
    for message in run_ranks(3, with_a_bad_sample, "awq"):
        assert "its input is not finite in calibration sample 2; take that sample out" in message


def with_a_local_consumer(rank: int) -> str:
    layer = TinyLayer().randomize()
    layer.add_module(f"expert_{rank}", nn.Linear(24, 8))
    structure = LayerStructure(norm_linears=(("norm_2", ("gate", "up", f"expert_{rank}")),))
    try:
        smoother(layer, structure, "iter_smooth").preprocess(
            BatchProcessRequest(NAME, layer, [], sample_ids=[rank], sample_count=2)
        )
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_shared_norm_with_consumers_on_some_ranks_only_is_refused(run_ranks: RankRunner) -> None:
    for rank, message in enumerate(run_ranks(2, with_a_local_consumer)):
        assert message == (
            f"model.layers.0.norm_2: model.layers.0.expert_{rank} is on some ranks only, so ranks would scale it "
            "differently; exclude model.layers.0.norm_2 from smoothing"
        )


class TwoExperts(nn.Module):
    """A linear that all ranks hold and use, one that only even samples reach, and one that only this rank holds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(6, 4), nn.Linear(6, 4)
        self.add_module(f"own_{rank}", nn.Linear(6, 4))


def collected(rank: int, ordered: bool, on_ranks: bool) -> dict[str, list[Tensor]]:
    world_size = dist.get_world_size() if on_ranks else 1
    model = TwoExperts(rank)
    current = [-1]
    collector = FlexStatsCollector((lambda: current[0]) if ordered else None)
    for name, module in model.named_children():
        hook = collector.create_hook(name)
        if name == "all":
            module.register_forward_hook(hook)
        else:
            module.register_forward_pre_hook(hook)
    for sample in range(rank, SAMPLES, world_size):
        current[0] = sample
        x = torch.full((1, sample + 2, 6), float(sample), dtype=torch.float32)
        model.all(x)
        model.get_submodule(f"own_{rank}")(x)
        if sample % 2 == 0:
            model.some(x)
    collector.sync_act_stats(DistHelper(model))
    return {name: stats[StatKey.TENSOR] for name, stats in collector.act_stats.items()}


def test_merged_activations_are_those_of_one_rank_in_sample_order(run_ranks: RankRunner) -> None:
    alone = collected(0, True, False)
    assert [tuple(x.shape) for x in alone["all"]] == [(sample + 2, 6) for sample in range(SAMPLES)]
    for rank, found in enumerate(run_ranks(2, collected, True, True)):
        for name in ("all", "some"):
            assert len(found[name]) == len(alone[name])
            assert all(torch.equal(a, b) for a, b in zip(found[name], alone[name], strict=True)), name
        assert [float(x[0, 0]) for x in found[f"own_{rank}"]] == list(range(rank, SAMPLES, 2))  # local_only: as it was


def test_without_sample_numbers_activations_merge_rank_after_rank(run_ranks: RankRunner) -> None:
    for found in run_ranks(2, collected, False, True):
        assert [float(x[0, 0]) for x in found["all"]] == [0, 2, 4, 1, 3]
        assert [float(x[0, 0]) for x in found["some"]] == [0, 2, 4]


def test_a_collector_that_nothing_reached_takes_part() -> None:
    collector = FlexStatsCollector()
    collector.create_hook("never")
    collector.sync_act_stats()
    assert collector.act_stats == {"never": {StatKey.TENSOR: []}}


def test_a_hook_under_a_name_that_is_no_module_is_refused_rather_than_left_unmerged() -> None:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(2, 2)})})
    collector = FlexStatsCollector()
    model["mlp"]["up"].register_forward_hook(collector.create_hook("mlp.up"))  # type: ignore[index]
    with pytest.raises(
        ValueError, match=r"'mlp\.up' is no module of the DistHelper; give create_hook the module's full"
    ):
        collector.sync_act_stats(DistHelper(model, prefix="model.layers.0"))
