"""Which tensor lies at which byte of which file: decided from names and sizes alone, before any weight is read.

Because the plan does not depend on who writes when, any number of writers may fill the files in any order and the bytes
come out the same. Each file equals what `safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})` writes.
"""

import errno
import json
import math
import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from msmodelslim.errors import EnvError
from msmodelslim.model.checkpoint import TensorInfo

#: torch type → its word in a header. The order is the library's own order of types, smallest first; within a file it
#: lays tensors out by falling type, then by name (safetensors 0.8, `enum Dtype` and `prepare` of tensor.rs).
DTYPE_WORDS: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_ORDER = {dtype: position for position, dtype in enumerate(DTYPE_WORDS)}
_CHUNK_BYTES = 16 << 20  # what is moved at a time between device, memory and file


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor on disk looks like, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of a tensor, which may be on meta."""
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies: bytes `start` to `stop` of `file`."""

    file: str
    start: int
    stop: int
    spec: TensorSpec


@dataclass(frozen=True)
class ShardPlan:
    """All files of a checkpoint before a byte of it is written.

    Args:
        slots: tensor name → its place, in canonical order.
        headers: file name → the bytes before its first tensor.
        sizes: file name → its size in bytes.
    """

    slots: dict[str, Slot]
    headers: dict[str, bytes]
    sizes: dict[str, int]

    @classmethod
    def make(
        cls, specs: Mapping[str, TensorSpec], part_file_bytes: int, file_pattern: str, *, numbered: bool = False
    ) -> "ShardPlan":
        """Cut the tensors, in the given order, into files of at most `part_file_bytes` of tensor data.

        Args:
            specs: tensor name → spec, in canonical order.
            part_file_bytes: bytes of tensors a file; 0 for one file. A larger tensor gets a file of its own.
            file_pattern: file name with `{suffix}` where "-00001-of-00002" goes; a single file has no suffix.
            numbered: write "-00001-of-00001" for a single file too, unless `part_file_bytes` is 0.

        Raises:
            ValueError: no tensors, or a type that safetensors cannot store.
        """
        if not specs:
            raise ValueError("no tensors to plan files for")
        for name, spec in specs.items():
            if spec.dtype not in _ORDER:
                raise ValueError(f"{name}: safetensors has no type for {spec.dtype}")
        split = split_state_dict_into_shards_factory(
            dict(specs),
            get_storage_size=lambda spec: spec.nbytes,
            filename_pattern=file_pattern,
            max_shard_size=part_file_bytes or sum(spec.nbytes for spec in specs.values()) + 1,
        )
        files = split.filename_to_tensors
        if numbered and part_file_bytes and len(files) == 1:
            files = {file_pattern.format(suffix="-00001-of-00001"): next(iter(files.values()))}
        slots: dict[str, Slot] = {}
        headers, sizes = {}, {}
        for file, names in files.items():
            headers[file], placed = _lay_out(file, {name: specs[name] for name in names})
            sizes[file] = max(slot.stop for slot in placed.values())
            slots |= placed
        return cls({name: slots[name] for name in specs}, headers, sizes)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without headers: `metadata.total_size` of an index."""
        return sum(slot.spec.nbytes for slot in self.slots.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def index(self) -> dict[str, object]:
        """The content of a `*.safetensors.index.json`."""
        where = {name: self.slots[name].file for name in sorted(self.slots)}
        return {"metadata": {"total_size": self.tensor_bytes}, "weight_map": where}


class ShardWriter:
    """Fills the files of a plan in place, in any order. Files are opened for each write, so none stays open.

    Args:
        plan: what goes where.
        directory: where the files are.
        create: make the files, at their full size and with their headers; False when another writer made them.
    """

    def __init__(self, plan: ShardPlan, directory: Path, create: bool = True) -> None:
        self.plan = plan
        self.directory = directory
        self.written: set[str] = set()
        if create:
            for file, header in plan.headers.items():
                with _Target(directory / file, os.O_CREAT | os.O_EXCL) as target:
                    target.resize(plan.sizes[file])
                    target.write(memoryview(header), 0)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor from any device to its place.

        Raises:
            ValueError: not planned, written before, or not of the planned type and shape.
            EnvError: the disk is full.
        """
        slot = self._claim(name, spec_of(tensor))
        if tensor.is_meta:
            raise ValueError(f"{name} is on meta: it has no values to write")
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with _Target(self.directory / slot.file) as target:
            for start in range(0, raw.numel(), _CHUNK_BYTES):
                part = raw[start : start + _CHUNK_BYTES].cpu().numpy()
                target.write(part.data, slot.start + start)
        self.written.add(name)

    def write_bytes_from(self, name: str, info: TensorInfo, root: Path) -> None:
        """Copy a tensor's bytes out of a source file, without looking at them.

        Args:
            info: where the bytes are; its file is relative to `root`.

        Raises:
            ValueError: not planned, written before, or not of the planned type and shape.
            EnvError: the disk is full.
        """
        slot = self._claim(name, TensorSpec(info.dtype, tuple(info.shape)))
        if info.stop - info.start != slot.stop - slot.start:
            raise ValueError(f"{name}: {info.stop - info.start} bytes in {info.file}, planned {slot.stop - slot.start}")
        with _Target(self.directory / slot.file) as target:
            target.copy(root / info.file, info.start, info.stop, slot.start)
        self.written.add(name)

    def missing(self) -> list[str]:
        """Planned tensors that were not written, in canonical order."""
        return [name for name in self.plan.slots if name not in self.written]

    def sync(self) -> None:
        """Wait until every file is on the disk itself."""
        for file in self.plan.sizes:
            with _Target(self.directory / file) as target:
                target.sync()

    def _claim(self, name: str, found: TensorSpec) -> Slot:
        slot = self.plan.slots.get(name)
        if slot is None:
            raise ValueError(f"{name} is not in the plan")
        if name in self.written:
            raise ValueError(f"{name} is written twice")
        if found != slot.spec:
            raise ValueError(f"{name} is {found}, planned as {slot.spec}")
        return slot


