"""One run from recipe to files: the result loads and computes, the report tells, and failures leave nothing behind."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from msmodelslim.artifact import verify_directory
from msmodelslim.errors import InvalidDatasetError, InvalidModelError, ModelslimError, SecurityError, UnsupportedError
from msmodelslim.model.checkpoint import Checkpoint
from msmodelslim.quant_service import (
    QuantJob,
    _choose_runner_type,
    _memory_estimate_mib,
    open_session,
    quantize,
    rehearse,
)
from msmodelslim.report import plot_report
from msmodelslim.runner.dp_layer_wise_runner import DPLayerWiseRunner
from msmodelslim.runner.layer_wise_runner import LayerWiseRunner
from msmodelslim.runner.model_wise_runner import ModelWiseRunner
from tests import fixtures

W8 = "{dtype: int8, scope: per_channel, symmetric: true, method: minmax}"
STATIC = f"{{act: {{dtype: int8, scope: per_tensor, symmetric: true, method: minmax}}, weight: {W8}}}"
DYNAMIC = f"{{act: {{dtype: int8, scope: per_token, symmetric: true, method: minmax}}, weight: {W8}}}"


def recipe(qconfig: str = STATIC, saver: str = "compressed_tensors", more: str = "", options: str = "") -> str:
    return f"""\
