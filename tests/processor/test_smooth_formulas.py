"""What each preset makes of statistics: hand-worked factors, the formulas in numpy, options and their defaults."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from msmodelslim.errors import SchemaValidateError
from msmodelslim.processor.smooth_search import Exponents, Formula, channel_factors
from msmodelslim.processor.smooth_subgraphs import Subgraph, SubgraphKind
from msmodelslim.recipe import parse_recipe
from msmodelslim.registry import lookup
from tests import fixtures
from tests.processor.driver import context_for, linear_inputs, run, step, token_samples
from tests.processor.smooth_driver import PRESETS, W4_GROUPS, W4A8, TinyLayer, smoother

PLAIN = Subgraph(SubgraphKind.NORM_LINEAR, "norm", ("linear",))
ACT, WEIGHT = torch.tensor([8.0, 0.5]), torch.tensor([0.5, 2.0])


def of(values: list[float]) -> Tensor:
    return torch.tensor(values)


def close(found: Tensor, expected: list[float], rel: float = 1e-6) -> bool:
    return bool(torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=rel, atol=0))


def test_factors_of_smooth_quant_and_iter_smooth_worked_by_hand() -> None:
    assert close(channel_factors(PLAIN, ACT, WEIGHT, Exponents(0.5, 0.5), Formula()), [4.0, 0.5])
    # 8^.9 / .5^.1 = 6.49802 / 0.933033, .5^.9 / 2^.1 = 2^-1
    assert close(channel_factors(PLAIN, ACT, WEIGHT, Exponents(0.9, 0.1), Formula()), [6.9644, 0.5], rel=1e-5)


def test_heads_that_share_a_value_share_a_factor() -> None:
    shared = Subgraph(SubgraphKind.OV, "v", ("o",), share=2, head_width=1, heads=2)
    act, weight = of([2.0, 4.0, 1.0, 3.0]), of([1.0, 1.0, 1.0, 1.0])
    mean = channel_factors(shared, act, weight, Exponents(1.0, 0.0), Formula(group="mean"))
    assert close(mean, [3.0, 2.0])
    assert close(shared.by_column(mean), [3.0, 3.0, 2.0, 2.0])
    assert close(channel_factors(shared, act, weight, Exponents(1.0, 0.0), Formula(group="max")), [4.0, 3.0])
    # one factor from the largest of both sizes: 16^.5 / 4^.5 and 9^.5 / 1^.5
    both = channel_factors(shared, of([16.0, 1, 9, 4]), of([1.0, 4, 1, 1]), Exponents(0.5, 0.5), Formula(group="max"))
    assert close(both, [2.0, 3.0])


def test_columns_of_wide_heads_belong_to_their_key_value_head() -> None:
    shared = Subgraph(SubgraphKind.OV, "v", ("o",), share=2, head_width=3, heads=2)
    channels = torch.arange(6.0)  # head 0: 0 1 2, head 1: 3 4 5
    assert shared.by_column(channels).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert shared.by_channel(torch.arange(12.0)).tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


def test_value_rows_of_a_fused_projection_get_the_factors_in_head_order() -> None:
    interleaved = Subgraph(SubgraphKind.OV, "kv", ("o",), 1, 2, 2, rows=((2, 4), (6, 8)))
    assert interleaved.by_row(of([5.0, 6, 7, 8]), 8).tolist() == [1, 1, 5, 6, 1, 1, 7, 8]


def test_a_dead_channel_has_factor_1_and_small_sizes_have_floors() -> None:
    act, weight = of([0.0, 1e-30, 4.0, 4.0]), of([1.0, 1.0, 0.0, 1e-9])
    found = channel_factors(PLAIN, act, weight, Exponents(0.5, 0.5), Formula(floor=1e-3))
    assert close(found, [1.0, 1e-3, 2 / 1e-5**0.5, 2 / 1e-5**0.5])


def test_normalized_factors_have_their_geometric_middle_at_1_and_ignore_dead_channels() -> None:
    found = channel_factors(PLAIN, of([0.0, 1, 4, 16]), torch.ones(4), Exponents(0.5, 0), Formula(normalize=True))
    assert close(found, [1.0, 0.5, 1.0, 2.0])
    found = channel_factors(PLAIN, of([1e-9, 1e9]), torch.ones(2), Exponents(1, 0), Formula(normalize=True))
    assert close(found, [1e-4, 1e4])
    dead = channel_factors(PLAIN, torch.zeros(2), torch.ones(2), Exponents(1, 0), Formula(normalize=True))
    assert dead.tolist() == [1, 1]


@pytest.fixture(scope="module")
def float32_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.t_dense(tmp_path_factory.mktemp("float32"), dtype=torch.float32)


@pytest.mark.parametrize(("preset", "alpha"), [("smooth_quant", 0.5), ("iter_smooth", 0.9)])
def test_every_norm_is_divided_by_the_formula_of_transformers_own_inputs(
    float32_model: Path, preset: str, alpha: float
) -> None:
    context, untouched = context_for(float32_model), context_for(float32_model)
    smoothed = run(context, step(context, preset, enable_subgraph_type=["norm-linear"])).modules
    inputs = linear_inputs(float32_model, token_samples())
    for layer in ("model.layers.0", "model.layers.1"):
        old_layer = untouched.model.get_submodule(layer)
        untouched.adapter.load_module(layer, old_layer, context.device)
        old = dict(old_layer.named_modules(prefix=layer))
        for norm, part, linears in (
            ("input_layernorm", "self_attn", ("q_proj", "k_proj", "v_proj")),
            ("post_attention_layernorm", "mlp", ("gate_proj", "up_proj")),
        ):
            names = [f"{layer}.{part}.{linear}" for linear in linears]
            act = np.max([x.double().abs().amax((0, 1)).numpy() for x in inputs[names[0]]], axis=0)
            weight = np.max([old[name].weight.double().abs().amax(0).numpy() for name in names], axis=0)
            factor = act**alpha / weight ** (1 - alpha)
            gain = old[f"{layer}.{norm}"].weight.double().numpy()
            found = smoothed[f"{layer}.{norm}"].weight.double().numpy()
            np.testing.assert_allclose(found, gain / factor, rtol=2e-6)
            for name in names:
                expected = old[name].weight.double().numpy() * factor
                np.testing.assert_allclose(smoothed[name].weight.double().numpy(), expected, rtol=2e-6)


def test_presets_have_their_documented_defaults() -> None:
    every = ["norm-linear", "linear-linear", "ov", "up-down"]
    patterns = {"include": None, "exclude": None}
    defaults = {
        preset: lookup("processor", preset).Config.model_validate(options).model_dump(mode="json")
        for preset, options in PRESETS.items()
    }
    for options in defaults.values():
        options["enable_subgraph_type"] = list(options["enable_subgraph_type"])
    assert defaults["smooth_quant"] == {
        **patterns,
        "enable_subgraph_type": ["norm-linear"],
        "alpha": 0.5,
        "symmetric": True,
    }
    assert defaults["iter_smooth"] == {
        **patterns,
        "enable_subgraph_type": every,
        "alpha": 0.9,
        "scale_min": 1e-5,
        "symmetric": True,
        "group_method": "mean",
    }
    assert defaults["flex_smooth_quant"] == {
        **patterns,
        "enable_subgraph_type": every,
        "alpha": None,
        "beta": None,
        "qconfig": None,
        "group_method": "mean",
    }
    searched = defaults["flex_awq_ssz"]
    assert (searched["alpha"], searched["beta"], searched["enable_subgraph_type"]) == (None, None, every)
    assert (defaults["awq"]["n_grid"], defaults["awq"]["duo_scaling"]) == (20, True)
    for preset, key in (("flex_awq_ssz", "qconfig"), ("awq", "weight_qconfig")):
        with pytest.raises(ValidationError, match=key):
            lookup("processor", preset).Config.model_validate({})


RECIPE = """apiversion: modelslim_v1
spec:
  process:
    - type: smooth_quant
      alpha: 0.6
      include: ["*.input_layernorm"]
    - type: iter_smooth
      enable_subgraph_type: [ov, up-down]
      include: null
    - type: flex_smooth_quant
      alpha: 0.5
    - type: flex_awq_ssz
      qconfig:
        act: {dtype: int8, scope: per_token, method: minmax}
        weight: {dtype: int4, scope: per_channel}
    - type: awq
      weight_qconfig: {dtype: int4, scope: per_group, ext: {group_size: 64}}
  save:
    - type: ascendv1_saver
