"""The declared requirements are all that the package imports, and every message of an error is whole."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from msmodelslim import errors

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "msmodelslim").rglob("*.py"))
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)} | {"ValueError", "TypeError"}
#: imported where it is there: the one accelerator whose support is a package of its own
OPTIONAL = {"torch_npu"}
#: distributions that are a part of a declared one, which asks for exactly the version it needs
PARTS = {"pydantic-core": "pydantic", "annotated-types": "pydantic"}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def normal(distribution: str) -> str:
    name = distribution.lower().replace("_", "-")
    return PARTS.get(name, name)


def test_everything_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {normal(re.split(r"[<>=\[;]", line)[0]) for line in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    foreign = set().union(*map(imported, MODULES)) - set(sys.stdlib_module_names) - {"msmodelslim"} - OPTIONAL
    assert {"torch", "yaml", "transformers"} < foreign
    undeclared = {name for name in foreign if not {normal(owner) for owner in owners.get(name, [])} & declared}
    assert not undeclared


def messages(path: Path) -> Iterator[tuple[int, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            yield node.lineno, node


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_error_has_a_raw_placeholder_or_an_empty_tail(path: Path) -> None:
    for line, call in messages(path):
        for argument in call.args:
            plain = [argument] if isinstance(argument, ast.Constant) else []
            inside = argument.values if isinstance(argument, ast.JoinedStr) else plain
            texts = [part.value for part in inside if isinstance(part, ast.Constant)]
            for text in texts:
                assert not re.search(r"\{\w*\}|%[sdr]", str(text)), f"{path.name}:{line}: {text!r} is not filled in"
            if inside and isinstance(inside[-1], ast.Constant):
                last = str(inside[-1].value)
                assert last.strip(), f"{path.name}:{line} ends in nothing"
                assert last[-1] not in ":;, ", f"{path.name}:{line}: {last!r} breaks off"
