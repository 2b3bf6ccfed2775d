"""Linears are dealt to ranks by input, each Gram matrix is needed and factored on one rank, and all get the codes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from msmodelslim.distributed import deal
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import QDType, QScheme, QScope
from msmodelslim.processor.rounding import deal_linears, round_weights
from msmodelslim.runner.layer_wise_runner import LayerWiseRunner
from msmodelslim.weight import gptq
from msmodelslim.weight.gptq import Gptq
from msmodelslim.weight.minmax import MinMax
from msmodelslim.weight.ssz import Ssz
from tests.processor.driver import Keep, context_for, step, token_samples
from tests.run_ranks import RankRunner

SHAPES = {
    "q": torch.Size((8, 8)),
    "k": torch.Size((4, 8)),
    "v": torch.Size((4, 8)),
    "o": torch.Size((8, 8)),
    "gate": torch.Size((16, 8)),
    "up": torch.Size((16, 8)),
    "down": torch.Size((8, 16)),
}
UNITS = [["q", "k", "v"], ["o"], ["gate", "up"], ["down"]]
INPUTS = 4  # of a dense layer


def test_linears_with_the_same_input_go_to_one_rank_and_cost_what_they_cost_together() -> None:
    method = Ssz(Ssz.Ext())  # costs 400 a weight: qkv 128, o 64, gate and up 256, down 128
    owners = deal_linears(method, SHAPES, UNITS, 2)
    # 256 to rank 0; down 128 to rank 1; qkv (by its first name, k) 128 to rank 1; o 64 to rank 0
    assert owners == {"down": 1, "gate": 0, "k": 1, "o": 0, "q": 1, "up": 0, "v": 1}
    assert set(deal_linears(method, SHAPES, UNITS, 7).values()) == {0, 1, 2, 3}
    assert deal_linears(method, SHAPES, [], 7).keys() == SHAPES.keys()
    assert set(deal_linears(method, SHAPES, [], 7).values()) == set(range(7))
    assert deal_linears(MinMax(MinMax.Ext()), SHAPES, UNITS, 2) == {}


def test_a_gram_that_is_missing_where_it_is_needed_is_no_linear_without_tokens() -> None:
    weights, scheme = {"q": torch.randn(4, 8)}, QScheme(QDType.INT4, QScope.PER_CHANNEL)
    with pytest.raises(KeyError, match="q"):
        round_weights(Gptq(Gptq.Ext()), weights, scheme, {}, torch.float32, {}, torch.device("cpu"))


def quantize(rank: int, path: Path) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]]:
    """Gram matrices that this rank factored, the codes of all linears, and what the report says of them."""
    world_size = dist.get_world_size()
    factored = 0
    original = gptq._factor

    def counted(*args: Any) -> Any:
        nonlocal factored
        factored += 1
        return original(*args)

    gptq._factor = counted
    context = context_for(path)
    weight = {"dtype": "int4", "scope": "per_channel", "method": "gptq"}
    samples, own = token_samples(3), deal(3, world_size)[rank]
    keep = Keep(context)
    steps = [step(context, "linear_quant", qconfig={"weight": weight}), keep]
    LayerWiseRunner(context, steps, [samples[i] for i in own], own, len(samples)).run()
    codes = {name: one.codes for name, one in keep.modules.items() if isinstance(one, QuantLinear)}
    return factored, codes, context.record.modules


def test_each_input_of_a_layer_is_factored_once_over_all_ranks_and_all_have_the_codes_of_one(
    run_ranks: RankRunner, t_dense: Path
) -> None:
    ((alone, codes, records),) = run_ranks(1, quantize, t_dense)
    layers = {name.split(".self_attn")[0] for name in codes if ".self_attn" in name}
    assert alone == INPUTS * len(layers) and len(codes) == 7 * len(layers)
    for world_size in (2, 4, 6):
        answers = run_ranks(world_size, quantize, t_dense)
        assert sum(factored for factored, _, _ in answers) == alone
        assert sum(factored > 0 for factored, _, _ in answers) == min(world_size, INPUTS)
        for _, found, told in answers:
            assert told == records
            assert found.keys() == codes.keys() and all(torch.equal(found[name], codes[name]) for name in codes)
