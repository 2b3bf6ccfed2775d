import os
import subprocess
import sys
from pathlib import Path

import pytest

from msmodelslim.saver.output_directory import OutputDirectory


@pytest.fixture(scope="module")
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_result_appears_only_at_commit(tmp_path: Path) -> None:
    output = OutputDirectory(tmp_path / "new" / "result")
    output.open()
    (output.partial / "folder").mkdir()
    (output.partial / "folder" / "file").write_text("x")
    assert not output.target.exists()
    assert output.partial.name == f".result.partial-{os.getpid()}"
    output.commit()
    assert (output.target / "folder" / "file").read_text() == "x"
    assert [path.name for path in output.target.parent.iterdir()] == ["result"]


def test_an_earlier_result_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "model-00007-of-00007.safetensors").write_text("stale")
    output = OutputDirectory(tmp_path / "result")
    output.open()
    (output.partial / "file").write_text("new")
    assert (output.target / "model-00007-of-00007.safetensors").exists()
    output.commit()
    assert [path.name for path in (tmp_path / "result").iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_a_failed_run_leaves_nothing_and_discarding_twice_is_fine(tmp_path: Path) -> None:
    output = OutputDirectory(tmp_path / "result")
    output.discard()
    output.open()
    (output.partial / "file").write_text("half")
    output.discard()
    output.discard()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_dead_processes_go_and_those_of_the_living_stay(tmp_path: Path, dead_pid: int) -> None:
    for name in (f".result.partial-{dead_pid}", f".other.partial-{dead_pid}", f".result.partial-{os.getppid()}"):
        (tmp_path / name).mkdir()
    OutputDirectory(tmp_path / "result").open()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        f".other.partial-{dead_pid}",
        f".result.partial-{os.getppid()}",
        f".result.partial-{os.getpid()}",
    }


def test_a_result_that_a_crash_left_aside_is_put_back(tmp_path: Path, dead_pid: int) -> None:
    aside = tmp_path / f".result.old-{dead_pid}"
    aside.mkdir()
    (aside / "file").write_text("whole")
    output = OutputDirectory(tmp_path / "result")
    output.open()
    assert (tmp_path / "result" / "file").read_text() == "whole"
    assert not aside.exists()


def test_a_link_at_the_target_keeps_pointing_to_the_replaced_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    output = OutputDirectory(tmp_path / "link")
    output.open()
    (output.partial / "file").write_text("x")
    output.commit()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "x"
