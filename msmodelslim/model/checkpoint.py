"""A checkpoint on disk: what it holds, checked before a weight is read, and its tensors as views of the files.

Opening reads config.json, the index and the header of each shard. A tensor is a private map of its own bytes: nothing
is copied, processes share the pages, a change of the tensor never reaches the file, and the map goes with the tensor.
"""

import json
import logging
import mmap
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msmodelslim.errors import InvalidModelError
from msmodelslim.model import block_fp8
from msmodelslim.model.shard_header import TensorInfo, read_header

__all__ = ["Checkpoint", "TensorInfo", "model_dtype", "read_config", "read_json_object"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Linux reads no more than its read-ahead window for one request, and drops the rest of it without a word; this is the
# smallest window in use (the default of block devices).
_READ_AHEAD_BYTES = 128 << 10
_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_log = logging.getLogger(__name__)


def read_config(model_path: Path) -> dict[str, Any]:
    """config.json of a checkpoint's directory.

    Raises:
        InvalidModelError: no such directory, no config.json in it, or not a JSON object.
    """
    if not model_path.is_dir():
        what = "is a file, not a directory" if model_path.exists() else "does not exist"
        raise InvalidModelError(f"model path {model_path} {what}", "give the directory that holds config.json")
    if not (model_path / "config.json").is_file():
        raise InvalidModelError(f"{model_path} has no config.json", "give the directory of a Hugging Face checkpoint")
    problems: list[str] = []
    config = read_json_object(model_path / "config.json", problems)
    if problems:
        raise InvalidModelError(f"{model_path}: {problems[0]}", "download the file again")
    return config


def model_dtype(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The floating type a model computes in.

    The first of these that is there decides, and a warning names the ones that disagree: `dtype`, `torch_dtype`, then
    both inside `text_config`. Without any of them: the type that most bytes of the floating tensors have, not counting
    float8; bfloat16 if all are float8.

    Raises:
        InvalidModelError: the value is not bfloat16, float16 or float32.
    """
    found = []
    for place, holder in (("", config), ("text_config.", config.get("text_config") or {})):
        for key in ("dtype", "torch_dtype"):
            word = holder.get(key)
            if word in (None, "auto"):
                continue
            if not isinstance(word, str) or word.removeprefix("torch.") not in _FLOATS:
                raise InvalidModelError(f"config.json: {place}{key}: {word!r} is not a type", f"write {_or(_FLOATS)}")
            found.append((place + key, word.removeprefix("torch.")))
    if found:
        others = [f"{key} {word}" for key, word in found[1:] if word != found[0][1]]
        if others:
            _log.warning("config.json: %s %s is used; %s disagrees", *found[0], ", ".join(others))
        return _FLOATS[found[0][1]]
    size: Counter[torch.dtype] = Counter()
    for info in tensors.values():
        if info.dtype in _FLOATS.values() and not info.name.endswith(block_fp8.SCALE_SUFFIX):
            size[info.dtype] += info.nbytes
    return size.most_common(1)[0][0] if size else torch.bfloat16


class Checkpoint:
    """The tensors of a Hugging Face directory by name.

    Args:
        model_path: directory with config.json and safetensors files. With an index the index decides which file a
            tensor is read from; without one there is a single file, `model.safetensors` if it has that name.

    Attributes:
        config: config.json.
        files: shards in use, sorted.
        tensors: name → type, shape and place.
        stray_files: safetensors files that are not in use.
        stray_tensors: name → file of what lies in a shard in use but is not in the index; never read.

    Raises:
        InvalidModelError: the directory is no checkpoint, is quantized in a way that cannot be read, or is damaged; a
            damaged one with all its faults at once (missing, truncated, git-lfs pointer, index against shards).
    """

    def __init__(self, model_path: Path) -> None:
        self.path = Path(model_path)
        self.config = read_config(self.path)
        self.block = block_fp8.block_size(self.config)
        problems: list[str] = []
        where = self._weight_map(problems)
        present = {path.name for path in self.path.glob("*.safetensors")}
        self.files = sorted(set(where.values()) if where is not None else self._single(present))
        self.stray_files = sorted(present - set(self.files))
        self.tensors: dict[str, TensorInfo] = {}
        self.stray_tensors: dict[str, str] = {}
        for file in self.files:
            self._read_shard(file, where, file in present, problems)
        if not problems:
            problems = block_fp8.check_scales(self.tensors, self.block)
        if problems:
            raise InvalidModelError(
                f"{self.path} is not a whole checkpoint:\n  " + "\n  ".join(problems),
                "fetch these files again",
            )
        self.dtype = model_dtype(self.config, self.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.nbytes for info in self.tensors.values())

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU, as a private view of the file.

        Raises:
            KeyError: no tensor has this name.
        """
        info = self.tensors[name]
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        skip = info.start % mmap.ALLOCATIONGRANULARITY
        with (self.path / info.file).open("rb") as stream:
            # Never closed by hand: torch keeps the map alive, and closing it under a tensor would crash.
            view = mmap.mmap(stream.fileno(), skip + info.nbytes, access=mmap.ACCESS_COPY, offset=info.start - skip)
        raw = torch.frombuffer(view, dtype=torch.uint8, count=info.nbytes, offset=skip)
        if info.start % info.dtype.itemsize:
            raw = raw.clone()  # the format allows a tensor to start at any byte, torch does not
        return raw.view(info.dtype).reshape(info.shape)

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor's values: float8 multiplied out with its block scales, then floats in `dtype`, the rest as stored.

        Still a view of the file when nothing had to change.
        """
        stored = self.tensor(name)
        if self.is_fp8_block(name):
            assert self.block is not None, "float8 without block scales was refused when the checkpoint was opened"
            return block_fp8.decode(stored, self.tensor(self.scale_name(name)), self.block, dtype)
        return stored.to(dtype) if stored.is_floating_point() else stored

    def is_fp8_block(self, name: str) -> bool:
        """True when the tensor is stored as float8 codes that need their block scales."""
        return self.tensors[name].dtype == torch.float8_e4m3fn and self.block is not None

    def scale_name(self, name: str) -> str:
        """Where the scales of a block-FP8 tensor are stored."""
        return name + block_fp8.SCALE_SUFFIX

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the system to read these tensors (and the scales they need) into its cache, without waiting for it."""
        if sys.platform != "linux":
            return
        spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for name in names:
            for part in (name, self.scale_name(name)):
                if part in self.tensors:
                    info = self.tensors[part]
                    spans[info.file].append((info.start, info.stop))
        for file, ranges in spans.items():
            with (self.path / file).open("rb") as stream:
                for start, stop in _merged(ranges):
                    for step in range(start, stop, _READ_AHEAD_BYTES):
                        size = min(_READ_AHEAD_BYTES, stop - step)
                        os.posix_fadvise(stream.fileno(), step, size, os.POSIX_FADV_WILLNEED)

    def _read_shard(self, file: str, where: dict[str, str] | None, present: bool, problems: list[str]) -> None:
        here = {name for name, place in (where or {}).items() if place == file}
        if not present:
            problems.append(f"{file}: is missing; the index places {len(here)} tensors there")
            return
        faults: list[str] = []
        infos = read_header(self.path / file, faults)
        for name, info in infos.items():
            if where is None or name in here:
                self.tensors[name] = info
            elif name not in where:
                self.stray_tensors[name] = file
        lacking = [] if faults else sorted(here - set(infos))
        problems += faults + [f"{file}: lacks {name}, which the index places there" for name in lacking]

    def _weight_map(self, problems: list[str]) -> dict[str, str] | None:
        """Tensor name → shard, None without an index."""
        path = self.path / _INDEX
        if not path.is_file():
            return None
        where = read_json_object(path, problems).get("weight_map")
        if not isinstance(where, dict) or not where:
            problems.append(f"{_INDEX}: has no weight_map")
            return {}
        for name, file in list(where.items()):
            if not isinstance(file, str) or Path(file).name != file:
                problems.append(f"{_INDEX}: {name}: {file!r} is not the name of a file in this directory")
                del where[name]
        return where

    def _single(self, present: set[str]) -> set[str]:
        if _SINGLE in present:
            return {_SINGLE}
        if len(present) == 1:
            return present
        if present:
            raise InvalidModelError(
                f"{self.path} has {len(present)} safetensors files but no {_INDEX}",
                "fetch the index, too",
            )
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.path.glob(pattern))
        if pickles:
            raise InvalidModelError(
                f"{self.path} has its weights only as pickles ({', '.join(pickles[:3])}), which can run code when read",
                "convert them with save_pretrained of transformers, which writes safetensors",
            )
        raise InvalidModelError(f"{self.path} has no safetensors file", "give the directory that holds the weights")


def read_json_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a JSON file; if it holds none, a sentence goes to `problems` and the object is empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither UTF-8 nor JSON
        problems.append(f"{path.name}: is not JSON ({error})")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name}: is a {type(content).__name__}, not a JSON object")
        return {}
    return content


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1] + mmap.PAGESIZE:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _or(words: Iterable[str]) -> str:
    return " or ".join(words)
