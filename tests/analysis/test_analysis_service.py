"""Scores are those of numpy on what transformers computes, with the same bits on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from msmodelslim import analysis_service
from msmodelslim.analysis.metrics import METRICS
from msmodelslim.analysis.result import AnalysisResult
from msmodelslim.analysis_service import AnalysisJob, analyze, open_analysis, run_rank
from msmodelslim.errors import EnvError, InvalidDatasetError, InvalidModelError, SchemaValidateError, UnsupportedError
from tests import fixtures
from tests.analysis.oracle import Oracle, mxfp4, relative
from tests.run_ranks import RankRunner

SAMPLES = [[(7 * index + 3 * place) % 300 + 3 for place in range(9 + 5 * index)] for index in range(5)]
EVERY = [(scope, metric) for scope, metrics in METRICS.items() for metric in metrics]
STATIC = """\
apiversion: modelslim_v1
spec:
  process:
    - {type: iter_smooth}
    - type: linear_quant
      exclude: ["*.0.mlp.down_proj"]
      qconfig:
        act: {dtype: int8, scope: per_tensor, method: minmax}
        weight: {dtype: int8, scope: per_channel}
  save: [{type: compressed_tensors}]
"""


def write_samples(path: Path, count: int = len(SAMPLES)) -> Path:
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in SAMPLES[:count]))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.t_dense(tmp_path_factory.mktemp("analysis"), num_hidden_layers=3, dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model, SAMPLES)


@pytest.fixture
def job(model: Path, tmp_path: Path) -> AnalysisJob:
    return AnalysisJob(model, "linear", "kurtosis", dataset=str(write_samples(tmp_path / "data.jsonl")), threads=1)


def scores(job: AnalysisJob, **changes: Any) -> dict[str, float]:
    result = analyze(AnalysisJob(**{**vars(job), **changes}))
    assert result is not None
    found = [one.score for one in result.layer_scores]
    assert found == sorted(found, reverse=True)
    return {one.name: one.score for one in result.layer_scores}


def test_kurtosis_is_numpys_on_all_values(job: AnalysisJob, oracle: Oracle) -> None:
    found = scores(job)
    assert set(found) == set(oracle.linears)
    for name, x in oracle.inputs().items():
        z = (x - x.mean()) / x.std()
        assert found[name] == pytest.approx((z**4).mean() - 3, rel=1e-4, abs=1e-5)


def test_std_is_the_largest_value_over_the_pooled_deviation(job: AnalysisJob, oracle: Oracle) -> None:
    found = scores(job, metric="std")
    for name, x in oracle.inputs().items():
        assert found[name] == pytest.approx(np.abs(x).max() / x.std(), rel=1e-5)


def test_quantile_is_an_int8_step_over_the_interquartile_range(job: AnalysisJob, oracle: Oracle) -> None:
    found = scores(job, metric="quantile")
    for name, x in oracle.inputs().items():
        lower, upper = np.quantile(x, [0.25, 0.75])
        assert found[name] == pytest.approx(2 * np.abs(x).max() / 254 / (upper - lower), rel=2**-7)


def test_mse_of_a_linear_is_that_of_fp4_blocks_of_weight_and_float_input(job: AnalysisJob, oracle: Oracle) -> None:
    found = scores(job, metric="mse")
    for name, flat in oracle.inputs().items():
        weight = oracle.model.get_submodule(name).weight.detach().double().numpy()
        x = flat.reshape(-1, weight.shape[1])
        assert found[name] == pytest.approx(relative(mxfp4(x) @ mxfp4(weight).T, x @ weight.T), rel=1e-2)


def test_mse_layer_wise_quantizes_one_block_on_float_inputs(job: AnalysisJob, oracle: Oracle) -> None:
    found = scores(job, scope="layer", metric="mse_layer_wise")
    for name, calls in oracle.calls().items():
        expected = oracle.outputs(name, calls)
        with oracle.quantized(name):
            assert found[name] == pytest.approx(relative(oracle.outputs(name, calls), expected), rel=1e-2)


def test_model_wise_metrics_look_at_the_logits_with_one_block_quantized(job: AnalysisJob, oracle: Oracle) -> None:
    squares = scores(job, scope="layer", metric="mse_model_wise")
    divergence = scores(job, scope="layer", metric="kl_model_wise")
    expected = oracle.logits()
    log_p = expected - np.log(np.exp(expected).sum(1, keepdims=True))
    for name in oracle.layers:
        with oracle.quantized(name + "."):
            found = oracle.logits()
        assert squares[name] == pytest.approx(relative(found, expected), rel=1e-2)
        log_q = found - np.log(np.exp(found).sum(1, keepdims=True))
        assert divergence[name] == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(1).mean(), rel=1e-2)


def test_logits_in_slices_give_the_same_score(job: AnalysisJob, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scores(job, scope="layer", metric="kl_model_wise")
    monkeypatch.setattr("msmodelslim.analysis.model_wise.LOGITS_AT_ONCE", 4 * fixtures.VOCABULARY)
    found = scores(job, scope="layer", metric="kl_model_wise")
    for name, score in whole.items():
        assert found[name] == pytest.approx(score, rel=1e-5)


def test_patterns_are_those_of_recipes_braces_too(job: AnalysisJob) -> None:
    found = scores(job, patterns=("*.{0,2}.*.{q,up}_proj", "model.layers.1.mlp.down_proj"))
    assert set(found) == {
        *(f"model.layers.{index}.{kind}" for index in (0, 2) for kind in ("self_attn.q_proj", "mlp.up_proj")),
        "model.layers.1.mlp.down_proj",
    }


def test_a_block_without_quantized_linears_has_no_score_and_is_named(job: AnalysisJob) -> None:
    for metric in METRICS["layer"]:
        result = analyze(
            AnalysisJob(**{**vars(job), "scope": "layer", "metric": metric, "patterns": ("*.{0,2}.*", "no")})
        )
        assert result is not None
        assert {one.name for one in result.layer_scores} == {"model.layers.0", "model.layers.2"}
        assert "include pattern 'no' of linear_quant matched nothing it works on" in result.notes
        assert "1 block(s) have no score, nothing is quantized in them: model.layers.1" in result.notes


def test_a_recipe_chooses_the_quantization(job: AnalysisJob) -> None:
    recipe = {"recipe_text": STATIC, "recipe_source": "static.yaml"}
    linear = scores(job, metric="mse", **recipe)
    assert len(linear) == 20 and "model.layers.0.mlp.down_proj" not in linear
    result = analyze(AnalysisJob(**{**vars(job), "metric": "mse", **recipe}))
    assert result is not None
    assert "1 linear(s) have no score, no step quantizes them: model.layers.0.mlp.down_proj" in result.notes
    assert max(linear.values()) < 0.2 * min(scores(job, metric="mse").values())  # int8 against fp4
    for metric in METRICS["layer"]:
        assert max(scores(job, scope="layer", metric=metric, **recipe).values()) < 0.2 * min(
            scores(job, scope="layer", metric=metric).values()
        )


def test_linears_that_a_recipe_leaves_in_float_are_named_and_those_not_asked_for_are_not(job: AnalysisJob) -> None:
    first = STATIC.replace('exclude: ["*.0.mlp.down_proj"]', "include: [model.layers.0.*]")
    for patterns, told in (
        (("*",), "14 linear(s) have no score, no step quantizes them: model.layers.1.self_attn.q_proj, "),
        (("*.1.mlp.up_proj", "*.0.*"), "1 linear(s) have no score, no step quantizes them: model.layers.1.mlp.up_proj"),
        (("*.0.*",), ""),
    ):
        result = analyze(AnalysisJob(**{**vars(job), "metric": "mse", "recipe_text": first, "patterns": patterns}))
        assert result is not None
        assert len(result.layer_scores) == 7
        notes = [note for note in result.notes if "have no score" in note]
        assert [note[: len(told)] for note in notes] == ([told] if told else [])


@pytest.mark.parametrize(
    ("scope", "metric"), [("linear", "mse"), ("layer", "mse_layer_wise"), ("layer", "kl_model_wise")]
)
def test_errors_do_not_reach_later_layers_whatever_a_recipe_says(scope: str, metric: str, job: AnalysisJob) -> None:
    plain = STATIC.replace('exclude: ["*.0.mlp.down_proj"]', 'exclude: ["model.layers.2.mlp.*"]')
    asking = plain.replace("qconfig:", "propagate_error: true\n      qconfig:")
    assert "propagate_error" in asking
    found = [
        analyze(AnalysisJob(**{**vars(job), "scope": scope, "metric": metric, "recipe_text": text}))
        for text in (plain, asking)
    ]
    assert found[0] is not None and found[1] is not None
    assert found[1].layer_scores == found[0].layer_scores
    told = "propagate_error is not followed: each module is measured on the float model's inputs"
    assert told in found[1].notes and told not in found[0].notes


def test_the_first_samples_and_tokens_can_be_taken_alone(job: AnalysisJob, model: Path) -> None:
    found = scores(job, max_samples=2, max_length=7)
    inputs = Oracle(model, [sample[:7] for sample in SAMPLES[:2]]).inputs()
    for name, x in inputs.items():
        assert found[name] == pytest.approx((((x - x.mean()) / x.std()) ** 4).mean() - 3, rel=1e-4, abs=1e-5)


def one_rank(rank: int, values: dict[str, Any]) -> None:
    run_rank(values, rank, dist.get_world_size())


@pytest.mark.parametrize("samples", [5, 1])
@pytest.mark.parametrize(("scope", "metric"), [*EVERY, ("linear", "recipe"), ("layer", "recipe")])
def test_scores_are_the_same_bits_on_1_2_and_3_ranks(
    scope: str, metric: str, samples: int, model: Path, tmp_path: Path, run_ranks: RankRunner
) -> None:
    recipe = STATIC if metric == "recipe" else None
    used = {"linear": "mse", "layer": "mse_layer_wise"}[scope] if recipe else metric
    dataset = str(write_samples(tmp_path / "data.jsonl", samples))
    found = []
    for ranks in (1, 2, 3):
        folder = tmp_path / f"on{ranks}"
        folder.mkdir()
        job = AnalysisJob(
            model, scope, used, recipe_text=recipe, dataset=dataset, threads=1, folder=str(folder), recipe_source="r"
        )
        run_ranks(ranks, one_rank, job.plain() | {"device_ids": list(range(ranks))})
        found.append(AnalysisResult.from_plain(json.loads((folder / "result.json").read_text())))
    assert found[0].layer_scores
    assert found[0].layer_scores == found[1].layer_scores == found[2].layer_scores
    assert found[0].notes == found[1].notes == found[2].notes


def test_started_ranks_give_the_scores_of_one_process(job: AnalysisJob) -> None:
    assert scores(job, device_ids=(0, 1)) == scores(job)


def test_an_input_that_is_not_finite_is_named_with_its_sample(tmp_path: Path, job: AnalysisJob) -> None:
    path = fixtures.t_dense(tmp_path / "bad", dtype=torch.float32)
    spoil(path, "model.embed_tokens.weight", torch.nan, row=SAMPLES[2][-1])
    for metric in ("kurtosis", "quantile"):
        with pytest.raises(InvalidModelError, match="q_proj: its input is not finite in calibration sample 2"):
            scores(job, model_path=path, metric=metric)
    with pytest.raises(InvalidModelError, match=r"model\.layers\.0: its float output is not finite .* sample 2"):
        scores(job, model_path=path, scope="layer", metric="mse_layer_wise")
    with pytest.raises(InvalidModelError, match="the head: its float output is not finite in calibration sample 2"):
        scores(job, model_path=path, scope="layer", metric="mse_model_wise")


def spoil(path: Path, name: str, value: float, row: int) -> None:
    from safetensors.torch import load_file, save_file

    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][row] = value
            save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"patterns": ("*.qq_proj",)}, UnsupportedError, r"'\*\.qq_proj': no linear of the decoder layers of llama"),
        (
            {"scope": "layer", "metric": "mse_layer_wise", "patterns": ("x", "y")},
            UnsupportedError,
            "'x', 'y': no linear of the decoder layers of llama is touched; compare the patterns",
        ),
        ({"dataset": "nowhere.jsonl"}, InvalidDatasetError, "'nowhere.jsonl' was not found"),
        ({"model_path": Path("nowhere")}, InvalidModelError, "nowhere"),
        (
            {"metric": "mse", "recipe_text": STATIC.replace("iter_smooth", "iter_smoth"), "recipe_source": "r.yaml"},
            SchemaValidateError,
            r"r\.yaml:4: .*'iter_smoth' is not a processor",
        ),
        (
            {
                "metric": "mse",
                "recipe_text": STATIC.replace("  process:", "  prior: [{process: [{type: iter_smooth}]}]\n  process:"),
                "recipe_source": "r.yaml",
            },
            UnsupportedError,
            r"r\.yaml: spec\.prior has 1 stage\(s\), and an analysis tries one stage out",
        ),
    ],
)
def test_mistakes_are_told_before_a_weight_is_read(
    changes: dict[str, Any], error: type[Exception], said: str, job: AnalysisJob
) -> None:
    with pytest.raises(error, match=said):
        open_analysis(AnalysisJob(**{**vars(job), **changes}))


def test_widths_that_a_scheme_does_not_divide_are_told_before_a_weight_is_read(job: AnalysisJob) -> None:
    recipe = STATIC.replace("{dtype: int8, scope: per_channel}", "{dtype: int4, scope: per_group}")
    recipe = recipe.replace("act: {dtype: int8, scope: per_tensor, method: minmax}", "act: {}")
    changes = {"scope": "layer", "metric": "mse_layer_wise", "recipe_text": recipe, "recipe_source": "r.yaml"}
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        open_analysis(AnalysisJob(**{**vars(job), **changes}))


def test_copies_that_do_not_fit_the_memory_are_told_before_a_weight_is_read(
    job: AnalysisJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"scope": "layer", "metric": "mse_model_wise"}
    tokens = sum(map(len, SAMPLES))
    needed = 3 * tokens * 64 * 4
    monkeypatch.setattr(analysis_service.devices, "free_memory_bytes", lambda: needed)
    open_analysis(AnalysisJob(**{**vars(job), **changes}))
    monkeypatch.setattr(analysis_service.devices, "free_memory_bytes", lambda: needed - 1)
    with pytest.raises(EnvError, match=f"keeps 3 copies of the hidden states of {tokens} tokens, .* --max_samples"):
        open_analysis(AnalysisJob(**{**vars(job), **changes}))
