"""Inputs at the edge: constant, never seen, hardly spread; on one layer made for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from msmodelslim.analysis.inputs import InputAnalysis
from msmodelslim.model.structure import LayerStructure
from msmodelslim.processor.base import BatchProcessRequest, RunContext, RunRecord


class Layer(nn.Module):
    """q and k read the input, far reads a constant, expert is handed what the mask leaves, never is not called."""

    def __init__(self, mask: bool) -> None:
        super().__init__()
        for name in ("q", "k", "far", "expert", "never"):
            self.add_module(name, nn.Linear(4, 4))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        self.q(x), self.k(x), self.far(torch.full_like(x, 1.1))
        self.expert(x[:, :0] if self.mask else x)
        return x


def analysed(metric: str, samples: list[Tensor], mask: bool = False, groups: bool = True) -> InputAnalysis:
    structure = LayerStructure(norm_linears=(("norm", ("q", "k")),) if groups else ())
    adapter: Any = SimpleNamespace(structure=lambda layer: structure)
    layer = Layer(mask)
    context = RunContext(adapter, layer, torch.device("cpu"), RunRecord())
    analysis = InputAnalysis(InputAnalysis.Config(metric=metric, patterns=("*",)), context)
    ids = range(len(samples))
    request = BatchProcessRequest("0", layer, [((x,), {}) for x in samples], sample_ids=ids, sample_count=len(samples))
    for hook in (analysis.preprocess, analysis.process, analysis.postprocess):
        hook(request)
    analysis.post_run()
    return analysis


@pytest.fixture
def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 3, 4, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("metric", ["std", "quantile", "kurtosis"])
def test_a_constant_input_scores_0_and_one_never_seen_has_no_score(metric: str, samples: list[Tensor]) -> None:
    found = analysed(metric, samples, mask=True)
    assert found.scores["0.far"] == 0
    assert set(found.scores) == {"0.q", "0.k", "0.far"}
    assert found.unreached == ["0.expert", "0.never"]


@pytest.mark.parametrize("metric", ["std", "quantile", "kurtosis"])
def test_linears_that_read_one_tensor_score_alike_measured_together_or_apart(
    metric: str, samples: list[Tensor]
) -> None:
    together, apart = analysed(metric, samples).scores, analysed(metric, samples, groups=False).scores
    assert together == apart
    assert together["0.q"] == together["0.k"] == together["0.expert"] != 0


def test_quartiles_that_coincide_give_a_finite_score_above_all_usual_ones() -> None:
    x = torch.zeros(1, 10, 4)
    x[0, 0, 0] = 3.0
    assert analysed("quantile", [x]).scores["0.q"] == pytest.approx(2 / 254 * 2**24)
