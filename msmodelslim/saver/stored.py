"""A written directory as a loader sees it: names, types and shapes of everything, values one tensor at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.model.checkpoint import TensorInfo

#: Projections that engines compute as one. All parts must be float, or all of one scheme with one activation scale.
FUSED_NAMES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


#: Linears that engines split along their input; all others along their output.
ROW_PARALLEL_NAMES = {"o_proj", "down_proj", "w2", "out_proj", "dense_4h_to_h"}


@dataclass(frozen=True)
class Finding:
    """One broken rule: where, and what a loader would make of it."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class StoredModel:
    """What lies in a directory.

    Args:
        path: the directory.
        config: config.json, parsed.
        infos: tensor name → type, shape, place.

    Attributes:
        modules: module → last part of the name → info, for the tensors directly in it.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.config = config
        self.infos = infos
        self.modules: dict[str, dict[str, TensorInfo]] = {}
        for name, info in infos.items():
            module, _, suffix = name.rpartition(".")
            self.modules.setdefault(module, {})[suffix] = info

    def tensor(self, name: str) -> Tensor:
        """The stored values, in memory of their own."""
        info = self.infos[name]
        if not info.nbytes:
            return torch.empty(info.shape, dtype=info.dtype)
        with (self.path / info.file).open("rb") as opened:
            opened.seek(info.start)
            return torch.frombuffer(bytearray(opened.read(info.nbytes)), dtype=info.dtype).reshape(info.shape)

    def pieces(self, name: str, most_bytes: int = 4 << 20) -> Iterator[Tensor]:
        """The stored values in order, flat, some at a time."""
        info = self.infos[name]
        step = most_bytes // info.dtype.itemsize * info.dtype.itemsize
        with (self.path / info.file).open("rb") as opened:
            opened.seek(info.start)
            for start in range(0, info.nbytes, step):
                yield torch.frombuffer(bytearray(opened.read(min(step, info.nbytes - start))), dtype=info.dtype)

    def tensors(self, module: str) -> dict[str, Tensor]:
        """Last part of the name → values, for the tensors directly in a module."""
        return {suffix: self.tensor(info.name) for suffix, info in self.modules.get(module, {}).items()}


class BaseReader(ABC):
    """The rules by which engines read one format, applied to a directory.

    Args:
        stored: the directory.
    """

    #: words for people
    format_name: ClassVar[str]
    #: the file that says which tensor is where
    index_name: ClassVar[str]

    def __init__(self, stored: StoredModel) -> None:
        self.stored = stored

    @classmethod
    @abstractmethod
    def recognizes(cls, directory: Path) -> bool:
        """True for a directory in this format."""

    @abstractmethod
    def kinds(self) -> dict[str, str]:
        """Quantized module → the format's word for how."""

    @abstractmethod
    def size(self, module: str) -> tuple[int, int]:
        """Output rows and input columns of a quantized linear whose tensors keep the rules."""

    @abstractmethod
    def check(self) -> Iterator[Finding]:
        """Every rule that can be checked without values."""

    @abstractmethod
    def restore(self, module: str) -> QuantLinear:
        """The inverse of the saver's `export`."""

    @abstractmethod
    def export_again(self, module: str, linear: QuantLinear) -> dict[str, Tensor]:
        """Last part of the name → what the saver writes for this linear."""


def fused_groups(modules: Iterable[str]) -> Iterator[list[str]]:
    """Modules that engines compute as one, two or more a group."""
    present = set(modules)
    for names in FUSED_NAMES:
        for parent in sorted({module.rpartition(".")[0] for module in present if module.rpartition(".")[2] in names}):
            group = [f"{parent}.{name}" for name in names if f"{parent}.{name}" in present]
            if len(group) > 1:
                yield group
