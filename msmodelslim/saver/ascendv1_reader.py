"""How vllm-ascend reads ascendV1: which keys it looks up, which tensors each kind's class asks for.

The engine itself checks little: a missing scale, or one of the wrong type, is served as garbage. So a rule here that it
would not enforce is one that nothing else would catch.

Letters: N output rows, K input columns, G groups of columns, as in docs/formats.md.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.model.checkpoint import TensorInfo
from msmodelslim.saver.ascendv1_kinds import FLOAT_KIND, LAYOUTS, OLD_FP8_KIND, STATIC_SCOPES, linear_of, tensors_of
from msmodelslim.saver.stored import ROW_PARALLEL_NAMES, BaseReader, Finding, StoredModel, fused_groups
from msmodelslim.saver.tied_head import HEAD_NAMES

DESCRIPTION = "quant_model_description.json"
_F32, _I8, _U8, _FP8 = torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DEQ = (torch.float32, torch.int64)
_GLOBAL_KEYS = {
    *("version", "model_quant_type", "group_size", "metadata", "optional", "kv_cache_type", "kv_quant_type"),
    *("fa_quant_type", "indexer_quant_type", "reduce_quant_type", "max_supported_tp"),
}


@dataclass(frozen=True)
class _Part:
    """One tensor of a kind: the types it may have, its shape in words of N, K and G, and whether a reader needs it."""

    dtypes: tuple[torch.dtype, ...]
    shape: str
    needed: bool = True


_CHANNEL = {
    "weight": _Part((_I8,), "N K"),
    "weight_scale": _Part((_F32,), "N G"),
    "weight_offset": _Part((_F32,), "N G"),
}
_STATIC = {
    "weight": _Part((_I8,), "N K"),
    "input_scale": _Part((_F32,), "1"),
    "input_offset": _Part((_F32,), "1"),
    "quant_bias": _Part((torch.int32,), "N"),
    "deq_scale": _Part(_DEQ, "N"),
}
_SPARE_CHANNEL = {"weight_scale": _Part((_F32,), "N 1", False), "weight_offset": _Part((_F32,), "N 1", False)}
_FP8_CHANNEL = {
    "weight": _Part((_FP8,), "N K"),
    "weight_scale": _Part((_F32,), "N 1"),
    "weight_offset": _Part(_FLOATS, "N 1"),
}
_MXFP4 = {"weight": _Part((_U8,), "N K/2"), "weight_scale": _Part((_U8,), "N K/32")}
PARTS: dict[str, dict[str, _Part]] = {
    "W8A8": _STATIC | _SPARE_CHANNEL,
    "W8A8_MIX": _STATIC | {name: _Part((_F32,), "N 1") for name in ("weight_scale", "weight_offset")},
    "W8A8_DYNAMIC": _CHANNEL,
    "W8A16": _CHANNEL,
    "W4A4_DYNAMIC": _CHANNEL,
    "W4A8_DYNAMIC": {
        "weight": _Part((_I8,), "N/2 K"),
        "weight_scale": _Part((_F32,), "N 1"),
        "weight_offset": _Part((_F32,), "N 1"),
        "weight_scale_second": _Part((_F32,), "N G", False),
        "weight_offset_second": _Part((_F32,), "N G", False),
        "scale_bias": _Part((_F32,), "N S"),
    },
    "W4A16": {
        "weight_packed": _Part((torch.int32,), "N K/8"),
        "weight_scale": _Part(_FLOATS, "N G"),
        "weight_shape": _Part((torch.int32, torch.int64), "2"),
    },
    "W8A8FP8_DYNAMIC": _FP8_CHANNEL,
    OLD_FP8_KIND: _FP8_CHANNEL,
    "W8A8_MXFP8": {"weight": _Part((_FP8,), "N K"), "weight_scale": _Part((_U8,), "N ceil(K/32)")},
    "W4A8_MXFP": _MXFP4,
    "W4A4_MXFP4": _MXFP4,
    "W4A16_MXFP4": _MXFP4,
    "W4A4_MXFP4_DUALSCALE": _MXFP4 | {"weight_dual_scale": _Part((_F32,), "N G")},
}
#: kind → the part that is stored in the model's type
_TYPED = {"W4A16": "weight_scale", "W8A8FP8_DYNAMIC": "weight_offset", OLD_FP8_KIND: "weight_offset"}
_EXPERTS = re.compile(r"(.*\.experts)\.\d+\.")


class AscendV1Reader(BaseReader):
    format_name = "ascendV1"
    index_name = "quant_model_weights.safetensors.index.json"

    def __init__(self, stored: StoredModel) -> None:
        super().__init__(stored)
        self.description: dict[str, Any] = {}
        self._unreadable = ""
        try:
            content = json.loads((stored.path / DESCRIPTION).read_text(encoding="utf-8"))
            self.description = content if isinstance(content, dict) else {}
        except ValueError as error:
            self._unreadable = f"is not JSON ({error})"
        self._kinds: dict[str, str] = {}
        for key, kind in self.description.items():
            module, _, suffix = key.rpartition(".")
            if suffix in ("weight", "weight_packed") and kind != FLOAT_KIND and isinstance(kind, str):
                self._kinds[module] = kind

    @classmethod
    def recognizes(cls, directory: Path) -> bool:
        return (directory / DESCRIPTION).is_file()

    def kinds(self) -> dict[str, str]:
        return self._kinds

    def size(self, module: str) -> tuple[int, int]:
        found = _sizes(self._kinds[module], self.stored.modules[module])
        assert found is not None, f"{module} breaks the rules of its kind"
        return found["N"], found["K"]

    def restore(self, module: str) -> QuantLinear:
        return linear_of(self._kinds[module], self.stored.tensors(module))

    def export_again(self, module: str, linear: QuantLinear) -> dict[str, Tensor]:
        parts = self.stored.modules[module]
        kind, bias = self._kinds[module], parts.get("scale_bias")
        dtype = torch.bfloat16
        if "deq_scale" in parts and parts["deq_scale"].dtype is torch.int64:
            dtype = torch.float16
        elif kind in _TYPED:
            dtype = parts[_TYPED[kind]].dtype
        columns = bias.shape[1] if bias is not None else 1
        return tensors_of(kind, linear, dtype, columns, module)

    def check(self) -> Iterator[Finding]:
        if self._unreadable or not self.description:
            yield Finding(DESCRIPTION, self._unreadable or "is empty or no JSON object")
            return
        yield from self._check_keys()
        kinds = self.kinds()
        for module, kind in kinds.items():
            yield from self._check_module(module, kind)
        yield from self._check_float(kinds)
        yield from self._check_groups(kinds)
        yield from self._check_globals(kinds)
        yield from _nested_quantization(self.stored.config, "config.json")

    def _check_keys(self) -> Iterator[Finding]:
        for name in self.stored.infos:
            if name not in self.description:
                yield Finding(
                    name, f"{DESCRIPTION} has no such key; the engine stops with a KeyError, or loads it as float"
                )
        if not any(key == head or key.endswith("." + head) for key in self.description for head in HEAD_NAMES):
            yield Finding(
                DESCRIPTION, "has no lm_head.weight; the engine looks it up even when the embedding is the head"
            )
        for key, value in self.description.items():
            if key in _GLOBAL_KEYS or key.endswith(".quant_type"):
                continue
            if not isinstance(value, str):
                yield Finding(key, f"its kind is {value!r}, not a word")
            elif key not in self.stored.infos and not any(key.endswith(head) for head in HEAD_NAMES):
                yield Finding(key, f"is described as {value}, but no file holds it; the engine serves what memory held")

    def _check_module(self, module: str, kind: str) -> Iterator[Finding]:
        if kind not in PARTS:
            yield Finding(module, f"kind {kind} is unknown; known are {', '.join(sorted(PARTS))}")
            return
        present = self.stored.modules.get(module, {})
        sizes = _sizes(kind, present)
        if sizes is None:
            yield Finding(module, f"is {kind}, but its weight is missing or has no two dimensions")
            return
        for suffix, part in PARTS[kind].items():
            info = present.get(suffix)
            if info is None and part.needed:
                yield Finding(
                    f"{module}.{suffix}", f"is missing; {kind} needs it, and the engine would serve without it"
                )
            elif info is not None:
                yield from _check_part(info, part, sizes, kind)
        for suffix, info in present.items():
            label, wanted = self.description.get(info.name), FLOAT_KIND if suffix == "bias" else kind
            if suffix not in PARTS[kind] and suffix != "bias":
                yield Finding(info.name, f"{kind} has no such tensor; the engine finds no parameter for it")
            elif label is not None and label != wanted:
                yield Finding(info.name, f"is labelled {label}, and its module is {kind}: write {wanted}")
        if kind in STATIC_SCOPES and "deq_scale" in present:
            yield from self._check_deq_type(present["deq_scale"])
        if "weight_scale_second" in present and "weight_offset_second" not in present:
            yield Finding(f"{module}.weight_offset_second", "is missing beside weight_scale_second")
        if "scale_bias" in present:
            row = module.rpartition(".")[2] in ROW_PARALLEL_NAMES
            if present["scale_bias"].shape[-1] != (16 if row else 1):
                yield Finding(
                    f"{module}.scale_bias",
                    f"has {present['scale_bias'].shape[-1]} columns; the engine splits this linear along its "
                    f"{'input and reads 16' if row else 'output and reads 1'}",
                )

    def _check_deq_type(self, info: TensorInfo) -> Iterator[Finding]:
        served = self.stored.config.get("dtype") or self.stored.config.get("torch_dtype") or "bfloat16"
        wanted = torch.int64 if "float16" in str(served) and "bfloat16" not in str(served) else torch.float32
        if info.dtype is not wanted:
            yield Finding(
                info.name,
                f"is {info.dtype}, but serving in {served}, as config.json says, engines read {wanted}: silent garbage",
            )

    def _check_float(self, kinds: Mapping[str, str]) -> Iterator[Finding]:
        for module, parts in self.stored.modules.items():
            info = parts.get("weight")
            if module in kinds or info is None:
                continue
            if info.dtype not in (*_FLOATS, torch.float64) or "weight_scale" in parts:
                yield Finding(info.name, f"is labelled {FLOAT_KIND}, but it is {info.dtype} or has scales beside it")

    def _check_groups(self, kinds: Mapping[str, str]) -> Iterator[Finding]:
        matrices = [
            module for module, parts in self.stored.modules.items() if {"weight", "weight_packed"} & parts.keys()
        ]
        for group in fused_groups(matrices):
            found = {module: kinds.get(module, FLOAT_KIND) for module in group}
            if len(set(found.values())) > 1:
                what = ", ".join(f"{module} is {kind}" for module, kind in found.items())
                yield Finding(group[0], f"the engine computes these as one linear, which needs one kind: {what}")
                continue
            for suffix in ("input_scale", "input_offset"):
                values = {
                    m: float(self.stored.tensor(f"{m}.{suffix}")) for m in group if suffix in self.stored.modules[m]
                }
                if len(set(values.values())) > 1:
                    what = ", ".join(f"{module} has {value}" for module, value in values.items())
                    yield Finding(f"{group[0]}.{suffix}", f"the engine uses one value for the fused linear: {what}")
        experts: dict[str, dict[str, str]] = {}
        for module in matrices:
            if match := _EXPERTS.match(module):
                experts.setdefault(match[1], {}).setdefault(kinds.get(module, FLOAT_KIND), module)
        for place, examples in experts.items():
            if len(examples) > 1:
                what = ", ".join(f"{module} is {kind}" for kind, module in examples.items())
                yield Finding(place, f"the engine takes expert 0's kind for all of them: {what}")

    def _check_globals(self, kinds: Mapping[str, str]) -> Iterator[Finding]:
        size, used = self.description.get("group_size"), set(kinds.values())
        if self.description.get("version") != "1.0.0":
            yield Finding(DESCRIPTION, f"version is {self.description.get('version')!r}; tensors are laid out as 1.0.0")
        if not isinstance(size, int):
            yield Finding(DESCRIPTION, f"group_size is {size!r}, not a number")
            return
        if any("MXFP" in kind for kind in used) and size != 32:
            yield Finding(DESCRIPTION, f"group_size is {size}, and MX kinds have blocks of 32")
        second = {
            info.shape
            for parts in self.stored.modules.values()
            for s, info in parts.items()
            if s == "weight_scale_second"
        }
        if "W4A8_DYNAMIC" in used and size > 0 and not second:
            yield Finding(
                DESCRIPTION, f"group_size is {size}, and W4A8_DYNAMIC has one scale a row: the engine wants 0"
            )


def _sizes(kind: str, present: Mapping[str, TensorInfo]) -> dict[str, int] | None:
    """N, K, G (columns of the group scales) and S (columns of scale_bias) of a module."""
    info = present.get("weight_packed" if kind == "W4A16" else "weight")
    if info is None or len(info.shape) != 2:
        return None
    rows, columns = info.shape
    layout = PARTS[kind]["weight_packed" if kind == "W4A16" else "weight"].shape
    rows *= 2 if layout.startswith("N/2") else 1
    columns *= {"K/2": 2, "K/8": 8}.get(layout.split()[1], 1)
    sizes = {"N": rows, "K": columns, "G": 1, "S": 1}
    groups = next(
        (present[n] for n in ("weight_scale_second", "weight_dual_scale", "weight_scale") if n in present), None
    )
    if groups is not None and len(groups.shape) == 2 and columns % max(groups.shape[1], 1) == 0:
        sizes["G"] = groups.shape[1]
    if "scale_bias" in present and len(present["scale_bias"].shape) == 2:
        sizes["S"] = present["scale_bias"].shape[1]
    return sizes


def _check_part(info: TensorInfo, part: _Part, sizes: Mapping[str, int], kind: str) -> Iterator[Finding]:
    shape = tuple(_size(word, sizes) for word in part.shape.split())
    if info.dtype not in part.dtypes:
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in part.dtypes)
        yield Finding(info.name, f"is {str(info.dtype).removeprefix('torch.')}; {kind} stores {words}")
    if tuple(info.shape) != shape:
        yield Finding(info.name, f"has shape {list(info.shape)}; {kind} stores {list(shape)} ({part.shape})")


def _size(word: str, sizes: Mapping[str, int]) -> int:
    match re.fullmatch(r"(?:ceil\()?([NKGS])(?:/(\d+))?\)?", word):
        case None:
            return int(word)
        case found:
            return -(-sizes[found[1]] // int(found[2] or 1))


def _nested_quantization(config: Any, place: str) -> Iterator[Finding]:
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        if key == "quantization_config":
            yield Finding(place, f"has {key}; the engine stops because it does not match its own quantization method")
        yield from _nested_quantization(value, f"{place}: {key}")


assert set(LAYOUTS) <= set(PARTS), "a kind that is written has its rules"
