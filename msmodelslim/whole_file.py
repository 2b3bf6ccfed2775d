"""A file that appears at its place whole, or not at all."""

import os
from pathlib import Path

from msmodelslim.errors import EnvError


def write_whole(path: Path, content: bytes) -> None:
    """Write a hidden sibling, then put it in the file's place; directories are made as needed.

    Raises:
        EnvError: the file system does not take it; nothing is left of it.
    """
    path = path.resolve()  # a link keeps pointing there
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise EnvError(
            f"{path} cannot be written: {error.strerror}", "free some space or choose another place"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
