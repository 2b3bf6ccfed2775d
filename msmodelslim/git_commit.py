"""Which commit this copy of the package is, where it runs from a git checkout; git itself is not needed."""

from pathlib import Path

_SHOWN = 7


def version_words(version: str, package: Path) -> str:
    """ "0.1.0 (git 1a2b3c4)"; the version alone where `package` lies in no checkout."""
    commit = _commit(package.parent / ".git")
    return f"{version} (git {commit[:_SHOWN]})" if commit else version


def _commit(git: Path) -> str:
    """The commit that is checked out, "" where there is none; format: gitrepository-layout(5)."""
    try:
        if git.is_file():  # of a worktree: "gitdir: path"
            git = (git.parent / git.read_text().partition(":")[2].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        name = head.removeprefix("ref: ")
        if (shared / name).exists():
            return (shared / name).read_text().strip()
        packed = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
    except OSError:
        return ""
