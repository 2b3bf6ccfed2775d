"""Steps behind a smoothing step use its forward: what they saw is rescaled to what they would have seen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.processor.base import BaseSessionProcessor
from msmodelslim.processor.smooth import SmoothProcessor
from msmodelslim.registry import lookup
from msmodelslim.runner.base import share_forwards
from msmodelslim.weight.gptq import Gptq
from tests import fixtures
from tests.processor.driver import Keep, context_for, run, step

INT8 = {"dtype": "int8", "scope": "per_channel"}
STATIC = {"dtype": "int8", "scope": "per_tensor", "symmetric": False, "method": "minmax"}
DYNAMIC = {"dtype": "int8", "scope": "per_token", "method": "minmax"}
HISTOGRAM = STATIC | {"method": "histogram"}
MEAN = STATIC | {"ext": {"aggregation_type": "mean"}}
SMOOTH = ("smooth_quant", {"alpha": 0.7})
UP_DOWN = ("flex_smooth_quant", {"enable_subgraph_type": ["up-down"]})
REST = ("flex_smooth_quant", {"enable_subgraph_type": ["norm-linear", "ov"]})
AWQ = ("awq", lookup("processor", "awq").examples()[0])
SHIFT = ("iter_smooth", {"symmetric": False})


def rounding(act: dict[str, Any], method: str = "minmax", **options: Any) -> tuple[str, dict[str, Any]]:
    return "linear_quant", {"qconfig": {"act": act, "weight": INT8 | {"method": method}}, **options}


@pytest.fixture
def float32_model(tmp_path: Path) -> Path:
    return fixtures.t_dense(tmp_path, dtype=torch.float32, num_hidden_layers=2)


def quantize(model: Path, *steps: tuple[str, dict[str, Any]]) -> tuple[Keep, list[int]]:
    context = context_for(model)
    keep = run(context, *(step(context, name, **options) for name, options in steps))
    return keep, [entry["forwards"] for entry in context.record.layers]


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on each smoothing step has a forward of its own, so later steps really see smoothed inputs."""
    monkeypatch.setattr(SmoothProcessor, "rescales_inputs", lambda self: False)


def linears(keep: Keep) -> dict[str, QuantLinear]:
    return {name: module for name, module in keep.modules.items() if isinstance(module, QuantLinear)}


def zero_point(linear: QuantLinear) -> Tensor:
    assert linear.act_offset is not None
    return linear.act_offset.double()


