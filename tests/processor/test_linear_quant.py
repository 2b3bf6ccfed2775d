"""`linear_quant`: which modules it takes, the scales it calibrates, and what it refuses."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import nn

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.processor.linear_quant import PAIRS, LinearQConfig, LinearQuantProcessor
from tests.processor.driver import context_for, linear_inputs, run, step, token_samples

STATIC = {
    "act": {"dtype": "int8", "scope": "per_tensor", "symmetric": False, "method": "minmax"},
    "weight": {"dtype": "int8", "scope": "per_channel"},
}
NEGATIVE = {"dtype": "int4", "scope": "per_channel", "method": "ssz", "ext": {"negative_scale": True}}
DUAL = {half: {"dtype": "mxfp4", "scope": "dual_scale", "method": "dualscale"} for half in ("act", "weight")}
DYNAMIC = {
    "act": {"dtype": "int8", "scope": "per_token", "method": "minmax"},
    "weight": {"dtype": "int8", "scope": "per_channel"},
}
LINEARS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
EXAMPLES = LinearQuantProcessor.examples()
NAMES = {f"model.layers.{i}.{part}.{linear}" for i in range(2) for part, group in LINEARS.items() for linear in group}


def bfloat16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.bfloat16))


def stored(path: Path, name: str) -> np.ndarray:
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            if name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                return handle.get_tensor(name).double().numpy()
    raise KeyError(name)


@pytest.fixture(scope="module")
def static_run(t_dense: Path) -> dict[str, nn.Module]:
    context = context_for(t_dense)
    return run(context, step(context, "linear_quant", qconfig=STATIC)).modules


def test_static_scales_follow_from_the_range_of_every_sample_together(
    t_dense: Path, static_run: dict[str, nn.Module]
) -> None:
    inputs = linear_inputs(t_dense, token_samples())
    assert set(inputs) == NAMES
    for name, seen in inputs.items():
        every = np.concatenate([x.double().numpy().ravel() for x in seen])
        low, high = min(every.min(), 0.0), max(every.max(), 0.0)
        scale = bfloat16((high - low) / 255)
        offset = round(-low / scale) - 128
        module = static_run[name]
        assert isinstance(module, QuantLinear)
        assert float(module.act_scale) == pytest.approx(scale, rel=1 / 256), name  # at most one bfloat16 step off a tie
        assert abs(float(module.act_offset) - offset) <= 1, name


def test_weight_codes_follow_the_formula_of_symmetric_rounding(t_dense: Path, static_run: dict[str, nn.Module]) -> None:
    for name in NAMES:
        weight = stored(t_dense, f"{name}.weight")
        scale = np.array([bfloat16(row) for row in np.abs(weight).max(axis=1) / 127])[:, None]
        expected = np.clip(np.rint(weight / scale), -128, 127)
        different = np.abs(static_run[name].codes.numpy() - expected)
        assert different.max() <= 1, name
        assert (different != 0).mean() < 1e-3, name  # float32 and float64 quotients part at ties only


def test_q_k_v_share_one_activation_scale(static_run: dict[str, nn.Module]) -> None:
    for layer in range(2):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            modules = [static_run[f"model.layers.{layer}.{name}"] for name in group]
            assert len({(float(m.act_scale), float(m.act_offset)) for m in modules}) == 1


def test_the_next_layer_is_calibrated_on_float_outputs_of_this_one(t_dense: Path) -> None:
    context = context_for(t_dense)
    keep = run(context, step(context, "linear_quant", qconfig=STATIC))
    inputs = linear_inputs(t_dense, token_samples())
    norm = keep.modules["model.layers.1.input_layernorm"]
    for index, output in enumerate(keep.outputs["model.layers.0"]):
        assert torch.equal(norm(output), inputs["model.layers.1.self_attn.q_proj"][index])


def test_mean_aggregation_averages_the_extrema_of_the_samples(t_dense: Path) -> None:
    act = STATIC["act"] | {"ext": {"aggregation_type": "mean"}}
    context = context_for(t_dense)
    modules = run(context, step(context, "linear_quant", qconfig=STATIC | {"act": act})).modules
    for name, seen in linear_inputs(t_dense, token_samples()).items():
        low = min(np.mean([x.double().min() for x in seen]), 0.0)
        high = max(np.mean([x.double().max() for x in seen]), 0.0)
        assert float(modules[name].act_scale) == pytest.approx(bfloat16((high - low) / 255), rel=1 / 256), name


def test_a_dynamic_recipe_needs_no_forward(t_dense: Path) -> None:
    context = context_for(t_dense)
    processor = step(context, "linear_quant", qconfig=DYNAMIC)
    run(context, processor, samples=[])
    assert processor.is_data_free()
    assert [entry["forwards"] for entry in context.record.layers] == [0, 0]
    assert set(context.record.modules) == NAMES


def test_include_and_exclude_choose_the_linears(t_dense: Path) -> None:
    context = context_for(t_dense)
    processor = step(
        context, "linear_quant", qconfig=DYNAMIC, include=["*.{gate,up}_proj", "*.down_proj"], exclude=["*.1.*"]
    )
    keep = run(context, processor, samples=[])
    taken = {name for name, module in keep.modules.items() if isinstance(module, QuantLinear)}
    assert taken == {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")}


def test_a_group_and_two_steps_give_the_same_codes_and_scales(t_dense: Path) -> None:
    attention = {"include": ["*self_attn*"], "qconfig": STATIC}
    mlp = {"include": ["*mlp*"], "qconfig": DYNAMIC}
    two = context_for(t_dense)
    in_steps = run(two, step(two, "linear_quant", **attention), step(two, "linear_quant", **mlp)).modules
    one = context_for(t_dense)

    class Child:
        def __init__(self, config: dict) -> None:
            self.type = "linear_quant"
            self.config = LinearQuantProcessor.Config.model_validate(config)

    grouped = run(one, step(one, "group", configs=(Child(attention), Child(mlp)))).modules
    for name in NAMES:
        for key, tensor in in_steps[name].state_dict().items():
            assert torch.equal(tensor, grouped[name].state_dict()[key]), (name, key)
    assert [entry["forwards"] for entry in one.record.layers] == [1, 1]
    assert [entry["forwards"] for entry in two.record.layers] == [1, 1]


def test_weight_error_is_the_relative_norm_of_what_rounding_lost(t_dense: Path) -> None:
    context = context_for(t_dense)
    modules = run(context, step(context, "linear_quant", qconfig=DYNAMIC), samples=[]).modules
    for name in NAMES:
        weight = stored(t_dense, f"{name}.weight")
        codes = modules[name].codes.double().numpy() * modules[name].weight_scale.double().numpy()
        expected = math.sqrt(((weight - codes) ** 2).sum() / (weight**2).sum())
        assert context.record.modules[name]["weight_error"] == pytest.approx(expected, rel=1e-5)


def test_a_sample_that_is_not_finite_is_named_with_module_and_number(t_dense: Path) -> None:
    context = context_for(t_dense)
    processor = step(context, "linear_quant", qconfig=STATIC)
    layer = nn.ModuleDict({"a": nn.Linear(4, 4)})
    request = BatchProcessRequest("model.layers.0", layer, sample_ids=range(7), sample_count=7)
    processor.preprocess(request)
    for request.sample_id in (5, 6):
        layer["a"](torch.full((1, 4), torch.inf))
    with pytest.raises(
        InvalidModelError, match=r"model\.layers\.0\.a: its input is not finite in calibration sample 5"
    ):
        processor.postprocess(request)


GRAM_METHODS: list[dict[str, object]] = [
    {"dtype": "int4", "scope": "per_channel", "method": "gptq"},
    {"dtype": "int4", "scope": "per_channel", "method": "awq_clip"},
    {"dtype": "int4", "scope": "per_channel", "method": "ssz", "ext": {"importance": True}},
    {"dtype": "mxfp4", "scope": "per_block", "method": "mx_search", "ext": {"importance": True}},
]


@pytest.mark.parametrize("weight", GRAM_METHODS, ids=lambda weight: weight["method"])
@pytest.mark.parametrize("value", [torch.nan, 1e25])
def test_a_sample_whose_squares_are_not_finite_is_named_by_what_sums_them(
    weight: dict[str, object], value: float, t_dense: Path
) -> None:
    """C26, where only the weight is rounded"""
    context = context_for(t_dense, "default")  # which knows no parts of this layer
    processor = step(context, "linear_quant", qconfig={"weight": weight})
    layer = nn.ModuleDict({"a": nn.Linear(32, 4)})
    request = BatchProcessRequest("model.layers.0", layer, sample_ids=range(7), sample_count=7)
    processor.preprocess(request)
    for request.sample_id in (4, 5, 6):
        layer["a"](torch.full((1, 32), 1.0 if request.sample_id == 4 else value))
    message = (
        r"model\.layers\.0\.a: the sums of squares of its inputs are not finite, from calibration sample 5 on.*; "
        "take the sample out"
    )
    with pytest.raises(InvalidModelError, match=message):
        processor.postprocess(request)


@pytest.mark.parametrize("weight", GRAM_METHODS, ids=lambda weight: weight["method"])
def test_a_linear_that_no_token_reached_gets_all_its_tensors_and_is_recorded(
    weight: dict[str, object], t_dense: Path
) -> None:
    """C41: every method rounds by the weight alone, and says so where that is not what was asked for."""
    context = context_for(t_dense, "default")
    processor = step(context, "linear_quant", qconfig={"weight": weight})
    layer = nn.ModuleDict({"a": nn.Linear(32, 4), "b": nn.Linear(32, 4)})
    layer["a"].load_state_dict(layer["b"].state_dict())
    request = BatchProcessRequest("model.layers.0", layer, sample_ids=range(2), sample_count=2)
    processor.preprocess(request)
    for request.sample_id in (0, 1):
        layer["a"](torch.empty(0, 32))
        layer["b"](torch.randn(3, 32, generator=torch.Generator().manual_seed(request.sample_id)))
    processor.postprocess(request)
    starved, fed = (layer[name].state_dict() for name in ("a", "b"))
    assert {name: (t.shape, t.dtype) for name, t in starved.items()} == {
        name: (t.shape, t.dtype) for name, t in fed.items()
    }
    assert all(tensor.float().isfinite().all() for name, tensor in starved.items() if tensor.is_floating_point())
    (fallback,) = context.record.fallbacks
    assert fallback["module"] == "model.layers.0.a"
    assert "no calibration token reached it" in fallback["why"]


def test_a_linear_that_no_sample_reached_is_refused_by_name(t_dense: Path) -> None:
    context = context_for(t_dense)
    processor = step(context, "linear_quant", qconfig=STATIC)
    request = BatchProcessRequest("model.layers.0", nn.ModuleDict({"a": nn.Linear(4, 4)}))
    processor.preprocess(request)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.a: no calibration sample reached it.*per_token"):
        processor.postprocess(request)


def test_two_steps_that_select_one_linear_are_refused_at_the_rehearsal(t_dense: Path) -> None:
    context = context_for(t_dense)
    first, second = (step(context, "linear_quant", qconfig=q) for q in (DYNAMIC, STATIC))
    request = BatchProcessRequest("model.layers.0", context.model.get_submodule("model.layers.0"))
    first.rehearse(request)
    with pytest.raises(UnsupportedError, match=r"q_proj: two linear_quant steps select it .*override: true"):
        second.rehearse(request)


def test_override_leaves_the_linears_of_an_earlier_step_to_it(t_dense: Path) -> None:
    context = context_for(t_dense)
    first = step(context, "linear_quant", qconfig=STATIC, include=["*self_attn*"])
    second = step(context, "linear_quant", qconfig=DYNAMIC, override=True)
    for name in context.adapter.layer_names:
        request = BatchProcessRequest(name, context.model.get_submodule(name))
        first.rehearse(request)
        second.rehearse(request)
    for name in NAMES:
        scheme = context.model.get_submodule(name).scheme
        assert scheme.act.is_static is ("self_attn" in name), name


def test_groups_that_do_not_divide_are_refused_before_a_weight_is_read(t_dense: Path) -> None:
    context = context_for(t_dense)
    weight = {"dtype": "int4", "scope": "per_group", "ext": {"group_size": 48}}
    processor = step(context, "linear_quant", qconfig={"weight": weight})
    request = BatchProcessRequest("model.layers.0", context.model.get_submodule("model.layers.0"))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn\.q_proj: 64 input features .* 48"):
        processor.rehearse(request)


def test_the_rehearsal_counts_what_each_pattern_matches(t_dense: Path) -> None:
    context = context_for(t_dense)
    processor = step(context, "linear_quant", qconfig=DYNAMIC, include=["*mlp*"], exclude=["*.nothing"])
    for name in context.adapter.layer_names:
        processor.rehearse(BatchProcessRequest(name, context.model.get_submodule(name)))
    processor.pre_run()
    found = {(p["list"], p["pattern"]): p["matches"] for p in context.record.patterns}
    assert found == {("include", "*mlp*"): 6, ("exclude", "*.nothing"): 0}


def test_the_examples_cover_every_supported_pair() -> None:
    schemes = {str(LinearQConfig.model_validate(example["qconfig"]).scheme()) for example in EXAMPLES}
    assert len(schemes) == 35  # counted by hand from the table of pairs
    assert {str(w.dtype) for _, w in PAIRS} == {"int8", "int4", "fp8_e4m3", "mxfp8", "mxfp4"}


def test_the_axis_of_mx_blocks_may_be_written_out() -> None:
    half = {"dtype": "mxfp8", "scope": "per_block", "method": "minmax", "ext": {"axes": -1}}
    config = LinearQConfig.model_validate({"act": half, "weight": half})
    assert str(config.scheme()) == "weight mxfp8 per_block sym, act mxfp8 per_block sym"


def example_name(example: dict) -> str:
    return (
        f"{LinearQConfig.model_validate(example['qconfig']).scheme()}-{example['qconfig']['weight'].get('method', '')}"
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=example_name)
def test_every_supported_pair_runs_and_rounds_as_finely_as_its_bits_allow(t_dense: Path, example: dict) -> None:
    context = context_for(t_dense)
    keep = run(context, step(context, "linear_quant", **example), samples=token_samples(1))
    assert all(isinstance(keep.modules[name], QuantLinear) for name in NAMES)
    worst = max(record["weight_error"] for record in context.record.modules.values())
    limit = {"int8": 0.02, "fp8_e4m3": 0.04, "mxfp8": 0.04, "int4": 0.25, "mxfp4": 0.2}
    slack = 1.25 if "method" in example["qconfig"]["weight"] else 1  # methods that serve the outputs, not the weights
    assert worst < slack * limit[example["qconfig"]["weight"]["dtype"]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"weight": {"dtype": "int8", "scope": "per_token"}}, "no supported pair; int8 weights go with"),
        ({"weight": {"dtype": "float", "scope": "per_channel"}}, "a weight dtype of float quantizes nothing"),
        (STATIC | {"act": STATIC["act"] | {"method": "none"}}, "act.method is none with act.dtype int8"),
        (
            {"weight": {"dtype": "int8", "scope": "per_channel", "ext": {"group_size": 64}}},
            "group_size is for per_group; take it away or write scope: per_group, not per_channel",
        ),
        (
            {"act": DUAL["act"], "weight": DUAL["weight"] | {"ext": {"dual_block_size": 64}}},
            "dual_block_size is 512 in act.ext and 64 in weight.ext, 512 where it is left out; write",
        ),
        (
            DUAL | {"weight": {"dtype": "mxfp4", "scope": "per_block", "ext": {"dual_block_size": 64}}},
            "weight.ext.dual_block_size is for scope dual_scale, not per_block; take it away",
        ),
        (
            {"weight": NEGATIVE | {"symmetric": False}},
            "negative_scale is for symmetric int weights of one level .* not for weight int4 per_channel asym",
        ),
        (STATIC | {"weight": NEGATIVE | {"dtype": "int8"}}, "inputs that are not calibrated, not for weight int8"),
        (
            {"weight": {"dtype": "int8", "scope": "per_channel", "ext": {"axes": -1}}},
            "weight.ext.axes is for mxfp8 and mxfp4, not int8; take it away",
        ),
        ({"weight": {"dtype": "mxfp8", "scope": "per_block", "ext": {"axes": 0}}}, "axes is 0: input should be -1"),
        ({"weight": DUAL["weight"]}, "is no supported pair; mxfp4 weights go with"),
        (DYNAMIC | {"act": {"scope": "per_token"}}, "act.scope is per_token for a float input"),
    ],
)
def test_what_cannot_be_deployed_is_refused_with_what_can(config: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LinearQConfig.model_validate(config)
