"""What a safetensors file holds, from its first bytes alone: each tensor's type, shape and place; and is it whole.

The file is 8 bytes N (little endian), N bytes of JSON, then the tensors one after another.
Source: the format section of github.com/huggingface/safetensors.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: bytes `start` to `stop` of `file` (its name inside the checkpoint's directory)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def read_header(path: Path, problems: list[str]) -> dict[str, TensorInfo]:
    """Name → place of every tensor in the file; what is wrong with it is added to `problems`, a sentence a fault."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        if (start + stream.read(len(_LFS_POINTER)))[: len(_LFS_POINTER)] == _LFS_POINTER:
            problems.append(_lfs_sentence(path, size))
            return {}
        length = int.from_bytes(start, "little")
        data = _LENGTH_BYTES + length
        if size < _LENGTH_BYTES or length > _HEADER_LIMIT:
            problems.append(f"{path.name}: {size} bytes, and they do not begin with a safetensors header")
            return {}
        if size < data:
            problems.append(f"{path.name}: cut off inside its header, {size} bytes of at least {data}")
            return {}
        stream.seek(_LENGTH_BYTES)
        text = stream.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        problems.append(f"{path.name}: its safetensors header is not JSON ({error})")
        return {}
    if not isinstance(header, dict):
        problems.append(f"{path.name}: its safetensors header is a {type(header).__name__}, not an object")
        return {}
    header.pop("__metadata__", None)
    infos = {}
    for name, entry in header.items():
        fault, info = _tensor_info(name, entry, path.name, data)
        if info is None:
            problems.append(f"{path.name}: {name}: {fault}")
        else:
            infos[name] = info
    expected = max((info.stop for info in infos.values()), default=data)
    if len(infos) == len(header) and size != expected:
        problems.append(f"{path.name}: {size} bytes, but its header needs {expected} ({_difference(size, expected)})")
    return infos


def _tensor_info(name: str, entry: Any, file: str, data: int) -> tuple[str, TensorInfo | None]:
    match entry:
        case {"dtype": str(word), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            return f"the header says {entry!r}, not dtype, shape and data_offsets", None
    if word not in DTYPES:
        return f"type {word} is not known here (known: {', '.join(DTYPES)})", None
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        return f"shape {shape} is not a list of sizes", None
    needed = math.prod(shape) * DTYPES[word].itemsize
    if start < 0 or stop - start != needed:
        return f"bytes {start} to {stop} do not hold {word} of shape {shape} ({needed} bytes)", None
    return "", TensorInfo(name, DTYPES[word], tuple(shape), file, data + start, data + stop)


def _difference(size: int, expected: int) -> str:
    return f"{expected - size} bytes are missing" if size < expected else f"{size - expected} bytes too many"


def _lfs_sentence(path: Path, size: int) -> str:
    stated = re.search(rb"^size (\d+)$", path.read_bytes()[:1024], re.MULTILINE)
    weights = f" of {int(stated.group(1))} bytes" if stated else ""
    return f"{path.name}: is a git-lfs pointer of {size} bytes, not the weights{weights} (git lfs pull fetches them)"
