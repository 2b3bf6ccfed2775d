"""What the README says exists, and its commands run in the order they are written."""

import ast
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from msmodelslim.cli import build_parser, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.findall(r"^```\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_the_commands_of_the_readme_run_in_order(tmp_path, monkeypatch, t_dense, capsys):
    commands = [line for block in BLOCKS for line in block.splitlines() if line.startswith("msmodelslim ")]
    assert len(commands) >= 7
    shutil.copytree(t_dense, tmp_path / "MODEL")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "my.jsonl").write_text('{"text": "The sun rises in the east."}\n', encoding="utf-8")
    (tmp_path / "my.txt").write_text("The sun rises in the east. " * 200, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, f"{command}\n{capsys.readouterr().err}"
    assert (tmp_path / "RESULT" / "quant_report.json").is_file()
    assert (tmp_path / "OTHER" / "quant_report.json").is_file()


def test_every_command_of_the_pages_is_one():
    """README's and docs/adding-things.md's are run as well; here no page may name what the command line lacks."""
    found = []
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            if language in ("", "bash", "sh"):
                found += [(page.name, line) for line in block.splitlines() if line.startswith("msmodelslim ")]
    assert len(found) > 8
    _, commands = build_parser()
    for page, line in found:
        words = [word for word in shlex.split(line, comments=True) if word != "..."][1:]
        options = {option for action in commands[words[0]]._actions for option in action.option_strings}
        for word in words[1:]:
            assert not word.startswith("-") or word.partition("=")[0] in options, f"{page}: {line}: {word}"


def test_every_file_of_the_layout_exists():
    (layout,) = [block for block in BLOCKS if block.startswith("msmodelslim/\n")]
    inside = re.findall(r"^[├└]── (\S+)", layout, flags=re.MULTILINE)
    outside = re.findall(r"^(\w+/)", layout, flags=re.MULTILINE)
    assert len(inside) > 8
    for path in [*(f"msmodelslim/{name}" for name in inside), *outside]:
        assert (ROOT / path).exists(), path


def test_every_file_named_in_running_text_exists():
    for page in PAGES:
        named = re.findall(
            r"`((?:docs|examples|msmodelslim|tests|benchmarks)/[\w./-]+)`", page.read_text(encoding="utf-8")
        )
        for path in named:
            assert (ROOT / path).exists() or path.endswith("test_"), f"{page.name}: {path}"


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test " in README
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_least_python_is_the_same_everywhere():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11"
    assert "Python 3.11 or newer" in README
    assert "sys.version_info < (3, 11)" in (ROOT / "Makefile").read_text()


def test_an_older_interpreter_is_told_which_one_is_needed(monkeypatch):
    path = ROOT / "msmodelslim" / "__init__.py"
    ast.parse(path.read_text(), feature_version=(3, 7))
    monkeypatch.setattr("sys.version_info", (3, 10, 2))
    monkeypatch.setattr("sys.version", "3.10.2 (main)")
    with pytest.raises(SystemExit, match=r"^msmodelslim needs Python 3\.11 or newer; this is 3\.10\.2$"):
        runpy.run_path(str(path))


@pytest.mark.parametrize(
    ("fails_on", "message"),
    [("version_info", "msmodelslim needs Python 3.11 or newer"), ("ensurepip", "apt-get install python3-venv")],
)
def test_make_says_what_an_unfit_interpreter_lacks(tmp_path, fails_on, message):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\ncase "$*" in *{fails_on}*) exit 1;; *) echo Python 3.9.1;; esac\n')
    interpreter.chmod(0o755)
    command = ["make", "-C", str(ROOT), f"PYTHON={interpreter}", f"VENV={tmp_path / 'venv'}", "install"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()
