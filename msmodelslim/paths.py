"""Which directories a run may read and write: the source is never in danger, and a bad target is told at once."""

import os
import tempfile
from pathlib import Path

from msmodelslim.errors import EnvError, InvalidModelError, SecurityError

#: files that only a finished run writes; a directory without any of them is not ours to replace
_RESULT_FILES = ("quant_report.json", "quant_model_description.json")


def refuse_unsafe_paths(model_path: Path, save_path: Path, overwrite: bool) -> None:
    """Check both directories before anything is opened for writing. Creates nothing.

    Args:
        model_path: the source checkpoint.
        save_path: where the result goes; may be missing, its parents too.
        overwrite: allow a target that holds an earlier result.

    Raises:
        SecurityError: the target is the source, lies inside or above it (links resolved), is a file, or holds files
            that may not be replaced.
        InvalidModelError: the source is no directory.
        EnvError: the target's file system takes no new files.
    """
    source, target = model_path.resolve(), save_path.resolve()
    relation = _relation(source, target)
    if relation:
        raise SecurityError(
            f"--save_path {save_path} {relation} --model_path {model_path}",
            "choose a directory that neither holds the model nor lies inside it, so that the source stays as it is",
        )
    if not source.is_dir():
        what = "is a file" if source.is_file() else "does not exist"
        raise InvalidModelError(
            f"--model_path {model_path} {what}",
            "give the directory of a checkpoint on this machine; nothing is downloaded",
        )
    _refuse_occupied(save_path, target, overwrite)
    _probe(save_path, target)


def refuse_unsafe_file(model_path: Path, file: Path) -> None:
    """Check the place of a single file before anything is done. Creates nothing.

    Args:
        model_path: the source checkpoint.
        file: what shall be written; its directory may be missing.

    Raises:
        SecurityError: it lies inside the source (links resolved).
        EnvError: it is a directory, or its file system takes no new files.
    """
    source, target = model_path.resolve(), file.resolve()
    if _relation(source, target) == "lies inside":
        raise SecurityError(
            f"--save_path {file} lies inside --model_path {model_path}",
            "choose a place outside, so that the source stays as it is",
        )
    if target.is_dir():
        raise EnvError(f"--save_path {file} is a directory", "choose another name")
    _probe(file, target)


def _relation(source: Path, target: Path) -> str:
    """How the target endangers the source, in words; empty when it does not. Sees through links and bind mounts."""
    if source == target or _same(source, target):
        return "is the same directory as"
    if any(parent == source or _same(parent, source) for parent in target.parents):
        return "lies inside"
    if any(parent == target or _same(parent, target) for parent in source.parents):
        return "lies above"
    return ""


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist, or may not be looked at
        return False


def _refuse_occupied(save_path: Path, target: Path, overwrite: bool) -> None:
    if not os.path.exists(target):  # noqa: PTH110 - False, not an error, where a parent may not be looked into
        return
    if not target.is_dir():
        raise SecurityError(
            f"--save_path {save_path} is a file", "give a directory, one that does not exist yet is fine"
        )
    try:
        held = sorted(entry.name for entry in target.iterdir())
    except OSError as error:
        raise EnvError(f"--save_path {save_path} cannot be read: {error.strerror}", "choose another one") from error
    if not held:
        return
    shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
    if not overwrite:
        raise SecurityError(
            f"--save_path {save_path} is not empty; it holds {shown}",
            "choose a new directory, or give --overwrite to replace an earlier result",
        )
    if not set(held) & set(_RESULT_FILES):
        raise SecurityError(
            f"--save_path {save_path} holds {shown}, which no run wrote, and --overwrite replaces earlier results only",
            "choose a new directory",
        )


def _probe(save_path: Path, target: Path) -> None:
    """Write a nameless file beside the target, where the result will be built, or in the nearest parent there is."""
    place = next(parent for parent in target.parents if os.path.exists(parent))  # noqa: PTH110 - as above
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"probe")
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise EnvError(
            f"--save_path {save_path} cannot be made: {place} takes no files ({reason})", "choose a writable place"
        ) from error
