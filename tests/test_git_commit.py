"""The commit in `--version` is the one that git itself names, however the checkout was made."""

import subprocess
from pathlib import Path

import pytest

from msmodelslim.git_commit import version_words


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "package").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "package" / "a.py").write_text("")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


@pytest.mark.parametrize("how", ["branch", "packed", "detached", "worktree"])
def test_the_commit_is_gits(how: str, checkout: Path, tmp_path: Path) -> None:
    folder = checkout
    if how == "packed":
        git(checkout, "pack-refs", "--all")
    elif how == "detached":
        git(checkout, "checkout", "-q", "--detach")
    elif how == "worktree":
        folder = tmp_path / "other"
        git(checkout, "worktree", "add", "-q", str(folder), "-b", "other")
    expected = git(folder, "rev-parse", "HEAD")[:7]
    assert version_words("1.2", folder / "package") == f"1.2 (git {expected})"


def test_without_a_checkout_the_version_stands_alone(tmp_path: Path) -> None:
    assert version_words("1.2", tmp_path / "package") == "1.2"
