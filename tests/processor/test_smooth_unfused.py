"""Linears without a producer that could be scaled: their input is multiplied at run time, and no format takes that."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.input_scale import ScaledInputLinear
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.model.structure import LayerStructure
from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.registry import lookup
from tests.processor.driver import context_for, linear_inputs, run, step, token_samples
from tests.processor.smooth_driver import NAME, PRESETS, TinyLayer, inputs, relative_error, smooth, smoother

SMOOTHING = [name for name in PRESETS if name != "smooth_quant"]
INT8 = {"dtype": "int8", "scope": "per_channel"}
STATIC = {"dtype": "int8", "scope": "per_tensor", "method": "minmax"}


def unfused(layer: TinyLayer) -> LayerStructure:
    """gate and up are read from a norm that nothing may scale, and down stands alone."""
    return LayerStructure(
        unfused=(("gate", "up"), ("down",)), heads=layer.heads, kv_heads=layer.kv_heads, head_width=layer.head_width
    )


@torch.no_grad()
def outputs(layer: nn.Module) -> list[torch.Tensor]:
    return [layer(x) for x in inputs()]


@pytest.mark.parametrize("preset", SMOOTHING)
def test_the_layer_computes_what_it_did(preset: str) -> None:
    layer = TinyLayer().double().randomize()
    expected = outputs(layer)
    smooth(layer, inputs(), smoother(layer, unfused(layer), preset, **PRESETS[preset]))
    assert relative_error(outputs(layer), expected) < 1e-9
    gate, up, down = layer.get_submodule("gate"), layer.get_submodule("up"), layer.get_submodule("down")
    assert isinstance(gate, ScaledInputLinear) and isinstance(up, ScaledInputLinear)
    assert isinstance(down, ScaledInputLinear)
    assert torch.equal(gate.div.mul_scale, up.div.mul_scale)
    assert not torch.equal(down.div.mul_scale, torch.ones_like(down.div.mul_scale))


def test_the_factor_is_smoothquants_for_both_readers_of_one_input() -> None:
    layer = TinyLayer().double().randomize()
    before = copy.deepcopy(layer)
    seen: list[torch.Tensor] = []
    before.gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    for x in inputs():
        before(x)
    act_I = torch.cat(seen).abs().amax(0)
    weight_I = torch.maximum(before.gate.weight.abs().amax(0), before.up.weight.abs().amax(0))
    factor_I = act_I**0.9 / weight_I**0.1
    smooth(layer, inputs(), smoother(layer, unfused(layer), "iter_smooth", alpha=0.9))
    gate = layer.get_submodule("gate")
    assert isinstance(gate, ScaledInputLinear)
    torch.testing.assert_close(gate.div.mul_scale, 1 / factor_I, rtol=1e-12, atol=0)
    torch.testing.assert_close(gate.linear.get_parameter("weight"), before.gate.weight * factor_I, rtol=1e-12, atol=0)


def test_in_bfloat16_the_weights_take_the_factor_that_is_stored() -> None:
    layer = TinyLayer().randomize().bfloat16()
    down = layer.down.weight.float()
    smooth(layer, inputs(dtype=torch.bfloat16), smoother(layer, unfused(layer), "iter_smooth"))
    found = layer.get_submodule("down")
    assert isinstance(found, ScaledInputLinear) and found.div.mul_scale.dtype is torch.bfloat16
    product = found.linear.get_parameter("weight").double() * found.div.mul_scale.double()
    assert ((product - down.double()).abs() <= 2**-8 * down.double().abs()).all()  # one rounding, of the weight


def test_a_second_step_goes_on_with_the_first_ones_scales() -> None:
    layer = TinyLayer().double().randomize()
    expected = outputs(layer)
    for preset in ("iter_smooth", "flex_smooth_quant"):
        smooth(layer, inputs(), smoother(layer, unfused(layer), preset))
    assert relative_error(outputs(layer), expected) < 1e-9
    assert isinstance(layer.get_submodule("down").get_submodule("linear"), nn.Linear)


def test_smooth_quant_and_an_exclude_leave_them_alone() -> None:
    layer = TinyLayer().double().randomize()
    smooth(layer, inputs(), smoother(layer, unfused(layer), "smooth_quant"))
    smooth(layer, inputs(), smoother(layer, unfused(layer), "iter_smooth", exclude=["*gate", "*down"]))
    assert all(isinstance(layer.get_submodule(name), nn.Linear) for name in ("gate", "up", "down"))


def test_members_of_different_widths_are_refused_before_any_data() -> None:
    layer = TinyLayer()
    structure = replace(unfused(layer), unfused=(("gate", "down"),))
    processor = smoother(layer, structure, "iter_smooth")
    message = f"non-fusion {NAME}.gate -> .*: {NAME}.down.linear has 40 columns for 24 channels"
    with pytest.raises(UnsupportedError, match=message):
        processor.rehearse(BatchProcessRequest(NAME, copy.deepcopy(layer).to("meta")))


@pytest.fixture
def unfused_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's structure as if nothing could take down_proj's factors."""
    cls = lookup("model", "llama")
    whole = cls.structure

    def structure(self: Any, layer: nn.Module) -> LayerStructure:
        return replace(whole(self, layer), up_down=(), unfused=(("mlp.down_proj",),))

    monkeypatch.setattr(cls, "structure", structure)


@pytest.mark.usefixtures("unfused_down")
def test_steps_behind_round_the_linear_inside_with_the_range_of_its_scaled_input(t_dense: Path) -> None:
    context = context_for(t_dense)
    rounds = step(context, "linear_quant", include=["*down_proj*"], qconfig={"act": STATIC, "weight": INT8})
    keep = run(context, step(context, "iter_smooth"), rounds)
    assert [entry["forwards"] for entry in context.record.layers] == [1, 1]
    found = keep.modules["model.layers.0.mlp.down_proj"]
    assert isinstance(found, ScaledInputLinear) and isinstance(found.linear, QuantLinear)
    assert "model.layers.0.mlp.down_proj.div.mul_scale" in context.record.rewritten
    x_TI = torch.cat([x.flatten(0, 1) for x in linear_inputs(t_dense, token_samples())["model.layers.0.mlp.down_proj"]])
    largest = (x_TI.float() * found.div.mul_scale.float()).abs().amax()
    assert found.linear.act_scale is not None
    torch.testing.assert_close(found.linear.act_scale.flatten()[0], largest / 127, rtol=2e-3, atol=0)


@pytest.mark.usefixtures("unfused_down")
@pytest.mark.parametrize("saver", ["compressed_tensors", "ascendv1_saver"])
def test_savers_refuse_a_multiplication_by_name_before_any_weight_is_read(
    saver: str, t_dense: Path, tmp_path: Path
) -> None:
    context = context_for(t_dense)
    request = BatchProcessRequest("model.layers.0", context.model.get_submodule("model.layers.0"))
    step(context, "iter_smooth").rehearse(request)
    cls = lookup("saver", saver)
    config = cls.Config.model_validate({"target": "unchecked"} if saver == "ascendv1_saver" else {})
    message = (
        rf"model\.layers\.0\.mlp\.down_proj: it has a multiplication in front of it \(non-fusion smoothing\), and no "
        rf"engine that reads {saver} computes one; exclude model\.layers\.0\.mlp\.down_proj from smoothing"
    )
    with pytest.raises(UnsupportedError, match=message):
        cls(config, context, tmp_path / "out").rehearse(request)
