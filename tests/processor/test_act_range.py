"""`act.method: histogram` in `linear_quant`: the scales it calibrates on a model, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.processor.act_range import ActConfig
from msmodelslim.processor.base import BatchProcessRequest
from tests.processor.driver import context_for, linear_inputs, run, step, token_samples

ACT = {"dtype": "int8", "scope": "per_tensor", "symmetric": False, "method": "histogram"}
WEIGHT = {"dtype": "int8", "scope": "per_channel"}


def quantized(model: Path, **act: object) -> tuple[dict[str, QuantLinear], dict[str, dict]]:
    """Linears and their records after a run with this input half."""
    context = context_for(model)
    weight = WEIGHT | {"dtype": act.get("dtype", "int8")}
    keep = run(context, step(context, "linear_quant", qconfig={"act": ACT | act, "weight": weight}))
    return {n: m for n, m in keep.modules.items() if isinstance(m, QuantLinear)}, context.record.modules


@pytest.fixture(scope="module")
def inputs(t_dense: Path) -> dict[str, np.ndarray]:
    """Every value that flows into each linear, float64, as transformers' own model hands it over."""
    seen = linear_inputs(t_dense, token_samples())
    return {name: np.concatenate([x.double().numpy().ravel() for x in parts]) for name, parts in seen.items()}


def bin_width(values: np.ndarray) -> float:
    """Of 4096 bins that reach over both signs."""
    return float(2.0 ** (np.floor(np.log2(np.abs(values).max() / 2048)) + 1))


def codes_of_fp8(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).double().numpy()


def error(values: np.ndarray, module: QuantLinear) -> float:
    """Mean square error of the inputs with a linear's own scale and offset."""
    scale, symmetric = float(module.act_scale), module.act_offset is None
    if module.scheme.act.dtype == "fp8_e4m3":
        return float(((codes_of_fp8(values / scale) * scale - values) ** 2).mean())
    return clipped_error(values, scale, 0.0 if symmetric else float(module.act_offset))


def clipped_error(values: np.ndarray, scale: float, offset: float) -> float:
    return float((((np.clip(np.rint(values / scale + offset), -128, 127) - offset) * scale - values) ** 2).mean())


def best_error(values: np.ndarray, symmetric: bool) -> float:
    """Least error of a plain search over the values themselves."""
    shares = np.linspace(0.3, 1, 141 if symmetric else 36)
    if symmetric:
        return min(clipped_error(values, share * np.abs(values).max() / 127, 0) for share in shares)
    found = np.inf
    for low in shares * min(values.min(), 0):
        for high in shares * max(values.max(), 0):
            scale = (high - low) / 255
            found = min(found, clipped_error(values, scale, np.rint(-low / scale) - 128))
    return found


@pytest.mark.parametrize("scope", ["per_tensor", "pd_mix"])
def test_mse_loses_no_more_than_a_search_over_all_values_of_all_samples(
    t_dense: Path, inputs: dict[str, np.ndarray], scope: str
) -> None:
    modules, _ = quantized(t_dense, scope=scope)
    assert set(modules) == set(inputs)
    for name, values in inputs.items():
        assert error(values, modules[name]) <= 1.02 * best_error(values, symmetric=False), name


def test_symmetric_mse_loses_no_more_than_a_search_over_all_values(
    t_dense: Path, inputs: dict[str, np.ndarray]
) -> None:
    modules, _ = quantized(t_dense, symmetric=True)
    for name, values in inputs.items():
        assert error(values, modules[name]) <= 1.02 * best_error(values, symmetric=True), name


def test_fp8_mse_loses_no_more_than_a_search_over_all_values(t_dense: Path, inputs: dict[str, np.ndarray]) -> None:
    modules, _ = quantized(t_dense, dtype="fp8_e4m3", symmetric=True)
    for name, values in inputs.items():
        scales = np.linspace(0.3, 1, 141) * np.abs(values).max() / 448
        best = min(float(((codes_of_fp8(values / scale) * scale - values) ** 2).mean()) for scale in scales)
        assert error(values, modules[name]) <= 1.02 * best, name


def test_percentile_ends_are_quantiles_of_all_values_within_a_bin(t_dense: Path, inputs: dict[str, np.ndarray]) -> None:
    modules, records = quantized(t_dense, ext={"criterion": "percentile", "lower": 1.0, "upper": 98.0})
    for name, values in inputs.items():
        wanted = np.quantile(values, [0.01, 0.98], method="inverted_cdf")
        found = np.array(records[name]["act_range"])
        assert (np.abs(found - wanted) <= bin_width(values)).all(), name
        scale = (max(found[1], 0) - min(found[0], 0)) / 255
        assert float(modules[name].act_scale) == pytest.approx(scale, rel=1 / 256), name
        assert records[name]["act_method"] == "histogram percentile"
        assert records[name]["act_extrema"] == [values.min(), values.max()], name


