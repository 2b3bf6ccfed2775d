"""Processors that are not part of the package, from a file or a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from msmodelslim.cli import main
from msmodelslim.errors import UnsupportedError
from msmodelslim.plugins import absolute, load_plugins
from msmodelslim.registry import lookup
from tests.registry_copy import own_registry

SOURCE = """
from msmodelslim.processor.base import BaseSessionProcessor
from msmodelslim.registry import register

@register("{name}")
class Other(BaseSessionProcessor):
    "Does nothing."
"""


@pytest.fixture(scope="module", autouse=True)
def _own_registry() -> Iterator[None]:
    with own_registry():
        yield


def test_a_file_adds_its_processor_and_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "added.py").write_text(SOURCE.format(name="added_by_file"))
    load_plugins([str(tmp_path / "added.py")])
    first = lookup("processor", "added_by_file")
    load_plugins([str(tmp_path / "added.py")])
    assert lookup("processor", "added_by_file") is first


def test_a_module_of_the_python_path_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_plugin_module.py").write_text(SOURCE.format(name="added_by_module"))
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins(["a_plugin_module"])
    assert lookup("processor", "added_by_module").registered_name == "added_by_module"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("no_such_module", "plugin 'no_such_module' cannot be imported: ModuleNotFoundError: No module named"),
        ("no_such_file.py", "no_such_file.py does not exist; give the name of a module that Python finds, or the path"),
    ],
)
def test_a_plugin_that_is_not_there_is_named(word: str, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        load_plugins([word])
    assert said in str(caught.value)


def test_a_plugin_that_is_no_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"broken\.py' cannot be imported: SyntaxError"):
            load_plugins([str(tmp_path / "broken.py")])


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text("")
    load_plugins([str(tmp_path / "one" / "same.py")])
    with pytest.raises(UnsupportedError, match=r"one/same\.py has the same name; rename one of the files"):
        load_plugins([str(tmp_path / "two" / "same.py")])


def test_files_are_named_with_their_whole_path_for_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute(["one.py", "two"]) == (str(tmp_path / "one.py"), "two")


def test_quant_says_that_a_plugin_is_not_there(t_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = ["--model_path", str(t_dense), "--save_path", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["quant", *paths, "--plugin", "nowhere.py"]) == 1
    assert "nowhere.py does not exist" in capsys.readouterr().err