class _Target:
    """One file open for writing at given offsets; a full disk is an `EnvError` that names it."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | flags, 0o644)

    def __enter__(self) -> "_Target":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def resize(self, size: int) -> None:
        os.ftruncate(self._file, size)

    def sync(self) -> None:
        os.fsync(self._file)

    def write(self, data: memoryview, offset: int) -> None:
        try:
            while data:
                done = os.pwrite(self._file, data, offset)
                data, offset = data[done:], offset + done
        except OSError as error:
            raise _named(error, self.path) from error

    def copy(self, source: Path, start: int, stop: int, offset: int) -> None:
        """Bytes `start` to `stop` of `source`, inside the kernel where the file systems allow it."""
        with source.open("rb", buffering=0) as opened:
            done = self._copy_in_kernel(opened.fileno(), start, stop, offset)
            while start + done < stop:
                data = os.pread(opened.fileno(), min(_CHUNK_BYTES, stop - start - done), start + done)
                if not data:
                    raise EnvError(f"{source} ends at byte {start + done}, expected {stop}", "copy the model again")
                self.write(memoryview(data), offset + done)
                done += len(data)

    def _copy_in_kernel(self, source: int, start: int, stop: int, offset: int) -> int:
        """How many bytes the kernel copied: all, or fewer where it cannot."""
        done = 0
        if sys.platform == "linux":
            try:
                while start + done < stop:
                    count = os.copy_file_range(source, self._file, stop - start - done, start + done, offset + done)
                    if not count:
                        break
                    done += count
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                    raise _named(error, self.path) from error
        return done


def canonical_order(names: Iterable[str]) -> list[str]:
    """Names sorted with their numbers as numbers: layer 2 before layer 10."""

    def key(name: str) -> tuple[list[int | str], str]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)], name

    return sorted(names, key=key)


def _lay_out(file: str, specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, Slot]]:
    """Header bytes of one file, and the place of each of its tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(specs, key=lambda name: (-_ORDER[specs[name].dtype], name.encode())):
        spec = specs[name]
        stop = offset + spec.nbytes
        entries[name] = {"dtype": DTYPE_WORDS[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    base = 8 + len(text)
    slots = {}
    for name, spec in specs.items():
        start, stop = entries[name]["data_offsets"]  # type: ignore[index] # a literal of three lines above
        slots[name] = Slot(file, base + start, base + stop, spec)
    return struct.pack("<Q", len(text)) + text, slots


def _named(error: OSError, path: Path) -> OSError | EnvError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvError(f"no space left while writing {path}", "free space or give another --save_path")
    return error
