"""`msmodelslim analyze`: words to a job, older spellings, what does not fit together, and one run on two ranks."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from msmodelslim import analysis_service
from msmodelslim.analysis.result import AnalysisResult, LayerScore
from msmodelslim.analysis_service import AnalysisJob
from msmodelslim.cli import main

RECIPE = """
apiversion: modelslim_v1
metadata: {config_id: mine}
spec:
  process: [{type: linear_quant, qconfig: {weight: {dtype: int8, scope: per_channel}}}]
  save: [{type: ascendv1_saver}]
"""
EMPTY = AnalysisResult(
    (LayerScore("model.layers.0.a", 1.0),), "kurtosis", ("*",), "linear", "llama", "", ("model.layers.0",), 1, 2
)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AnalysisJob]]:
    """The jobs that commands would run."""
    found: list[AnalysisJob] = []

    def stand_in(job: AnalysisJob) -> AnalysisResult:
        found.append(job)
        return replace(EMPTY, scope=job.scope, method=job.metric)

    monkeypatch.setattr(analysis_service, "analyze", stand_in)
    yield found


def usage(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["analyze", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: msmodelslim analyze [linear|layer] --model_path DIR [options]")
    return err.partition("error: ")[2].rstrip("\n")


def test_the_defaults_are_kurtosis_of_all_linears(jobs: list[AnalysisJob], t_dense: Path) -> None:
    assert main(["analyze", "--model_path", str(t_dense), "--device", "cpu"]) == 0
    assert jobs == [AnalysisJob(t_dense, "linear", "kurtosis")]


def test_the_defaults_of_layer_are_mse_layer_wise_of_all_linears_in_them(
    jobs: list[AnalysisJob], t_dense: Path
) -> None:
    assert main(["analyze", "layer", "--model_path", str(t_dense), "--device", "cpu"]) == 0
    assert jobs == [AnalysisJob(t_dense, "layer", "mse_layer_wise")]


@pytest.mark.parametrize(
    "words",
    [
        "--pattern *.q_proj *.k_proj --topk 3 --calib_dataset DATA --calib-dataset DATA",
        "--patterns *.q_proj *.k_proj --top_k 3 --calibration_dataset DATA",
        "--pattern *.q_proj *.k_proj --top-k 3 --dataset DATA",
    ],
)
def test_a_job_holds_what_the_words_said_in_old_and_new_spelling(
    words: str, jobs: list[AnalysisJob], t_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a"}\n')
    line = f"linear --model_path {t_dense} --metrics std --model_type Llama-tiny --device cpu --device_id 0 --threads 3"
    line += " --max_samples 5 --max_length 9 --trust_remote_code False " + words.replace("DATA", str(data))
    assert main(["analyze", *line.split()]) == 0
    assert jobs == [
        AnalysisJob(
            t_dense,
            "linear",
            "std",
            patterns=("*.q_proj", "*.k_proj"),
            model_type="Llama-tiny",
            dataset=str(data),
            max_samples=5,
            max_length=9,
            threads=3,
        )
    ]
    assert "- 'model.layers.0.a'" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["linear --metrics mse", "layer", "layer --metrics kl_model_wise"])
@pytest.mark.parametrize("recipe", ["mine", "practice"])
def test_metrics_that_quantize_take_a_recipe(
    words: str, recipe: str, jobs: list[AnalysisJob], t_dense: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    how = f"--config_path {tmp_path / 'mine.yaml'}" if recipe == "mine" else "--quant_type w8a16 --yes --tag vLLM"
    assert main(["analyze", *f"{words} --model_path {t_dense} --device cpu {how}".split()]) == 0
    (job,) = jobs
    text = Path(job.recipe_source).read_text()
    assert job.recipe_text == text
    assert yaml.safe_load(text)["metadata"]["config_id"] == ("mine" if recipe == "mine" else "w8a16")


ATTENTION = "attention is not analysed by this version; `analyze linear` ranks the linears around it"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("attn --model_path x", ATTENTION),
        ("attn", ATTENTION),
        ("--model_path x --metrics attention_mse --pattern a", "--metrics attention_mse is the old spelling"),
        (
            "linear --metrics=attention_mse",
            f"--metrics attention_mse is the old spelling of `analyze attn --metrics mse`; {ATTENTION}",
        ),
        ("liner --model_path x", "'liner' is no scope; write linear"),
        ("heads --model_path x", "'heads' is no scope; there are linear, layer"),
        ("--model_path x --metrics kurtosys", "--metrics 'kurtosys' is no metric of `analyze linear`; write kurtosis"),
        (
            "--model_path x --metrics mse_layer_wise",
            "--metrics 'mse_layer_wise' is no metric of `analyze linear`; it is of `analyze layer`; here there are "
            "kurtosis, std, quantile, mse",
        ),
        ("layer --model_path x --metrics std", "--metrics 'std' is no metric of `analyze layer`; it is of `analyze l"),
        ("layer --model_path x --pattern a", "--pattern is for `analyze linear`; which linears of a block are"),
        ("--model_path x --quant_modules a", "--quant_modules is for `analyze layer`; which linears are ranked"),
        ("--model_path x --quant_type w8a8", "--quant_type is for metrics that quantize (mse); kurtosis looks at"),
        ("--model_path x --metrics std --config r", "--config_path is for metrics that quantize (mse); std looks at"),
        ("layer --model_path x --quant_modules a --quant_type w8a8", "--quant_modules is for the built-in scheme"),
        ("layer --model_path x --tag vLLM", "--tag and --yes choose among practices, so give --quant_type with them"),
        ("--topk 5", "the following arguments are required: --model_path"),
        ("--model_path x --topk 0", "argument --topk/--top_k: '0' is not a whole number from 1 on"),
        ("--model_path x --patern a", "--patern is no option; write --pattern"),
    ],
)
def test_usage_errors_exit_2_and_say_what_fits(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(capsys, *words.split()).startswith(said)


def test_help_tells_metrics_what_they_ignore_and_what_they_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--help"]) == 0
    shown = capsys.readouterr().out
    assert main(["analyze", "layer", "--help"]) == 0
    assert capsys.readouterr().out == shown
    for words in ("kurtosis", "mse_model_wise", "ignore the weights", "L/2 forwards of the whole\nmodel a sample"):
        assert words in shown


def test_mistakes_are_told_together_before_any_work(
    jobs: list[AnalysisJob], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"--model_path {tmp_path}/none --device gpu --calib_dataset none.jsonl"
    assert main(["analyze", *line.split()]) == 1
    told = capsys.readouterr().err
    for words in (
        "several things are wrong",
        "'gpu' is not a device",
        f"{tmp_path}/none",
        "'none.jsonl' was not found",
    ):
        assert words in told
    assert jobs == []


@pytest.mark.parametrize("place", ["inside.yaml", "."])
def test_the_model_directory_takes_no_result(
    place: str, jobs: list[AnalysisJob], t_dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(t_dense.iterdir())
    assert main(["analyze", "--model_path", str(t_dense), "--device", "cpu", "--save_path", str(t_dense / place)]) == 1
    assert "lies inside --model_path" in capsys.readouterr().err
    assert jobs == []
    assert sorted(t_dense.iterdir()) == before


def test_two_ranks_print_and_write_what_one_does(t_dense: Path, tmp_path: Path) -> None:
    found = []
    for ids in ("0", "0 1"):
        out = tmp_path / f"on{len(ids)}"
        line = f"analyze layer --model_path {t_dense} --device cpu --device_id {ids} --threads 1 --max_samples 3"
        line += f" --max_length 16 --topk 1 --save_path {out} --log_level error"
        done = subprocess.run([sys.executable, "-m", "msmodelslim", *line.split()], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        file = out / "llama-mse_layer_wise.yaml"
        assert f"written: {file}\n" in done.stdout
        picture = file.with_suffix(".png").read_bytes()
        found.append(([line for line in file.read_text().splitlines() if line.startswith("-")], picture))
    assert found[0] == found[1]
    assert len(found[0][0]) == 1


@pytest.mark.parametrize("ids", ["0", "0 1"])
def test_how_much_memory_the_copies_take_is_told_once(ids: str, t_dense: Path) -> None:
    line = f"analyze layer --model_path {t_dense} --device cpu --device_id {ids} --threads 1 --max_samples 2"
    line += " --max_length 8 --metrics mse_model_wise --log_level info"
    done = subprocess.run([sys.executable, "-m", "msmodelslim", *line.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("mse_model_wise keeps 2 copies of all hidden states, about 0.0 GB") == 1