metadata: {config_id: mine, label: {w_bit: 8, a_bit: 8}}
"""


def test_a_recipe_with_every_preset_is_read() -> None:
    assert [item.type for item in parse_recipe(RECIPE, "mine.yaml").process] == list(PRESETS)


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("smooth_quant", {"alpha": 1.0}, "less than 1"),
        ("iter_smooth", {"scale_min": 0}, "greater than 0"),
        ("iter_smooth", {"enable_subgraph_type": ["norm"]}, "'norm-linear', 'linear-linear', 'ov' or 'up-down'"),
        (
            "iter_smooth",
            {"symmetric": False, "enable_subgraph_type": ["ov"]},
            "symmetric: false centres norm-linear only; add it to enable_subgraph_type, or leave it true",
        ),
        ("iter_smooth", {"scale_min": float("inf")}, "finite number"),
        ("iter_smooth", {"include": []}, "at least 1 item"),
        ("flex_smooth_quant", {"beta": 1.5}, "less than or equal to 1"),
        ("awq", {"weight_qconfig": W4_GROUPS, "n_grid": 0}, "greater than 0"),
        (
            "awq",
            {"weight_qconfig": {"dtype": "int4", "scope": "per_channel", "ext": {"group_size": 64}}},
            "weight_qconfig.ext.group_size is for per_group; take it away or write scope: per_group, not per_channel",
        ),
        (
            "awq",
            {"weight_qconfig": {"dtype": "int4", "scope": "per_token"}},
            "weight int4 per_token sym is of no supported pair; int4 weights go with: weight per_channel|per_group",
        ),
        (
            "awq",
            {"weight_qconfig": {"dtype": "float", "scope": "per_channel"}},
            "weight float is of no supported pair; a weight dtype of float quantizes nothing",
        ),
        ("flex_awq_ssz", {"qconfig": W4A8, "gamma": 1}, "Extra inputs are not permitted"),
    ],
)
def test_options_out_of_range_are_refused(preset: str, options: dict, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        lookup("processor", preset).Config.model_validate(options)
    assert message in str(error.value)


def test_every_weight_that_linear_quant_takes_may_be_smoothed_for() -> None:
    for options in lookup("processor", "linear_quant").examples():  # type: ignore[attr-defined]
        lookup("processor", "awq").Config.model_validate({"weight_qconfig": options["qconfig"]["weight"]})


def test_a_wrong_kind_of_producer_is_one_mistake() -> None:
    text = RECIPE.replace("[ov, up-down]", "[norm_linear]")
    with pytest.raises(SchemaValidateError) as error:
        parse_recipe(text, "mine.yaml")
    assert str(error.value) == (
        "mine.yaml:8: spec.process[1].enable_subgraph_type[0]: 'norm_linear' is not known here; write 'norm-linear' "
        "(of norm-linear, linear-linear, ov, up-down)"
    )


def test_fixed_exponents_leave_nothing_to_search() -> None:
    layer = TinyLayer()
    fixed = smoother(layer, layer.structure(), "flex_smooth_quant", alpha=0.5, beta=0.25).plan()
    assert (fixed.start, fixed.stages) == (Exponents(0.5, 0.25), ())
    fixed = smoother(layer, layer.structure(), "flex_awq_ssz", alpha=0.5, qconfig=W4A8).plan()
    assert (fixed.start, fixed.stages) == (Exponents(0.5, 0.0), ())
    assert len(smoother(layer, layer.structure(), "flex_smooth_quant", beta=0.25).plan().stages) == 1
    assert len(smoother(layer, layer.structure(), "flex_smooth_quant").plan().stages) == 2
