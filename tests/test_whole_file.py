"""A file appears whole or not at all."""

import os
from pathlib import Path

import pytest

from msmodelslim.errors import EnvError
from msmodelslim.whole_file import write_whole


def test_directories_are_made_and_an_earlier_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.yaml"
    for content in (b"one", b"two"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_link_keeps_pointing_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"one")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", b"two")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"two"


def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    write_whole(path, b"one")

    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvError, match=r"a\.yaml cannot be written: No space left on device; free some space"):
        write_whole(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