def test_percentiles_0_and_100_are_the_range_of_minmax(t_dense: Path) -> None:
    whole, _ = quantized(t_dense, ext={"criterion": "percentile", "lower": 0, "upper": 100})
    plain, records = quantized(t_dense, method="minmax")
    assert {n: (m.act_scale, m.act_offset) for n, m in whole.items()} == {
        n: (m.act_scale, m.act_offset) for n, m in plain.items()
    }
    assert all("act_range" not in record for record in records.values())


def test_kl_ends_lie_within_the_extrema(t_dense: Path, inputs: dict[str, np.ndarray]) -> None:
    _, records = quantized(t_dense, ext={"criterion": "kl"})
    for name, values in inputs.items():
        low, high = records[name]["act_range"]
        assert values.min() <= low <= 0 <= high <= values.max(), name
        assert max(-low, high) >= 128 * bin_width(values), "a code of a sign has at least one bin"


@pytest.mark.parametrize("criterion", ["mse", "percentile", "kl"])
def test_linears_that_engines_fuse_share_one_scale(t_dense: Path, criterion: str) -> None:
    modules, _ = quantized(t_dense, ext={"criterion": criterion})
    for layer in range(2):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            found = {
                (
                    float(modules[f"model.layers.{layer}.{name}"].act_scale),
                    float(modules[f"model.layers.{layer}.{name}"].act_offset),
                )
                for name in group
            }
            assert len(found) == 1


def test_an_input_that_is_not_finite_is_named_with_module_and_sample(t_dense: Path) -> None:
    context = context_for(t_dense)
    processor = step(context, "linear_quant", qconfig={"act": ACT, "weight": WEIGHT})
    layer = nn.ModuleDict({"a": nn.Linear(4, 4)})
    request = BatchProcessRequest("model.layers.0", layer, sample_ids=range(7), sample_count=7)
    processor.preprocess(request)
    for request.sample_id in (5, 6):
        layer["a"](torch.full((1, 4), torch.nan))
    with pytest.raises(
        InvalidModelError, match=r"model\.layers\.0\.a: its input is not finite in calibration sample 5"
    ):
        processor.postprocess(request)


def test_a_linear_that_no_sample_reached_is_refused_by_name(t_dense: Path) -> None:
    context = context_for(t_dense)
    processor = step(context, "linear_quant", qconfig={"act": ACT, "weight": WEIGHT})
    request = BatchProcessRequest("model.layers.0", nn.ModuleDict({"a": nn.Linear(4, 4)}))
    processor.preprocess(request)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.a: no calibration sample reached it.*per_token"):
        processor.postprocess(request)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            {"scope": "per_token", "symmetric": True},
            "method histogram calibrates a range, and int8 per_token sym takes its own at run time; write method: m",
        ),
        (
            {"method": "none"},
            "act.method is none with act.dtype int8; float goes with none, all else with minmax or hist",
        ),
        ({"dtype": "float"}, "act.method is histogram with act.dtype float"),
        ({"ext": {"aggregation_type": "mean"}}, "ext.aggregation_type is for method minmax, not histogram; take it aw"),
        ({"method": "minmax", "ext": {"criterion": "kl"}}, "ext.criterion is for method histogram, not minmax"),
        (
            {"method": "minmax", "scope": "per_token", "ext": {"aggregation_type": "mean"}},
            "aggregation_type mean averages a calibrated range, and int8 per_token asym takes its own at run time",
        ),
        ({"ext": {"upper": 99}}, "upper is for criterion percentile, not mse; take it away"),
        (
            {"ext": {"criterion": "percentile", "lower": 60, "upper": 5}},
            "lower is 60 and upper 5; the lower end comes first",
        ),
        (
            {"dtype": "fp8_e4m3", "symmetric": True, "ext": {"criterion": "kl"}},
            "criterion kl compares evenly spaced codes, and fp8_e4m3 has none; write mse or percentile",
        ),
        ({"ext": {"bins": 99}}, "bins"),
        ({"ext": {"axes": -1}}, "ext.axes is for mxfp8 and mxfp4, not int8; take it away"),
        ({"method": "dualscale"}, "act.method is dualscale with act.scope per_tensor; dualscale goes with dual_scale"),
        (
            {"dtype": "mxfp4", "scope": "dual_scale", "symmetric": True, "method": "minmax"},
            "act.method is minmax with act.scope dual_scale; dualscale goes with dual_scale and with nothing else",
        ),
        ({"ext": {"dual_block_size": 64}}, "ext.dual_block_size is for method dualscale, not histogram; take it away"),
    ],
)
def test_what_makes_no_range_is_refused_with_the_mend(act: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ActConfig.model_validate(ACT | act)