@pytest.mark.parametrize("smoothing", [(SMOOTH,), (UP_DOWN, REST), (AWQ,)])
def test_static_ranges_are_those_of_the_smoothed_inputs(
    smoothing: tuple[tuple[str, dict[str, Any]], ...], float32_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, forwards = quantize(float32_model, *smoothing, rounding(STATIC))
    assert forwards == [1, 1]
    apart(monkeypatch)
    separate, forwards = quantize(float32_model, *smoothing, rounding(STATIC))
    assert forwards == [len(smoothing) + 1] * 2
    expected = linears(separate)
    assert len(expected) == 14
    for name, linear in linears(together).items():
        torch.testing.assert_close(linear.act_scale, expected[name].act_scale, rtol=2e-5, atol=0)
        assert (zero_point(linear) - zero_point(expected[name])).abs() <= 1
        torch.testing.assert_close(linear.weight_scale, expected[name].weight_scale, rtol=2e-5, atol=0)


@pytest.mark.parametrize("method", ["gptq", "ssz"])
def test_gram_sums_are_those_of_the_smoothed_inputs(
    method: str, float32_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = lookup("weight", method)
    seen: list[dict[str, Tensor]] = [{}, {}]
    whole = weights.quantize

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen[-1][kwargs["name"]] = kwargs["gram"].sum_II.clone()
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(weights, "quantize", noting)
    ext = {"importance": True} if method == "ssz" else {}
    steps = (SMOOTH, ("linear_quant", {"qconfig": {"weight": INT8 | {"method": method, "ext": ext}}}))
    assert quantize(float32_model, *steps)[1] == [1, 1]
    together = seen.pop()
    apart(monkeypatch)
    assert quantize(float32_model, *steps)[1] == [2, 2]
    assert len(together) == 14
    for name, sums in together.items():
        expected = seen[-1][name]
        assert sums.dim() == (2 if issubclass(weights, Gptq) else 1)
        largest = expected.diagonal() if sums.dim() == 2 else expected
        torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5 * float(largest.max()))


def test_the_next_layer_is_given_what_the_float_layer_puts_out(float32_model: Path) -> None:
    keep, _ = quantize(float32_model, SMOOTH, rounding(STATIC))
    plain, _ = quantize(float32_model, rounding(STATIC))
    for found, expected in zip(keep.outputs["model.layers.0"], plain.outputs["model.layers.0"], strict=True):
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("act", [HISTOGRAM, MEAN])
def test_what_cannot_follow_has_a_forward_of_its_own(act: dict[str, Any], t_dense: Path) -> None:
    assert quantize(t_dense, SMOOTH, rounding(act))[1] == [2, 2]


def made(t_dense: Path, *steps: tuple[str, dict[str, Any]]) -> list[BaseSessionProcessor]:
    context = context_for(t_dense)
    return [step(context, name, **options) for name, options in steps]


def test_which_steps_share_a_forward_behind_smoothing(t_dense: Path) -> None:
    attention, mlp = rounding(STATIC, include=["*self_attn*"]), rounding(DYNAMIC, include=["*mlp*"])
    steps = made(t_dense, UP_DOWN, REST, attention, mlp)
    assert share_forwards(steps) == [steps]
    for before in (attention, mlp):  # smoothing behind a step that rounds sees what rounding did
        steps = made(t_dense, before, SMOOTH)
        assert share_forwards(steps) == [[steps[0]], [steps[1]]]
    steps = made(t_dense, SHIFT, attention, mlp)  # for a shift nothing makes up
    assert share_forwards(steps) == [[steps[0]], steps[1:]]
    steps = made(t_dense, SMOOTH, SHIFT, attention)
    assert share_forwards(steps) == [[steps[0]], [steps[1]], [steps[2]]]


def test_smoothing_behind_a_group_that_rounds_has_a_forward_of_its_own(t_dense: Path) -> None:
    context = context_for(t_dense)
    group = step(context, "group", configs=(Child(*UP_DOWN), Child(*rounding(STATIC, include=["*mlp*"]))))
    after = step(context, REST[0], **REST[1])
    assert share_forwards([group, after]) == [[group], [after]]
    both = step(context, "group", configs=(Child(*UP_DOWN), Child(*REST)))
    rounds = step(context, "linear_quant", **rounding(STATIC)[1])
    assert share_forwards([both, rounds]) == [[both, rounds]]


class Child:
    """A step inside a group, as a recipe's model holds it."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.type = name
        self.config = lookup("processor", name).Config.model_validate(options)


@pytest.mark.parametrize(
    ("smoothing", "observing"), [(SMOOTH, rounding(HISTOGRAM)), (SMOOTH, rounding(MEAN)), (SHIFT, rounding(STATIC))]
)
def test_a_group_refuses_what_cannot_follow_its_smoothing_step(
    smoothing: tuple[str, dict[str, Any]], observing: tuple[str, dict[str, Any]], t_dense: Path
) -> None:
    message = f"group: {smoothing[0]} changes what linear_quant observes in the same forward, and it cannot make up"
    with pytest.raises(UnsupportedError, match=message):
        step(context_for(t_dense), "group", configs=(Child(*smoothing), Child(*observing)))
    step(context_for(t_dense), "group", configs=(Child(*observing), Child(*smoothing)))


def test_a_group_with_smoothing_rounds_as_the_steps_one_after_the_other(t_dense: Path) -> None:
    context = context_for(t_dense)
    grouped = run(context, step(context, "group", configs=(Child(*SMOOTH), Child(*rounding(STATIC)))))
    single, _ = quantize(t_dense, SMOOTH, rounding(STATIC))
    expected = linears(single)
    for name, linear in linears(grouped).items():
        assert torch.equal(linear.codes, expected[name].codes)
        assert torch.equal(linear.act_scale, expected[name].act_scale)
