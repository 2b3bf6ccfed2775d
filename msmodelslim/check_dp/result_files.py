"""What a run has written, as digests: each tensor, and each file that holds none."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msmodelslim.report import REPORT_FILE

_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, little-endian


@dataclass(frozen=True)
class ResultFiles:
    """Digests of one result.

    Args:
        tensors: tensor name → (dtype, shape, digest), in the order of the files.
        files: name → digest of every file; the report, which tells times, is left out.
    """

    tensors: dict[str, tuple[str, str, str]]
    files: dict[str, str]

    def first_difference(self, other: "ResultFiles") -> str:
        """The first tensor, else the first file, in which `other` differs; "" when nothing does."""
        for name in [*self.tensors, *(other.tensors.keys() - self.tensors.keys())]:
            if self.tensors.get(name) != other.tensors.get(name):
                return name
        for name in [*self.files, *(other.files.keys() - self.files.keys())]:
            if self.files.get(name) != other.files.get(name):
                return name
        return ""

    def how(self, name: str, other: "ResultFiles") -> str:
        """In what way the tensor or file `name` of `other` differs."""
        own, theirs = self.tensors.get(name), other.tensors.get(name)
        if name in self.files or name in other.files:
            missing = name not in other.files, name not in self.files
            return "is missing" if missing[0] else "is additional" if missing[1] else "has other bytes"
        if own is None or theirs is None:
            return "is missing" if theirs is None else "is additional"
        if own[:2] != theirs[:2]:
            return f"is {theirs[0]} {theirs[1]} instead of {own[0]} {own[1]}"
        return "has other values"


def read_result(directory: Path) -> ResultFiles:
    """Digests of everything in a directory that a saver has written."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != REPORT_FILE)
    tensors: dict[str, tuple[str, str, str]] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            tensors |= dict(_tensors(path))
    return ResultFiles(tensors, {str(path.relative_to(directory)): _sha256(path.read_bytes()) for path in paths})


def _tensors(path: Path) -> Iterator[tuple[str, tuple[str, str, str]]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            file.seek(_LENGTH_BYTES + length + start)
            yield name, (entry["dtype"], str(entry["shape"]), _sha256(file.read(stop - start)))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
