"""The examples of docs/data-parallel.md: they pass check-dp, give one rank's bytes, and are what the page quotes."""

import hashlib
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from msmodelslim.cli import main
from msmodelslim.plugins import absolute, load_plugins
from msmodelslim.quant_service import QuantJob, quantize, run_rank
from msmodelslim.tiny_model import write_samples, write_tiny_model
from tests.registry_copy import own_registry
from tests.run_ranks import RankRunner

ROOT = Path(__file__).parents[1]
FORMS = ("form_a_head_balance", "form_b_median_smooth", "store_rms_smooth")
PAGE = (ROOT / "docs" / "data-parallel.md").read_text(encoding="utf-8")
UNROUNDED = """
apiversion: modelslim_v1
spec:
  process:
    - type: {step}
    - type: linear_quant
      include: ["*layers.1.mlp.down_proj"]
      qconfig: {{weight: {{dtype: int8, scope: per_channel}}}}
  save:
    - type: compressed_tensors
"""


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> Iterator[None]:
    with own_registry():
        load_plugins([plugin(form) for form in FORMS])
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def plugin(form: str) -> str:
    return str(ROOT / "examples" / f"{form}.py")


def job_of(form: str, model: Path, folder: Path, samples: int) -> QuantJob:
    text = (ROOT / "examples" / f"{form}.yaml").read_text(encoding="utf-8")
    dataset = write_samples(folder / f"samples{samples}.jsonl", samples)
    plugins = absolute([plugin(form)])
    return QuantJob(model, folder / "out", text, form, dataset=str(dataset), threads=1, plugins=plugins)


def rank_job(rank: int, values: dict) -> None:
    run_rank(values, rank, dist.get_world_size())


def hashes(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.iterdir() if path.name != "quant_report.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("samples", [1, 7])
@pytest.mark.parametrize("form", FORMS)
def test_an_example_gives_one_devices_bytes_on_1_to_4_ranks(
    form: str, samples: int, model: Path, tmp_path: Path, run_ranks: RankRunner
) -> None:
    job = job_of(form, model, tmp_path, samples)
    quantize(job)
    expected = hashes(job.save_path)
    for ranks in (1, 2, 3, 4):
        out = tmp_path / f"on{ranks}"
        values = replace(job, save_path=out, device_ids=tuple(range(ranks)), leader=os.getpid()).plain()
        run_ranks(ranks, rank_job, values, timeout_s=240)
        assert hashes(out) == expected, f"{ranks} ranks"


@pytest.mark.parametrize("form", FORMS)
def test_an_example_passes_check_dp(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "examples" / f"{form}.yaml")
    assert main(["check-dp", recipe, "--plugin", plugin(form), "--ranks", "2", "3", "--samples", "7", "1"]) == 0
    assert "fails" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "step", "producers"),
    [
        (FORMS[0], "head_balance", "v_proj"),
        (FORMS[1], "median_smooth", "layernorm"),
        (FORMS[2], "rms_smooth", "layernorm"),
    ],
)
def test_an_example_scales_by_powers_of_two_that_cancel(
    form: str, step: str, producers: str, model: Path, tmp_path: Path
) -> None:
    quantize(replace(job_of(form, model, tmp_path, 3), recipe_text=UNROUNDED.format(step=step)))
    before = load_file(model / "model.safetensors")
    after = {name: one for file in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    exponents = {
        name: (after[name].double() / before[name].double()).log2()
        for name in before
        if name in after and before[name].is_floating_point() and not torch.equal(before[name], after[name])
    }
    assert all(torch.equal(one, one.round()) for one in exponents.values())
    assert len([name for name in exponents if producers in name]) == (2 if producers == "v_proj" else 4)
    if producers == "v_proj":
        rows_KD, columns_HD = (exponents[f"model.layers.0.self_attn.{p}.weight"] for p in ("v_proj", "o_proj"))
        per_head_K, per_head_H = rows_KD[::32, 0], columns_HD[0, ::32]  # heads are 32 wide
        assert torch.equal(per_head_K.repeat_interleave(2), -per_head_H)  # two query heads a key-value head
    else:
        norm_C = exponents["model.layers.0.post_attention_layernorm.weight"]
        assert torch.equal(exponents["model.layers.0.mlp.up_proj.weight"][0], -norm_C)


def test_the_code_of_the_page_is_code_of_the_examples() -> None:
    sources = "\n".join((ROOT / "examples" / f"{form}.py").read_text(encoding="utf-8") for form in FORMS)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    lines = [line.strip() for line in sources.splitlines() if line.strip()]
    for block in blocks:
        for part in textwrap.dedent(block).split("...\n"):
            wanted = [line.strip() for line in part.splitlines() if line.strip()]
            assert any(lines[at : at + len(wanted)] == wanted for at in range(len(lines))), part


def test_the_commands_of_the_page_are_commands() -> None:
    from msmodelslim.cli import build_parser

    _, commands = build_parser()
    for line in re.findall(r"^(?:\s*torchrun .*)?msmodelslim (.+)$", PAGE.replace("\\\n", " "), flags=re.MULTILINE):
        name, *words = line.split()
        known = {option for action in commands[name]._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= known, line
