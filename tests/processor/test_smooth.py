"""Smoothing leaves what a layer computes as it was, or refuses: every kind of producer, every preset."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.model.structure import LayerStructure
from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.processor.smooth_subgraphs import norm_offset
from tests import fixtures
from tests.processor.driver import CPU, context_for, run, step, token_samples
from tests.processor.smooth_driver import (
    EVERY_KIND,
    NAME,
    PRESETS,
    W4A8,
    RMSNorm,
    TinyLayer,
    inputs,
    relative_error,
    smooth,
    smoother,
)

SOURCES = {f"{NAME}.{name}" for name in ("norm_1", "norm_2", "v", "up", "first")}


def options(preset: str) -> dict[str, Any]:
    return {**PRESETS[preset], "enable_subgraph_type": EVERY_KIND}


def outputs(layer: nn.Module, samples: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [layer(x) for x in samples]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa2", "mqa4"])
def test_every_preset_keeps_the_function_of_every_kind(preset: str, bias: bool, kv_heads: int) -> None:
    layer = TinyLayer(4, kv_heads, bias=bias).double().randomize()
    before, samples = copy.deepcopy(layer), inputs()
    processor = smoother(layer, layer.structure(), preset, **options(preset))
    smooth(layer, samples, processor)
    assert processor.chosen.keys() == SOURCES
    for source in ("norm_1", "norm_2", "v", "up", "first"):
        old, new = (x.get_submodule(source).get_parameter("weight") for x in (before, layer))
        assert not torch.equal(old, new), source
    assert relative_error(outputs(layer, samples), outputs(before, samples)) < 1e-9
    unseen = inputs(2, tokens=31)
    assert relative_error(outputs(layer, unseen), outputs(before, unseen)) < 1e-9


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("norm", ["one_plus", "layer"])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_other_norms_and_one_linear_for_q_k_v_keep_the_function(preset: str, norm: str, fused: bool) -> None:
    layer = TinyLayer(4, 2, norm=norm, bias=norm == "layer", fused=fused).double().randomize()
    before, samples = copy.deepcopy(layer), inputs()
    processor = smoother(layer, layer.structure(), preset, **options(preset))
    smooth(layer, samples, processor)
    assert processor.chosen.keys() == {name.replace(".v", ".qkv") if fused else name for name in SOURCES}
    assert relative_error(outputs(layer, samples), outputs(before, samples)) < 1e-9


@pytest.mark.parametrize("preset", ["smooth_quant", "iter_smooth"])
def test_centred_channels_keep_the_function_where_biases_exist(preset: str) -> None:
    layer = TinyLayer(4, 2, norm="layer", bias=True).double().randomize()
    with torch.no_grad():
        layer.norm_1.bias.add_(torch.linspace(-20, 20, 24, dtype=torch.float64))
    before, samples = copy.deepcopy(layer), inputs()
    seen: list[Tensor] = []
    smooth(layer, samples, smoother(layer, layer.structure(), preset, symmetric=False))
    assert relative_error(outputs(layer, samples), outputs(before, samples)) < 1e-9
    layer.q.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    outputs(layer, samples)
    low, high = torch.cat(seen).aminmax(dim=0)
    assert torch.allclose(low, -high, rtol=1e-9)  # every channel lies evenly around 0 now


def test_the_range_of_a_smoothed_input_is_the_old_range_over_the_factor() -> None:
    layer = TinyLayer().double().randomize()
    before, samples = copy.deepcopy(layer), inputs()
    ranges: list[list[Tensor]] = [[], []]
    smooth(layer, samples, smoother(layer, layer.structure(), "iter_smooth"))
    for found, one in zip(ranges, (before, layer), strict=True):
        one.down.register_forward_pre_hook(lambda _, args, found=found: found.append(args[0].abs().amax((0, 1))))
        outputs(one, samples)
    factor = layer.down.weight[0] / before.down.weight[0]
    old, new = (torch.stack(found).amax(0) for found in ranges)
    assert torch.allclose(new, old / factor, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "writer", "config"),
    [
        ("llama", fixtures.t_dense, {}),
        ("llama", fixtures.t_dense, {"num_key_value_heads": 1}),
        ("llama", fixtures.t_bias, {"num_key_value_heads": 4}),
        ("qwen2", fixtures.t_bias, {}),
        ("qwen3", fixtures.t_dense, {}),  # 4 heads of 32 in a hidden size of 64
    ],
)
def test_layers_of_transformers_keep_their_function(tmp_path: Path, family: str, writer: Any, config: Any) -> None:
    path = writer(tmp_path, family, dtype=torch.float32, **config)
    for preset in PRESETS:
        context = context_for(path)
        sample_calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        for sample in token_samples(3):
            call = next(context.adapter.generate_model_forward(context.model, sample, CPU))
            layer = call.module.double()
            x, (cos, sin) = call.args[0].double(), call.kwargs["position_embeddings"]
            sample_calls.append(
                ((x, *call.args[1:]), {**call.kwargs, "position_embeddings": (cos.double(), sin.double())})
            )
        before = [layer(*args, **kwargs) for args, kwargs in sample_calls]
        request = BatchProcessRequest("model.layers.0", layer, sample_calls, sample_ids=range(3), sample_count=3)
        processor = step(context, preset, **options(preset))
        processor.rehearse(BatchProcessRequest("model.layers.1", context.model.get_submodule("model.layers.1")))
        processor.preprocess(request)
        processor.process(request)
        processor.postprocess(request)
        after = [layer(*args, **kwargs) for args, kwargs in sample_calls]
        assert len(processor.chosen) == 4, preset  # two norms, v and up
        assert relative_error(after, before) < 1e-9, preset


def test_a_bfloat16_model_is_rounded_once_and_the_norm_not_at_all(tmp_path: Path) -> None:
    path = fixtures.t_dense(tmp_path)
    context, before = context_for(path), context_for(path)
    kept = run(context, step(context, "iter_smooth")).modules
    before.adapter.load_module("model.layers.0", before.model.get_submodule("model.layers.0"), CPU)
    old = dict(before.model.get_submodule("model.layers.0").named_modules(prefix="model.layers.0"))
    for norm, linear in (("input_layernorm", "self_attn.q_proj"), ("post_attention_layernorm", "mlp.gate_proj")):
        gain, new_gain = (x[f"{NAME}.{norm}"].weight.double() for x in (old, kept))
        weight, new_weight = (x[f"{NAME}.{linear}"].weight.double() for x in (old, kept))
        exact = weight * (gain / new_gain)
        assert new_weight.dtype is torch.float64
        assert ((new_weight - exact).abs() <= 2**-8 * exact.abs()).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_dead_channels_and_zero_columns_are_left_alone_and_harmless(preset: str) -> None:
    layer = TinyLayer(4, 2).double().randomize()
    with torch.no_grad():
        layer.norm_1.weight[5] = 0  # no activation ever in this channel
        layer.v.weight[3] = 0
        layer.up.weight[7] = 0
        for linear in (layer.q, layer.k, layer.v, layer.gate, layer.up):
            linear.weight[:, 9] = 0  # nobody reads this one
        layer.down.weight[:, 11] = 0
    before, samples = copy.deepcopy(layer), inputs()
    smooth(layer, samples, smoother(layer, layer.structure(), preset, **options(preset)))
    assert relative_error(outputs(layer, samples), outputs(before, samples)) < 1e-9
    assert torch.equal(layer.q.weight[:, 5], before.q.weight[:, 5])
    if preset != "smooth_quant":
        assert layer.norm_1.weight.isfinite().all()
    kept = layer.down.weight[:, 7] / before.down.weight[:, 7]
    assert torch.allclose(kept, torch.ones_like(kept))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", [2.0**-40, 2.0**12])
def test_tiny_and_huge_weights_keep_the_function(preset: str, size: float) -> None:
    layer = TinyLayer(4, 2).double().randomize()
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(size if module is not layer.q else 1)
    before, samples = copy.deepcopy(layer), inputs()
    smooth(layer, samples, smoother(layer, layer.structure(), preset, **options(preset)))
    assert relative_error(outputs(layer, samples), outputs(before, samples)) < 1e-9


def test_symmetric_smoothing_adds_no_parameter_and_writes_into_no_old_one(t_dense: Path) -> None:
    context = context_for(t_dense)
    names = {name for name, _ in context.model.named_parameters()}
    layer = context.model.get_submodule(NAME)
    context.adapter.load_module(NAME, layer, CPU)
    old = {name: (tensor, tensor.clone()) for name, tensor in layer.named_parameters()}
    run(context, step(context, "iter_smooth"))
    assert {name for name, _ in context.model.named_parameters()} <= names
    for name, (tensor, copied) in old.items():
        assert torch.equal(tensor, copied), name
        assert not name.endswith(".bias")


def test_only_selected_producers_are_touched_and_patterns_are_counted() -> None:
    layer = TinyLayer().double().randomize()
    before = copy.deepcopy(layer)
    processor = smoother(layer, layer.structure(), "iter_smooth", include=["*.norm_?", "*.none"], exclude=["*.norm_2"])
    smooth(layer, inputs(), processor)
    assert processor.chosen.keys() == {f"{NAME}.norm_1"}
    assert torch.equal(layer.down.weight, before.down.weight)
    counts = {(p["list"], p["pattern"]): p["matches"] for p in processor.context.record.patterns}
    assert counts == {("include", "*.norm_?"): 2, ("include", "*.none"): 0, ("exclude", "*.norm_2"): 1}


def test_a_norm_that_is_listed_twice_is_scaled_once_for_all_its_linears() -> None:
    layer = TinyLayer().double().randomize()
    before, samples = copy.deepcopy(layer), inputs()
    structure = LayerStructure(norm_linears=(("norm_1", ("q", "k")), ("norm_1", ("v",))))
    processor = smoother(layer, structure, "smooth_quant")
    smooth(layer, samples, processor)
    assert not torch.equal(layer.v.weight, before.v.weight)
    assert relative_error(outputs(layer, samples), outputs(before, samples)) < 1e-9


def test_a_norm_with_a_reader_that_is_not_listed_is_refused() -> None:
    layer = TinyLayer().double().randomize()
    structure = LayerStructure(norm_linears=(("norm_1", ("q", "k")),))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(UnsupportedError) as error:
        smooth(layer, inputs(), smoother(layer, structure, "smooth_quant"))
    assert str(error.value) == (
        "model.layers.0.norm_1: model.layers.0.v reads its output, too, and is not among the linears of the norm "
        "(model.layers.0.q, model.layers.0.k); scaling those alone would need a multiplication at run time, which "
        "engines lack; list every reader in the model's structure(), or exclude model.layers.0.norm_1 from smoothing"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def rehearsed(structure: LayerStructure, layer: nn.Module, preset: str = "iter_smooth", **config: Any) -> str:
    with pytest.raises(UnsupportedError) as error:
        smoother(layer, structure, preset, **config).rehearse(BatchProcessRequest(NAME, layer.to("meta")))
    return str(error.value)


def test_centring_without_biases_is_refused_before_a_weight_is_read() -> None:
    layer = TinyLayer(norm="layer", bias=True)
    layer.k.register_parameter("bias", None)
    structure = LayerStructure(norm_linears=(("norm_1", ("q", "k", "v")),))
    assert rehearsed(structure, layer, symmetric=False) == (
        "norm-linear model.layers.0.norm_1 -> model.layers.0.q, model.layers.0.k, model.layers.0.v: symmetric: false "
        "needs a bias everywhere, and model.layers.0.k has none (an engine would drop an invented one); write "
        "symmetric: true, or exclude model.layers.0.norm_1 from smoothing"
    )


def test_a_member_that_is_quantized_or_missing_is_refused(t_dense: Path) -> None:
    context = context_for(t_dense)
    layer = context.model.get_submodule(NAME)
    step(context, "linear_quant", qconfig=W4A8).rehearse(BatchProcessRequest(NAME, layer))
    with pytest.raises(UnsupportedError, match=r"down_proj: a QuantLinear has no float weight matrix to scale; put"):
        step(context, "iter_smooth").rehearse(BatchProcessRequest(NAME, layer))
    assert rehearsed(LayerStructure(up_down=(("up", "dawn"),)), TinyLayer()) == (
        "model.layers.0.dawn: the layer has no such module; exclude model.layers.0.up from smoothing"
    )
    assert rehearsed(LayerStructure(norm_linears=(("norm", ("up",)),)), TinyLayer()) == (
        "model.layers.0.norm: the layer has no such module; exclude model.layers.0.norm from smoothing"
    )


def test_widths_that_do_not_fit_are_refused() -> None:
    assert rehearsed(LayerStructure(up_down=(("up", "second"),)), TinyLayer()) == (
        "up-down model.layers.0.up -> model.layers.0.second: model.layers.0.second has 16 columns for 40 channels; "
        "exclude model.layers.0.up from smoothing"
    )
    structure = LayerStructure(ov=(("v", "o"),), heads=4, kv_heads=2, head_width=4)
    assert "16 value channels are not 2 key-value heads of 4" in rehearsed(structure, TinyLayer())
    structure = LayerStructure(ov=(("v", "o"),), heads=2, kv_heads=2, head_width=8)
    assert "model.layers.0.o has 32 columns for 16 channels" in rehearsed(structure, TinyLayer())
    structure = LayerStructure(ov=(("v", "o"),), heads=6, kv_heads=2, head_width=8)
    assert "has 32 columns for 16 channels times 3 heads that share them" in rehearsed(structure, TinyLayer())


@pytest.mark.parametrize("rows", [((0, 8), (4, 12)), ((8, 24),), ((0, 8), (0, 8))])
def test_value_rows_that_overlap_or_do_not_exist_are_refused(rows: tuple[tuple[int, int], ...]) -> None:
    structure = LayerStructure(ov=(("v", "o"),), heads=4, kv_heads=2, head_width=8, value_rows=rows)
    told = ", ".join(f"{start} to {stop}" for start, stop in rows)
    assert rehearsed(structure, TinyLayer()) == (
        f"ov model.layers.0.v -> model.layers.0.o: value rows {told} overlap, or model.layers.0.v has not so many; "
        "exclude model.layers.0.v from smoothing"
    )


def test_a_member_of_two_subgraphs_in_one_role_is_refused() -> None:
    structure = LayerStructure(linear_linear=(("v", "o"),), ov=(("v", "o"),), heads=4, kv_heads=2, head_width=8)
    assert rehearsed(structure, TinyLayer()) == (
        "model.layers.0.v is the source of two subgraphs: ov model.layers.0.v -> model.layers.0.o and linear-linear "
        "model.layers.0.v -> model.layers.0.o; list it once in the model's structure(), or leave one kind out of "
        "enable_subgraph_type"
    )
    structure = LayerStructure(norm_linears=(("norm_1", ("q", "k", "v")), ("norm_2", ("gate", "up", "q"))))
    assert rehearsed(structure, TinyLayer()).startswith(
        "model.layers.0.q is the consumer of two subgraphs: norm-linear"
    )


def test_a_norm_without_linears_is_refused() -> None:
    assert rehearsed(LayerStructure(norm_linears=(("norm_1", ()),)), TinyLayer()) == (
        "norm-linear model.layers.0.norm_1 -> no linear that reads it is listed; exclude model.layers.0.norm_1 from "
        "smoothing"
    )


def test_a_group_that_does_not_divide_the_columns_is_refused_by_a_search() -> None:
    weight = {"dtype": "int4", "scope": "per_group", "ext": {"group_size": 32}}
    layer = TinyLayer()
    message = rehearsed(layer.structure(), layer, "awq", weight_qconfig=weight)
    assert "model.layers.0.down: 40 input features do not divide into groups of 32" in message


class Doubled(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


class TwoInputs(RMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


@pytest.mark.parametrize("norm", [Doubled(24), TwoInputs(24), nn.LayerNorm(24, elementwise_affine=False)])
def test_a_norm_that_cannot_be_scaled_is_refused(norm: nn.Module) -> None:
    layer = TinyLayer()
    layer.norm_1 = norm
    assert rehearsed(layer.structure(), layer) == (
        f"model.layers.0.norm_1: {type(norm).__name__} computes neither weight·n(x) nor (1 + weight)·n(x), so its "
        "channels cannot be scaled; exclude model.layers.0.norm_1 from smoothing"
    )


@pytest.mark.parametrize(
    ("norm", "offset"),
    [
        (LlamaRMSNorm(48), 0),
        (Gemma3RMSNorm(48), 1),
        (nn.LayerNorm(48), 0),
        (nn.LayerNorm(48, bias=False), 0),
        (nn.RMSNorm(48), 0),
        (RMSNorm(48, 1), 1),
    ],
)
def test_the_gain_of_a_norm_is_found_by_what_it_computes(norm: nn.Module, offset: int) -> None:
    assert norm_offset(norm, "norm") == offset
    assert norm_offset(norm.to("meta"), "norm") == offset
    assert norm_offset(norm.to(torch.bfloat16), "norm") == offset


def test_a_gain_of_one_plus_a_tiny_weight_survives_bfloat16() -> None:
    layer = TinyLayer(norm="one_plus").randomize(outliers=False).to(torch.bfloat16)
    with torch.no_grad():
        layer.norm_1.weight.fill_(60.0)  # scaled down to a gain near 0, where bfloat16 weights near −1 are coarse
    before, samples = copy.deepcopy(layer), inputs(dtype=torch.bfloat16)
    smooth(layer, samples, smoother(layer, layer.structure(), "iter_smooth", alpha=1))
    x = torch.randn(7, 24, dtype=torch.bfloat16).float()
    with torch.no_grad():
        old, new = (one.float().q(one.float().norm_1(x)) for one in (before, layer))
    assert relative_error([new], [old]) < 2**-7


@pytest.mark.parametrize("preset", PRESETS)
def test_a_non_finite_activation_stops_the_run_and_names_module_and_sample(preset: str) -> None:
    layer = TinyLayer().double().randomize()
    samples = inputs()
    samples[3][0, 2, 4] = torch.nan
    with pytest.raises(InvalidModelError) as error:
        smooth(layer, samples, smoother(layer, layer.structure(), preset, **options(preset)))
    assert "its input is not finite in calibration sample 3; take that sample out" in str(error.value)


def test_a_non_finite_weight_stops_the_run() -> None:
    layer = TinyLayer().double().randomize()
    with torch.no_grad():
        layer.down.weight[2, 3] = torch.inf
    with pytest.raises(InvalidModelError, match=r"model\.layers\.0\.down: a weight is infinite or NaN; check"):
        smooth(layer, inputs(), smoother(layer, LayerStructure(up_down=(("up", "down"),)), "iter_smooth"))


def test_what_a_type_cannot_hold_is_left_as_it_was_and_recorded() -> None:
    layer = TinyLayer().randomize(outliers=False)
    with torch.no_grad():
        layer.up.weight[5] = 1e-3  # over a factor of 1e5 it would vanish
        layer.down.weight[:, 5] = 0
    layer = layer.to(torch.float16)
    before = copy.deepcopy(layer.state_dict())
    structure = LayerStructure(up_down=(("up", "down"),), linear_linear=(("first", "second"),))
    processor = smoother(layer, structure, "flex_smooth_quant", alpha=0, beta=1)
    smooth(layer, inputs(dtype=torch.float16), processor)
    assert torch.equal(layer.up.weight, before["up.weight"])
    assert torch.equal(layer.down.weight, before["down.weight"])
    assert processor.chosen.keys() == {f"{NAME}.first"}
    (fallback,) = processor.context.record.fallbacks
    assert fallback["module"] == f"{NAME}.up"
    assert fallback["what"] == "not scaled by flex_smooth_quant"
    assert fallback["why"].startswith("float16 cannot hold model.layers.0.up once its channels are scaled by 1e-05 to ")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_producer_that_no_sample_reaches_is_left_alone_and_recorded(preset: str) -> None:
    layer = TinyLayer().double().randomize()
    layer.forward = lambda x: x + layer.down(layer.up(x)) + layer.second(layer.first(x[:, :0])).sum()  # type: ignore
    before, samples = copy.deepcopy(layer.state_dict()), inputs()
    structure = LayerStructure(up_down=(("up", "down"),), linear_linear=(("first", "second"),))
    processor = smoother(layer, structure, preset, **options(preset))
    smooth(layer, samples, processor)
    assert processor.chosen.keys() == {f"{NAME}.up"}
    assert torch.equal(layer.second.weight, before["second.weight"])
    assert processor.context.record.fallbacks == [
        {
            "module": f"{NAME}.first",
            "what": f"not scaled by {preset}",
            "why": f"no calibration sample reached {NAME}.second",
        }
    ]


def test_hooks_are_gone_after_a_layer_and_after_an_abort() -> None:
    layer = TinyLayer().double().randomize()
    smooth(layer, inputs(), smoother(layer, layer.structure(), "iter_smooth"))
    processor = smoother(layer, layer.structure(), "iter_smooth")
    processor.preprocess(BatchProcessRequest(NAME, layer, []))
    processor.abort()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


def test_presets_run_on_many_ranks_need_data_and_a_forward_of_their_own() -> None:
    layer = TinyLayer()
    for preset in PRESETS:
        processor = smoother(layer, layer.structure(), preset, **options(preset))
        assert processor.support_distributed(), preset
        assert not processor.is_data_free(), preset
        assert not processor.shares_forward(), preset
        assert processor.sums_matrices() == (preset == "awq"), preset
