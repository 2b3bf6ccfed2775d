"""No weight method loses more than plain rounding by its own objective, on any linear, after any smoothing step.

The cases come from the registry, so a new method or smoothing step joins by existing. The layers hold what real ones
hold now and then: zero rows, dead channels, a row of tiny weights, a constant row, one outlier.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.quantize import quantize_weight
from msmodelslim.ir.scheme import QScheme
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.processor.linear_quant import LinearQuantProcessor
from msmodelslim.processor.smooth import SmoothProcessor
from msmodelslim.registry import lookup, names
from tests import fixtures
from tests.artifact.damage import change_tensor
from tests.ir.oracle import dequantized
from tests.processor.driver import context_for, run, step
from tests.processor.smooth_driver import PRESETS

Array = NDArray[np.float64]


def squares(error_OI: Array, _: Array, __: QScheme) -> Array:
    return (error_OI**2).sum(1)


def on_inputs(error_OI: Array, gram_II: Array, _: QScheme) -> Array:
    return ((error_OI @ gram_II) * error_OI).sum(1)


def on_inputs_of_each_group(error_OI: Array, gram_II: Array, scheme: QScheme) -> Array:
    width = scheme.group_size or error_OI.shape[1]
    parts = [slice(at, at + width) for at in range(0, error_OI.shape[1], width)]
    return np.sum([on_inputs(error_OI[:, part], gram_II[part, part], scheme) for part in parts], axis=0)


#: what each method says it minimises, of each row
OBJECTIVES: dict[str, Callable[[Array, Array, QScheme], Array]] = {
    "minmax": squares,
    "ssz": squares,
    "mx_search": squares,
    "mse_round": squares,
    "fouroversix": squares,
    "ceil_x": squares,
    "dualscale": squares,
    "gptq": on_inputs,
    "awq_clip": on_inputs_of_each_group,
}
CONFIGS = [
    example["qconfig"]
    for example in LinearQuantProcessor.examples()
    if "method" in example["qconfig"]["weight"] and not example.get("propagate_error")
]
SMOOTHING = [name for name in names("processor") if issubclass(lookup("processor", name), SmoothProcessor)]


class Witness(BaseSessionProcessor):
    """Keeps the weights and the Gram matrices of the inputs that the next step will see."""

    registered_name = "witness"

    def __init__(self, context: RunContext) -> None:
        super().__init__(None, context)
        self.weights: dict[str, torch.Tensor] = {}
        self.grams: dict[str, Array] = {}
        self._handles: list[Any] = []

    def preprocess(self, request: BatchProcessRequest) -> None:
        for name, module in request.module.named_modules(prefix=request.name):
            if isinstance(module, nn.Linear):
                self.weights[name] = module.weight.detach().clone()
                self._handles.append(module.register_forward_pre_hook(lambda _, args, name=name: self._add(name, args)))

    def postprocess(self, request: BatchProcessRequest) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _add(self, name: str, args: tuple[torch.Tensor, ...]) -> None:
        x_TI = args[0].flatten(0, -2).double().numpy()
        self.grams[name] = self.grams.get(name, 0.0) + x_TI.T @ x_TI


def bad_rows(weight_OI: torch.Tensor) -> torch.Tensor:
    weight_OI = weight_OI.clone()
    weight_OI[1], weight_OI[2], weight_OI[:, 7] = 0, 0.375, 0
    weight_OI[3] *= 1e-30
    weight_OI[4, 5] = 100
    return weight_OI


def dead_channels(weight_C: torch.Tensor) -> torch.Tensor:
    return weight_C.index_fill(0, torch.tensor([0, 33]), 0.0)


@pytest.fixture(scope="module")
def bad_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = fixtures.t_dense(tmp_path_factory.mktemp("bad"), shards=1, num_hidden_layers=2)
    for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        change_tensor(path, f"model.layers.0.{name}.weight", bad_rows)
    for name in ("input_layernorm", "post_attention_layernorm"):
        change_tensor(path, f"model.layers.1.{name}.weight", dead_channels)
    return path


def test_every_method_and_every_smoothing_step_is_here() -> None:
    assert OBJECTIVES.keys() == set(names("weight"))
    assert {config["weight"]["method"] for config in CONFIGS} == OBJECTIVES.keys() - {"minmax"}
    assert PRESETS.keys() == set(SMOOTHING)


@pytest.mark.parametrize("preset", [None, *SMOOTHING])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "{method}-{dtype}".format_map(config["weight"]))
def test_no_linear_loses_more_than_by_plain_rounding(
    config: dict[str, Any], preset: str | None, bad_layers: Path
) -> None:
    context = context_for(bad_layers)
    before = [] if preset is None else [step(context, preset, **PRESETS[preset])]
    witness = Witness(context)
    kept = run(context, *before, witness, step(context, "linear_quant", qconfig=config))
    linears = {name: module for name, module in kept.modules.items() if isinstance(module, QuantLinear)}
    assert linears.keys() == witness.weights.keys() and len(linears) == 14
    objective = OBJECTIVES[config["weight"]["method"]]
    for name, linear in linears.items():
        scheme, gram_II = linear.scheme.weight, witness.grams[name]
        exact_OI = witness.weights[name].double().numpy()
        plain = quantize_weight(witness.weights[name], scheme, scale_dtype=context.adapter.dtype)
        errors = [exact_OI - dequantized(codes, scheme) for codes in (linear.weight_codes, plain)]
        assert np.isfinite(errors[0]).all(), name
        found_O, plain_O = (objective(error_OI, gram_II, scheme) for error_OI in errors)
        # What float32 sums can hide.
        slack_O = 1e-5 * np.diag(gram_II).mean() * (errors[1] ** 2).sum(1) if objective is not squares else 0.0
        assert (found_O <= plain_O * (1 + 1e-4) + slack_O).all(), name
        record = context.record.modules[name]
        assert record["objective"] <= record["objective_minmax"], name
