"""Who may import whom: the table of layers, and the words that no file may be named."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "msmodelslim"

#: layer → the layers it may import besides itself; "a.b" allows that one module of a layer
ALLOWED = {
    "errors": set(),
    "git_commit": set(),
    "device": {"errors"},
    "registry": {"errors"},
    "paths": {"errors"},
    "plugins": {"errors"},
    "ir": {"errors", "device"},
    "distributed": {"errors", "device"},
    "observer": {"ir", "distributed"},
    "calibration": {"registry", "errors"},
    "yaml_lines": {"errors"},
    "schema_words": {"registry", "yaml_lines"},
    "recipe": {"registry", "errors", "yaml_lines", "schema_words"},
    "practice": {"recipe", "errors", "registry"},
    "recipe_docs": {"recipe", "registry"},
    "model": {"errors", "registry", "device", "distributed"},
    "weight": {"ir", "registry", "errors"},
    "processor": {"observer", "weight", "ir", "distributed", "registry", "errors", "model.base", "model.structure"},
    "saver": {"ir", "distributed", "registry", "errors", "processor.base", "model.base", "model.checkpoint"},
    "runner": {"processor.base", "model.base", "calibration", "distributed", "device", "errors", "ir.quant_linear"},
    "error_plot": set(),
    "whole_file": {"errors"},
    "analysis": {
        *("processor.base", "processor.patterns", "observer", "ir", "distributed", "model.head", "errors"),
        *("error_plot", "whole_file", "paths"),
    },
    "analysis_service": {
        *("analysis", "quant_service", "recipe", "runner", "calibration", "registry", "distributed", "errors"),
        *("device", "processor.base", "processor.patterns", "model.families", "ir", "plugins"),
    },
    "cli_options": {"errors", "practice"},
    "cli_analyze": {
        *("cli_options", "analysis", "analysis_service", "practice", "device", "model.families", "plugins"),
        "calibration",
    },
    "report": {"processor.base", "errors", "error_plot"},
    "artifact": {"saver", "ir", "model", "registry", "errors", "report"},
    "perplexity": {"saver", "ir", "model", "calibration", "device", "registry", "errors", "artifact"},
    "quant_service": {
        *("recipe", "runner", "calibration", "registry", "distributed", "errors", "paths", "report", "artifact"),
        *("device", "processor.base", "saver.base", "model.base", "model.families", "ir", "plugins"),
    },
    "cli": {
        "quant_service",
        "errors",
        "git_commit",
        "practice",
        "paths",
        "device",
        "artifact",
        "perplexity",
        "cli_options",
        "cli_analyze",
        "model.families",
        "plugins",
        "check_dp",
        "recipe",
        "distributed.outer_launcher",
    },
    "tiny_model": set(),
    "check_dp": {
        *("quant_service", "distributed", "runner.base", "processor.base", "model.families", "errors", "plugins"),
        *("report", "tiny_model"),
    },
    "testing": {"check_dp", "recipe"},
}
FORBIDDEN_NAMES = {"core", "utils", "common", "helpers", "helper", "manager", "misc"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__")


def layer_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_names(path: Path) -> set[str]:
    """Every `msmodelslim.x.y` a file imports, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msmodelslim"):
            base = (node.module or "").removeprefix("msmodelslim").lstrip(".")
            found |= {base} if base else {alias.name for alias in node.names if not alias.name.startswith("_")}
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("msmodelslim.") for a in node.names if a.name.startswith("msmodelslim.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__main__":
        return
    allowed = ALLOWED[layer] | {layer}
    wrong = {
        name
        for name in imported_names(path)
        if name.split(".")[0] not in allowed and not any(name == a or name.startswith(a + ".") for a in allowed)
    }
    assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}; {layer} may import {sorted(allowed)}"


def test_no_file_is_a_drawer() -> None:
    assert not [path for path in PACKAGE.rglob("*") if path.stem in FORBIDDEN_NAMES]


def test_only_device_py_names_the_accelerators() -> None:
    words = ("torch.npu", "torch.cuda", "torch_npu", '"hccl"', '"nccl"')
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if path.name != "device.py" and any(word in path.read_text() for word in words)
    ]
    assert not wrong
