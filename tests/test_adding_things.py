"""The files of docs/adding-things.md, as they stand there, quantize a model of the family that one of them adds."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import fixtures

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding-things.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))
COMMANDS = [
    line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a model, the files of the page and the result of its commands lie."""
    place = tmp_path_factory.mktemp("adding")
    config = fixtures.model_config("llama", torch.bfloat16)
    config |= {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.5}
    fixtures.write_checkpoint(place / "MODEL", config, fixtures.dense_tensors(config, 0, torch.bfloat16))
    for name, text in FILES.items():
        (place / name).write_text(text, encoding="utf-8")
    return place


def test_a_step_a_family_and_a_format_are_one_file_each(place: Path) -> None:
    """In a process of its own: what it registers is nobody else's business."""
    assert len(FILES) == 4
    assert [command.split()[:2] for command in COMMANDS] == [["msmodelslim", "quant"], ["msmodelslim", "verify"]]
    lines = [shlex.split(command)[1:] for command in COMMANDS]
    script = f"import sys; from msmodelslim.cli import main; sys.exit(any(main(line) for line in {lines}))"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "granite (family granite)" in done.stdout
    assert re.search(r"RESULT: plain int8\b.*no findings", done.stdout, re.DOTALL)
    source = {k: v for file in (place / "MODEL").glob("*.safetensors") for k, v in load_file(file).items()}
    found = load_file(place / "RESULT" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    weight_OI = source[f"{name}.weight"].double()
    limit_O1 = 2.5 * weight_OI.square().mean(dim=1, keepdim=True).sqrt()
    assert (weight_OI.abs() > limit_O1).any()  # the step had something to do
    limited_OI = torch.minimum(torch.maximum(weight_OI, -limit_O1), limit_O1)
    rebuilt_OI = found[f"{name}.weight"].double() * found[f"{name}.weight_scale"].double()
    assert ((rebuilt_OI - limited_OI).abs() <= 0.51 * found[f"{name}.weight_scale"] + 2**-8 * limit_O1).all()
    assert torch.equal(found["lm_head.weight"], source["lm_head.weight"])


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_the_files_of_the_page_keep_the_rules_of_the_package(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    for check in (["ruff", "check"], ["ruff", "format", "--check"]):
        words = [sys.executable, "-m", *check, "--config", str(ROOT / "pyproject.toml"), str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