apiversion: modelslim_v1
metadata: {{config_id: test}}
spec:
  process:
    - type: linear_quant
      qconfig: {qconfig}
{options}
  save: [{{type: {saver}}}]
{more}
"""


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    texts = ["The sun rises in the east.", "A cat sat on the mat, and then it ran.", "One more line of text to see."]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def job(t_dense: Path, tmp_path: Path, dataset: Path) -> Callable[..., QuantJob]:
    def make(text: str | None = None, **changes: Any) -> QuantJob:
        values: dict[str, Any] = {
            "model_path": t_dense,
            "save_path": tmp_path / "out",
            "recipe_text": text or recipe(),
            "recipe_source": "test.yaml",
            "dataset": str(dataset),
        }
        return QuantJob(**values | changes)

    return make


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "quant_report.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def source_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("qconfig", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_transformers_loads_the_result_and_stays_close_to_the_source(
    family: str, qconfig: str, tmp_path: Path, job: Callable[..., QuantJob]
) -> None:
    from transformers import AutoModelForCausalLM

    source = fixtures.t_dense(tmp_path / "source", family)
    quantize(job(recipe(qconfig), model_path=source))
    ids = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(ids).logits.float()
            for path in (source, tmp_path / "out")
        )
    assert (found - expected).norm() / expected.norm() < 0.1
    assert (found - expected).abs().max() > 0  # the codes were used at all


def test_everything_nobody_quantized_is_carried_over_byte_for_byte(
    t_mtp: Path, tmp_path: Path, job: Callable[..., QuantJob]
) -> None:
    quantize(job(recipe(DYNAMIC, options="      exclude: ['*.down_proj']"), model_path=t_mtp))
    source, result = source_tensors(t_mtp), source_tensors(tmp_path / "out")
    quantized = {name for name in source if f"{name.removesuffix('.weight')}.weight_scale" in result}
    assert len(quantized) == 2 * 6
    assert set(source) - set(result) == set()
    for name in set(source) - quantized:
        assert torch.equal(source[name].view(torch.uint8), result[name].view(torch.uint8)), name


def test_two_runs_and_both_runners_give_the_same_bytes(tmp_path: Path, job: Callable[..., QuantJob]) -> None:
    found = []
    for index, runner in enumerate(("layer_wise", "layer_wise", "model_wise")):
        out = tmp_path / f"out{index}"
        quantize(job(recipe(more=f"  runner: {runner}"), save_path=out))
        found.append(hashes(out))
    assert found[0] == found[1] == found[2]


def test_the_report_tells_schemes_errors_patterns_and_fingerprints(
    tmp_path: Path, job: Callable[..., QuantJob], capsys: pytest.CaptureFixture[str], dataset: Path
) -> None:
    quantize(job(recipe(options="      exclude: ['*.nothing', '*.1.*down_proj']")))
    report = json.loads((tmp_path / "out" / "quant_report.json").read_text())
    assert len(report["modules"]) == 13
    assert report["left_float"] == ["model.layers.1.mlp.down_proj"]
    assert {p["pattern"]: p["matches"] for p in report["patterns"]} == {"*": 14, "*.nothing": 0, "*.1.*down_proj": 1}
    assert report["schemes"] == {"weight int8 per_channel sym, act int8 per_tensor sym": 13}
    attention, mlp, width = 64 * 64 * 2 + 2 * 32 * 64, 3 * 64 * 128, 320 * 64
    parameters = 2 * (attention + mlp + 2 * 64) + 2 * width + 64
    assert report["model"]["parameters"] == parameters
    assert report["model"]["quantized_parameters"] == 2 * (attention + mlp) - 64 * 128
    assert report["recipe"]["sha256"] == hashlib.sha256(report["recipe"]["text"].encode()).hexdigest()
    assert report["data"]["samples"] == 3
    assert report["data"]["source"] == str(dataset)
    for entry in report["layers"]:
        assert entry["forwards"] == 1
        assert 0 < entry["weight_error"] < 0.01
        assert 0 < entry["output_error"] < 0.05
        assert {"load", "forward", "linear_quant"} <= set(entry["seconds"])
    assert report["versions"]["torch"] == torch.__version__
    shown = capsys.readouterr().out
    assert "exclude pattern '*.nothing' of linear_quant matched nothing it works on" in shown
    assert "1 linear(s) of the decoder layers stay in float: model.layers.1.mlp.down_proj" in shown


def test_the_report_tells_the_exponents_of_every_scaled_producer(tmp_path: Path, job: Callable[..., QuantJob]) -> None:
    smoothing = "    - {type: iter_smooth, alpha: 0.75, enable_subgraph_type: [norm-linear, up-down]}\n"
    quantize(job(recipe().replace("    - type: linear_quant", smoothing + "    - type: linear_quant")))
    report = json.loads((tmp_path / "out" / "quant_report.json").read_text())
    parts = {"mlp.up_proj": "up-down", "input_layernorm": "norm-linear", "post_attention_layernorm": "norm-linear"}
    assert report["smoothing"] == [
        {
            "module": f"model.layers.{layer}.{part}",
            "processor": "iter_smooth",
            "subgraph": kind,
            "act_exponent": 0.75,
            "weight_exponent": 0.25,
        }
        for layer in (0, 1)
        for part, kind in parts.items()
    ]


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ("enable_subgraph_type: [linear-linear]", "linear-linear"),  # this family's layers have none
        ("enable_subgraph_type: [ov, up-down], exclude: ['*.v_proj', '*.up_proj']", "ov, up-down"),
    ],
)
def test_a_smoothing_step_that_scales_nothing_is_told(
    options: str, kinds: str, job: Callable[..., QuantJob], capsys: pytest.CaptureFixture[str]
) -> None:
    smoothing = f"    - {{type: iter_smooth, {options}}}\n"
    quantize(job(recipe().replace("    - type: linear_quant", smoothing + "    - type: linear_quant")))
    told = f"note: iter_smooth scales nothing: no producer of this model's layers is selected ({kinds})"
    assert told in capsys.readouterr().out


def test_a_dry_run_reads_no_weight_and_writes_nothing(
    tmp_path: Path, job: Callable[..., QuantJob], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "tensor", refuse)
    monkeypatch.setattr(Checkpoint, "weight", refuse)
    rehearse(job())
    assert leftovers(tmp_path) == []
    shown = capsys.readouterr().out
    assert "14 × weight int8 per_channel sym, act int8 per_tensor sym" in shown
    assert "plan; nothing is written" in shown
    assert re.search(r"peak memory +│ about \d+ MiB", shown)
    assert "seconds" not in shown


def test_the_size_a_dry_run_promises_is_the_size_that_is_written(
    tmp_path: Path, job: Callable[..., QuantJob], capsys: pytest.CaptureFixture[str]
) -> None:
    quantize(job())
    report = json.loads((tmp_path / "out" / "quant_report.json").read_text())
    written = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.stem != "quant_report")
    assert report["output"]["bytes"] == written


def test_a_picture_of_the_errors_lies_beside_the_report(tmp_path: Path, job: Callable[..., QuantJob]) -> None:
    quantize(job())
    picture = (tmp_path / "out" / "quant_report.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    report = json.loads((tmp_path / "out" / "quant_report.json").read_text())
    assert plot_report(report) == picture
    report["modules"]["model.layers.1.mlp.up_proj"]["weight_error"] *= 2
    assert plot_report(report) != picture


def test_a_picture_that_cannot_be_drawn_is_left_out_with_a_warning(
    tmp_path: Path, job: Callable[..., QuantJob], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_place(report: object) -> bytes:
        raise OSError("no place for a cache")

    monkeypatch.setattr("msmodelslim.quant_service.plot_report", no_place)
    quantize(job())
    assert "quant_report.png is left out: no place for a cache" in caplog.text
    assert not (tmp_path / "out" / "quant_report.png").exists()
    assert verify_directory(tmp_path / "out", job().model_path) == []


def test_a_layer_that_is_forwarded_twice_needs_its_inputs_beside_its_outputs(job: Callable[..., QuantJob]) -> None:
    once = open_session(job())
    twice = open_session(job(recipe(options="      propagate_error: true")))
    states = once.facts.data["tokens"] * 64 * 2 / 2**20  # bfloat16, hidden size 64
    assert _memory_estimate_mib(twice) - _memory_estimate_mib(once) == pytest.approx(states)


def test_global_torch_state_is_as_before(job: Callable[..., QuantJob]) -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()

    before, random = state(), torch.get_rng_state()
    quantize(job(threads=2))
    with pytest.raises(ModelslimError):
        quantize(job(overwrite=False))  # the target is not empty now
    assert state() == before
    assert torch.equal(torch.get_rng_state(), random)


def broken_weight(source: Path, name: str, folder: Path) -> Path:
    """A copy of the checkpoint with one NaN in one tensor."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            names = list(handle.keys())
        if name in names:
            tensors = load_file(file)
            tensors[name][0, 0] = torch.nan
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_a_failure_in_a_late_layer_leaves_nothing_and_says_where(
    t_dense: Path, tmp_path: Path, job: Callable[..., QuantJob]
) -> None:
    source = broken_weight(t_dense, "model.layers.1.mlp.up_proj.weight", tmp_path / "source")
    before = hashes(source)
    with pytest.raises(InvalidModelError, match=r"model\.layers\.1\.mlp\.up_proj") as caught:
        quantize(job(model_path=source))
    assert any("model.layers.1, linear_quant" in note for note in caught.value.__notes__)
    assert leftovers(tmp_path) == ["source"]
    assert hashes(source) == before


