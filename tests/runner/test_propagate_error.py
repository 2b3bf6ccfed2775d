"""`propagate_error`: what later layers are calibrated on, how often a layer is forwarded, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.model.base import ProcessRequest
from msmodelslim.model.structure import LayerStructure
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext, RunRecord
from msmodelslim.registry import lookup
from msmodelslim.runner.layer_wise_runner import LayerWiseRunner
from msmodelslim.weight.gptq import Gptq
from tests.processor.driver import CPU, context_for, run, step, token_samples

INT4 = {"dtype": "int4", "scope": "per_channel"}
GPTQ_GROUPS = {"weight": {"dtype": "int4", "scope": "per_group", "method": "gptq", "ext": {"group_size": 32}}}
DYNAMIC = {"act": {"dtype": "int8", "scope": "per_token", "method": "minmax"}, "weight": INT4 | {"dtype": "int8"}}


class Layer(nn.Module):
    """One linear, float64."""

    def __init__(self, weight: list[list[float]]) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        self.proj.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class TwoLayers:
    """The adapter of two such layers, one after the other."""

    layer_names = ("0", "1")
    dtype = torch.float32

    def enable_kv_cache(self, model: nn.Module, need: bool) -> None:
        pass

    def structure(self, layer: nn.Module) -> LayerStructure:
        return LayerStructure()

    def generate_model_visit(self, model: nn.Module, device: torch.device) -> Any:
        for name in self.layer_names:
            yield ProcessRequest(name, model.get_submodule(name))

    def generate_model_forward(self, model: nn.Module, inputs: dict[str, Any], device: torch.device) -> Any:
        x = inputs["x"]
        for name in self.layer_names:
            x = yield ProcessRequest(name, model.get_submodule(name), (x,))


FIRST = [[0.7, -0.34], [0.26, 1.4]]
#: int4, symmetric: scales 0.1 and 0.2, codes 7, -3 (of -3.4) and 1 (of 1.3), 7
FIRST_ROUNDED = [[0.7, -0.3], [0.2, 1.4]]
SECOND = [[0.5, 0.7], [-0.7, 0.1]]
SAMPLES = [[[1.0, 2.0]], [[0.0, 1.0], [-1.0, 1.0]]]


class Last(BaseSessionProcessor):
    """Stands where a saver stands."""

    registered_name = "last"
    kind = "saver"

    def __init__(self, context: RunContext) -> None:
        super().__init__(None, context)
        self.outputs: dict[str, list[Tensor]] = {}
        self.linears: dict[str, QuantLinear] = {}

    def is_data_free(self) -> bool:
        return True

    def postprocess(self, request: BatchProcessRequest) -> None:
        self.outputs[request.name] = list(request.outputs or [])
        self.linears |= {
            n: m for n, m in request.module.named_modules(prefix=request.name) if isinstance(m, QuantLinear)
        }
        request.module = nn.Module()


def gram_of_layer_1(monkeypatch: pytest.MonkeyPatch, *steps: dict[str, Any]) -> tuple[Tensor, Last, RunContext]:
    """The Gram matrix that gptq is given for the second layer."""
    seen: dict[str, Tensor] = {}
    quantize = Gptq.quantize

    def noting(self: Gptq, *args: Any, **kwargs: Any) -> Any:
        seen[kwargs["name"]] = kwargs["gram"].sum_II.clone()
        return quantize(self, *args, **kwargs)

    monkeypatch.setattr(Gptq, "quantize", noting)
    context = RunContext(TwoLayers(), nn.Sequential(Layer(FIRST), Layer(SECOND)), CPU, RunRecord())  # type: ignore[arg-type]
    cls = lookup("processor", "linear_quant")
    made = [cls(cls.Config.model_validate(options), context) for options in steps]
    last = Last(context)
    samples = [{"x": torch.tensor(x, dtype=torch.float64)} for x in SAMPLES]
    LayerWiseRunner(context, [*made, last], samples, range(2)).run()
    return seen["1.proj"], last, context


def two_steps(propagate: bool) -> list[dict[str, Any]]:
    """Plain rounding of the first layer, gptq in the second."""
    return [
        {"include": ["0.proj"], "qconfig": {"weight": INT4}},
        {"include": ["1.proj"], "qconfig": {"weight": INT4 | {"method": "gptq"}}, "propagate_error": propagate},
    ]


@pytest.mark.parametrize(("propagate", "weight"), [(False, FIRST), (True, FIRST_ROUNDED)])
def test_the_second_layer_sees_the_outputs_of_the_rounded_first_one_or_of_the_float_one(
    monkeypatch: pytest.MonkeyPatch, propagate: bool, weight: list[list[float]]
) -> None:
    gram, _, context = gram_of_layer_1(monkeypatch, *two_steps(propagate))
    outputs = np.concatenate([np.array(x) @ np.array(weight).T for x in SAMPLES])
    assert np.allclose(gram.numpy(), outputs.T @ outputs, rtol=1e-6, atol=0)  # scales are stored in float32
    assert [entry["forwards"] for entry in context.record.layers] == ([2, 1] if propagate else [1, 1])


def test_the_hand_worked_gram_of_the_second_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    # [1, 2] → [0.1, 3.0]; [0, 1] → [-0.3, 1.4]; [-1, 1] → [-1.0, 1.2]
    gram, _, _ = gram_of_layer_1(monkeypatch, *two_steps(True))
    expected = [[0.01 + 0.09 + 1.0, 0.3 - 0.42 - 1.2], [0.3 - 0.42 - 1.2, 9.0 + 1.96 + 1.44]]
    assert gram.tolist() == [pytest.approx(row, rel=1e-6) for row in expected]


def test_gptq_of_a_layer_sees_what_gptq_made_of_the_layer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"qconfig": {"weight": INT4 | {"method": "gptq"}}, "propagate_error": True}
    gram, last, _ = gram_of_layer_1(monkeypatch, whole)
    linear = last.linears["0.proj"]
    rounded = (linear.codes.numpy() * linear.weight_scale.numpy()).astype(np.float64)  # multiplied in float32
    outputs = [np.array(x) @ rounded.T for x in SAMPLES]
    assert np.allclose(gram.numpy(), sum(y.T @ y for y in outputs), rtol=1e-12, atol=0)
    for found, expected in zip(last.outputs["0"], outputs, strict=True):
        assert np.allclose(found.numpy(), expected, rtol=1e-12, atol=1e-15)


def test_the_step_of_a_group_that_asks_for_it_is_heard(t_dense: Path) -> None:
    class Child:
        def __init__(self, **config: Any) -> None:
            self.type = "linear_quant"
            self.config = lookup("processor", "linear_quant").Config.model_validate(config)

    context = context_for(t_dense)
    attention = Child(include=["*self_attn*"], qconfig=GPTQ_GROUPS, propagate_error=True)
    mlp = Child(include=["*mlp*"], qconfig=GPTQ_GROUPS)
    run(context, step(context, "group", configs=(attention, mlp)))
    assert [entry["forwards"] for entry in context.record.layers] == [2, 1]


def test_what_rounding_does_to_a_layer_is_measured_on_the_inputs_it_was_calibrated_on(t_dense: Path) -> None:
    found = {}
    for propagate in (False, True):
        context = context_for(t_dense)
        run(context, step(context, "linear_quant", qconfig=GPTQ_GROUPS, propagate_error=propagate))
        found[propagate] = [entry["output_error"] for entry in context.record.layers]
    assert found[True][0] == found[False][0] > 0, "the first layer has the same inputs either way"
    assert found[True][1] != found[False][1]


def test_a_data_free_step_can_hand_its_error_on_to_steps_that_calibrate(t_dense: Path) -> None:
    context = context_for(t_dense)
    rounding = step(context, "linear_quant", qconfig=DYNAMIC, propagate_error=True)
    run(context, step(context, "smooth_quant"), rounding, samples=token_samples(2))
    assert [entry["forwards"] for entry in context.record.layers] == [2, 1]


def test_propagation_without_anything_to_calibrate_is_refused_before_the_run(t_dense: Path) -> None:
    context = context_for(t_dense)
    runner = LayerWiseRunner(context, [step(context, "linear_quant", qconfig=DYNAMIC, propagate_error=True)])
    with pytest.raises(
        UnsupportedError,
        match="propagate_error of linear_quant has no effect: no step of this recipe uses calibration data",
    ):
        runner.rehearse()
