"""Targets that would endanger the source, or that cannot be written, are refused before anything is read."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from msmodelslim.errors import EnvError, InvalidModelError, ModelslimError, SecurityError
from msmodelslim.paths import refuse_unsafe_file, refuse_unsafe_paths


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "source"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def refusal(model: Path, save: Path, *, overwrite: bool = False) -> ModelslimError:
    before = sorted(path for path in model.parent.rglob("*"))
    with pytest.raises(ModelslimError) as caught:
        refuse_unsafe_paths(model, save, overwrite)
    assert sorted(path for path in model.parent.rglob("*")) == before
    return caught.value


def link(tmp_path: Path, to: Path) -> Path:
    path = tmp_path / "link"
    path.symlink_to(to)
    return path


@pytest.mark.parametrize(
    ("spell", "relation"),
    [
        (lambda model, tmp: model, "is the same directory as"),
        (lambda model, tmp: Path(f"{model}/"), "is the same directory as"),
        (lambda model, tmp: model / ".." / model.name, "is the same directory as"),
        (lambda model, tmp: link(tmp, model), "is the same directory as"),
        (lambda model, tmp: model / "quantized", "lies inside"),
        (lambda model, tmp: model / "a" / "b", "lies inside"),
        (lambda model, tmp: link(tmp, model) / "quantized", "lies inside"),
        (lambda model, tmp: model.parent, "lies above"),
        (lambda model, tmp: link(tmp, model.parent), "lies above"),
        (lambda model, tmp: Path("/"), "lies above"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_at_inside_or_above_the_source_is_refused(
    model: Path, tmp_path: Path, spell: object, relation: str, overwrite: bool
) -> None:
    save = spell(model, tmp_path)  # type: ignore[operator]
    error = refusal(model, save, overwrite=overwrite)
    assert isinstance(error, SecurityError)
    assert str(error) == (
        f"--save_path {save} {relation} --model_path {model}; choose a directory that neither holds the model nor lies "
        "inside it, so that the source stays as it is"
    )


def test_a_source_that_is_a_link_is_protected_too(model: Path, tmp_path: Path) -> None:
    assert "is the same directory as" in str(refusal(link(tmp_path, model), model))


def test_relative_paths_are_compared_by_where_they_lead(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    assert "is the same directory as" in str(refusal(model, Path()))


def test_a_neighbour_whose_name_begins_alike_is_fine(model: Path) -> None:
    refuse_unsafe_paths(model, model.with_name("source-w8a8"), False)


def test_missing_parents_are_fine_and_are_not_made_yet(model: Path, tmp_path: Path) -> None:
    refuse_unsafe_paths(model, tmp_path / "a" / "b" / "c", False)
    assert not (tmp_path / "a").exists()


def test_an_empty_target_is_fine(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refuse_unsafe_paths(model, tmp_path / "out", False)


def test_the_probe_leaves_nothing(model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    refuse_unsafe_paths(model, tmp_path / "out", False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_source_that_is_not_there_is_told(tmp_path: Path) -> None:
    error = refusal(tmp_path / "nothing", tmp_path / "out")
    assert isinstance(error, InvalidModelError)
    assert "nothing does not exist; give the directory of a checkpoint on this machine; nothing is downloaded" in str(
        error
    )


def test_a_source_that_is_a_file_is_told(model: Path, tmp_path: Path) -> None:
    assert "config.json is a file; give the directory of a checkpoint" in str(
        refusal(model / "config.json", tmp_path / "out")
    )


def test_a_target_that_is_a_file_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    error = refusal(model, tmp_path / "out")
    assert isinstance(error, SecurityError)
    assert str(error).endswith("out is a file; give a directory, one that does not exist yet is fine")


def test_a_target_below_a_file_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(model, tmp_path / "file" / "out")
    assert isinstance(error, EnvError)
    assert str(error).endswith("file takes no files (Not a directory); choose a writable place")


def test_a_target_with_files_needs_overwrite(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("quant_report.json", "config.json", "b", "c"):
        (out / name).write_text("")
    assert str(refusal(model, out)) == (
        f"--save_path {out} is not empty; it holds b, c, config.json, ...; choose a new directory, or give "
        "--overwrite to replace an earlier result"
    )
    refuse_unsafe_paths(model, out, True)


def test_overwrite_replaces_results_of_runs_only(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    error = refusal(model, tmp_path / "home", overwrite=True)
    assert isinstance(error, SecurityError)
    assert "holds thesis.tex, which no run wrote, and --overwrite replaces earlier results only" in str(error)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no files from anyone")
def test_a_place_that_takes_no_files_is_told_at_once(model: Path) -> None:
    error = refusal(model, Path("/proc/out"))
    assert isinstance(error, EnvError)
    assert str(error).startswith("--save_path /proc/out cannot be made: /proc takes no files (")
    assert str(error).endswith("); choose a writable place")


@pytest.mark.parametrize("below", ["out", "a/b/out"])
def test_a_read_only_parent_is_told_to_who_may_not_write(model: Path, tmp_path: Path, below: str) -> None:
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o555)
    script = (
        "import os, sys; from pathlib import Path\n"
        "from msmodelslim.errors import EnvError; from msmodelslim.paths import refuse_unsafe_paths\n"
        "os.getuid() or os.setuid(65534)\n"  # for root every directory is writable
        "try: refuse_unsafe_paths(Path(sys.argv[1]), Path(sys.argv[2]), False)\n"
        "except EnvError as error: print(error)\n"
    )
    for path in (tmp_path, *tmp_path.parents):
        if os.getuid() == 0 and path.stat().st_mode & 0o777 == 0o700:  # made by pytest, one more with xdist
            path.chmod(0o755)
    said = subprocess.run(
        [sys.executable, "-c", script, str(model), str(parent / below)], capture_output=True, text=True, check=True
    ).stdout
    assert f"{parent} takes no files (Permission denied); choose a writable place" in said


@pytest.mark.parametrize(
    "spell", [lambda model, tmp: model / "a.yaml", lambda model, tmp: link(tmp, model) / "b" / "a.yaml"]
)
def test_a_file_inside_the_model_is_refused(model: Path, tmp_path: Path, spell: Callable[[Path, Path], Path]) -> None:
    with pytest.raises(
        SecurityError, match=r"--save_path .*a\.yaml lies inside --model_path .*; choose a place outside"
    ):
        refuse_unsafe_file(model, spell(model, tmp_path))


def test_a_file_in_the_place_of_a_directory_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").mkdir()
    with pytest.raises(EnvError, match=r"--save_path .*a\.yaml is a directory; choose another name"):
        refuse_unsafe_file(model, tmp_path / "a.yaml")


def test_a_file_where_none_can_be_made_is_refused(model: Path) -> None:
    with pytest.raises(EnvError, match="cannot be made: /proc takes no files"):
        refuse_unsafe_file(model, Path("/proc/new/a.yaml"))


def test_checking_a_file_makes_nothing(model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    refuse_unsafe_file(model, tmp_path / "new" / "a.yaml")
    refuse_unsafe_file(model, model.parent / "a.yaml")
    assert sorted(tmp_path.rglob("*")) == before