def test_a_failed_run_keeps_the_result_it_was_to_replace(
    t_dense: Path, tmp_path: Path, job: Callable[..., QuantJob]
) -> None:
    quantize(job())
    before = hashes(tmp_path / "out")
    source = broken_weight(t_dense, "model.layers.1.mlp.up_proj.weight", tmp_path / "source")
    with pytest.raises(InvalidModelError):
        quantize(job(model_path=source, overwrite=True))
    assert hashes(tmp_path / "out") == before
    quantize(job(recipe(DYNAMIC), overwrite=True))
    assert hashes(tmp_path / "out") != before
    assert leftovers(tmp_path) == ["out", "source"]


def test_a_recipe_that_touches_nothing_is_refused(tmp_path: Path, job: Callable[..., QuantJob]) -> None:
    with pytest.raises(UnsupportedError, match=r"test\.yaml: no step touches any linear of .*include and exclude"):
        quantize(job(recipe(options="      include: ['*.no_such_linear']")))
    assert leftovers(tmp_path) == []


def test_missing_data_is_told_before_a_weight_is_read(
    tmp_path: Path, job: Callable[..., QuantJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "weight", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(InvalidDatasetError, match=r"nosuch\.jsonl"):
        quantize(job(dataset="nosuch.jsonl"))
    assert leftovers(tmp_path) == []


def test_a_data_free_recipe_never_opens_its_data_set(tmp_path: Path, job: Callable[..., QuantJob]) -> None:
    quantize(job(recipe(DYNAMIC), dataset="nosuch.jsonl"))
    report = json.loads((tmp_path / "out" / "quant_report.json").read_text())
    assert report["data"] == {}
    assert [entry["forwards"] for entry in report["layers"]] == [0, 0]


@pytest.mark.parametrize("save", ["same", "inside", "above"])
def test_a_target_that_would_endanger_the_source_is_refused(
    save: str, t_dense: Path, tmp_path: Path, job: Callable[..., QuantJob]
) -> None:
    source = tmp_path / "models" / "source"
    shutil.copytree(t_dense, source)
    before = hashes(source)
    target = {"same": source, "inside": source / "out", "above": source.parent}[save]
    with pytest.raises(SecurityError):
        quantize(job(model_path=source, save_path=target, overwrite=True))
    assert hashes(source) == before


def test_a_full_disk_is_told_at_the_start(
    tmp_path: Path, job: Callable[..., QuantJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelslimError, match=r"0\.0 GB are free and the result takes .*free some space"):
        quantize(job())
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("runner", "devices", "expected"),
    [
        ("model_wise", (0,), ModelWiseRunner),
        ("layer_wise", (0,), LayerWiseRunner),
        ("auto", (0,), LayerWiseRunner),
        ("model_wise", (0, 1), ModelWiseRunner),
        ("layer_wise", (0, 1), LayerWiseRunner),
        ("dp_layer_wise", (0,), DPLayerWiseRunner),
        ("dp_layer_wise", (0, 1), DPLayerWiseRunner),
        ("auto", (0, 1), DPLayerWiseRunner),
    ],
)
def test_the_runner_follows_the_published_table(runner: str, devices: tuple[int, ...], expected: type) -> None:
    assert _choose_runner_type(runner, devices) is expected


@pytest.mark.parametrize("runner", ["model_wise", "layer_wise"])
def test_a_runner_for_one_device_says_that_the_others_stay_idle(runner: str, caplog: pytest.LogCaptureFixture) -> None:
    _choose_runner_type(runner, (0, 1, 2))
    assert f"spec.runner is {runner}, which uses one device: 2 of the 3 given stay idle" in caplog.text
