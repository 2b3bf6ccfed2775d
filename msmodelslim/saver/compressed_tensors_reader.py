"""How transformers and vLLM read compressed-tensors: which modules config.json makes quantized, and what they need.

Letters: N output rows, K input columns, G groups of columns.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from pydantic import ValidationError
from torch import Tensor

from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import LinearScheme, QDType, QScope
from msmodelslim.model.checkpoint import TensorInfo
from msmodelslim.saver.compressed_tensors_kinds import INTS, MXFP4, PACKED, kind_of, linear_of, scheme_of, tensors_of
from msmodelslim.saver.stored import BaseReader, Finding, StoredModel, fused_groups
from msmodelslim.saver.tied_head import is_embedding

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PLACE = "config.json: quantization_config"
_Need = dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]


class CompressedTensorsReader(BaseReader):
    format_name = "compressed-tensors"
    index_name = "model.safetensors.index.json"

    def __init__(self, stored: StoredModel) -> None:
        super().__init__(stored)
        self.block: Mapping[str, Any] = _block_of(stored.config)
        self.parsed: QuantizationConfig | None = None
        self._faults: list[Finding] = []
        try:
            self.parsed = QuantizationConfig.model_validate(self.block)
        except ValidationError as error:
            for fault in error.errors():
                where = ".".join(str(part) for part in fault["loc"])
                self._faults.append(Finding(f"{_PLACE}.{where}", fault["msg"]))
        self._args: dict[str, QuantizationScheme] = {}
        for module, parts in stored.modules.items():
            args = self._claimed(module) if _is_matrix(module, parts) else None
            if args is not None:
                self._args[module] = args

    @classmethod
    def recognizes(cls, directory: Path) -> bool:
        config = directory / "config.json"
        return config.is_file() and '"compressed-tensors"' in config.read_text(encoding="utf-8", errors="replace")

    def kinds(self) -> dict[str, str]:
        found = {}
        for module, args in self._args.items():
            scheme = _known(args)
            found[module] = (kind_of(scheme) if scheme else None) or "unknown"
        return found

    def size(self, module: str) -> tuple[int, int]:
        parts, args = self.stored.modules[module], self._args[module]
        if args.format == PACKED:
            rows, columns = self.stored.tensor(parts["weight_shape"].name).tolist()
            return rows, columns
        rows, columns = parts["weight_packed" if args.format == MXFP4 else "weight"].shape
        return rows, columns * (2 if args.format == MXFP4 else 1)

    def restore(self, module: str) -> QuantLinear:
        return linear_of(self._args[module], self.stored.tensors(module))

    def export_again(self, module: str, linear: QuantLinear) -> dict[str, Tensor]:
        scale = self.stored.modules[module]["weight_scale"]
        return tensors_of(linear, scale.dtype if scale.dtype in _FLOATS else torch.float32)

    def check(self) -> Iterator[Finding]:
        yield from self._faults
        if self.parsed is None:
            return
        yield from self._check_block()
        for module, parts in self.stored.modules.items():
            if _is_matrix(module, parts):
                yield from self._check_module(module, parts)
            elif parts.keys() & {"weight_scale", "input_scale"}:
                yield Finding(module, "has scales and no weight; engines serve what memory held")
        yield from self._check_groups()
        yield from self._check_files()

    def _check_block(self) -> Iterator[Finding]:
        assert self.parsed is not None
        known = {format_.value for format_ in CompressionFormat}
        if self.block.get("quantization_status") != "compressed":
            yield Finding(
                f"{_PLACE}.quantization_status",
                f"is {self.block.get('quantization_status')!r}, not 'compressed': transformers would take codes for "
                "weights, without an error",
            )
        groups = {
            name: group for name, group in self.parsed.config_groups.items() if isinstance(group, QuantizationScheme)
        }
        formats = {str(group.format) for group in groups.values() if group.format}
        wanted = next(iter(formats), None) if len(formats) <= 1 else CompressionFormat.mixed_precision.value
        if self.parsed.format not in known or (wanted and self.parsed.format != wanted):
            yield Finding(f"{_PLACE}.format", f"is {self.parsed.format!r}, and its groups make it {wanted!r}")
        for name, group in groups.items():
            if group.format is not None and group.format not in known:
                yield Finding(f"{_PLACE}.config_groups.{name}.format", f"{group.format!r} is unknown")
            if not any(_fits(module, target) for target in group.targets for module in self._args):
                yield Finding(f"{_PLACE}.config_groups.{name}.targets", f"no module matches {group.targets}")
        if "lm_head" not in self._args and not self._ignores("lm_head") and self._scheme_for("lm_head") is not None:
            yield Finding(
                f"{_PLACE}.ignore",
                "lacks lm_head, and a target claims it: transformers gives it a scheme without a scale",
            )

    def _check_module(self, module: str, parts: Mapping[str, TensorInfo]) -> Iterator[Finding]:
        args = self._args.get(module)
        if args is None:
            spare = sorted(parts.keys() & {"weight_packed", "weight_scale", "weight_zero_point", "input_scale"})
            weight = parts.get("weight")
            if weight is not None and weight.dtype not in (*_FLOATS, torch.float64):
                spare.append(f"a weight of {str(weight.dtype).removeprefix('torch.')}")
            if spare:
                yield Finding(module, f"config.json leaves it float, but it is stored with {' and '.join(spare)}")
            return
        scheme = _known(args)
        if scheme is None or kind_of(scheme) is None:
            yield Finding(module, "its scheme is not one this tool writes, so its tensors were not checked")
            return
        need = _needed(args, scheme, parts)
        if need is None:
            what = "weight_packed" if args.format in (PACKED, MXFP4) else "weight"
            yield Finding(f"{module}.{what}", f"is missing or has no two dimensions; {args.format} needs it")
            return
        for suffix, (dtypes, shape) in need.items():
            info = parts.get(suffix)
            place = f"{module}.{suffix}"
            if info is None:
                yield Finding(place, f"is missing; {args.format} needs it, and engines serve garbage without it")
                continue
            if info.dtype not in dtypes:
                words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                yield Finding(place, f"is {str(info.dtype).removeprefix('torch.')}; {args.format} stores {words}")
            if tuple(info.shape) != shape:
                yield Finding(place, f"has shape {list(info.shape)}; {args.format} stores {list(shape)}")
        for suffix in parts.keys() - need.keys() - {"bias"}:
            yield Finding(f"{module}.{suffix}", f"{args.format} with this scheme has no such tensor")

    def _check_groups(self) -> Iterator[Finding]:
        matrices = [module for module, parts in self.stored.modules.items() if _is_matrix(module, parts)]
        for group in fused_groups(matrices):
            kinds = {module: _words(self._args.get(module)) for module in group}
            if len(set(kinds.values())) > 1:
                what = ", ".join(f"{module} is {kind}" for module, kind in kinds.items())
                yield Finding(group[0], f"vLLM computes these as one linear, which needs one scheme: {what}")
                continue
            for suffix in ("input_scale", "input_zero_point"):
                values = {
                    m: float(self.stored.tensor(f"{m}.{suffix}")) for m in group if suffix in self.stored.modules[m]
                }
                if len(set(values.values())) > 1:
                    what = ", ".join(f"{module} has {value}" for module, value in values.items())
                    yield Finding(f"{group[0]}.{suffix}", f"engines use one value for the fused linear: {what}")

    def _check_files(self) -> Iterator[Finding]:
        files = {info.file for info in self.stored.infos.values()}
        if len(files) == 1 and files != {"model.safetensors"}:
            yield Finding(next(iter(files)), "transformers looks for model.safetensors only")
        if len(files) > 1 and not (self.stored.path / self.index_name).is_file():
            yield Finding(self.index_name, f"is missing, and the weights are in {len(files)} files")

    def _claimed(self, module: str) -> QuantizationScheme | None:
        return None if self._ignores(module) else self._scheme_for(module)

    def _ignores(self, module: str) -> bool:
        return self.parsed is None or any(
            _fits(module, pattern) for pattern in self.parsed.ignore or [] if pattern != "Linear"
        )

    def _scheme_for(self, module: str) -> QuantizationScheme | None:
        """The group whose target claims a module: an exact name before a pattern, a pattern before the class."""
        if self.parsed is None:
            return None
        for rank in range(3):
            for group in self.parsed.config_groups.values():
                if isinstance(group, QuantizationScheme) and any(
                    _rank(target) == rank and _fits(module, target) for target in group.targets
                ):
                    group.format = group.format or CompressionFormat(self.parsed.format)
                    return group
        return None


def _block_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def _is_matrix(module: str, parts: Mapping[str, TensorInfo]) -> bool:
    weight = parts.get("weight_packed") or parts.get("weight")
    return weight is not None and len(weight.shape) == 2 and not is_embedding(f"{module}.weight")


def _rank(target: str) -> int:
    return 1 if target.startswith("re:") else 2 if target == "Linear" else 0


def _fits(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in ("Linear", module)


def _known(args: QuantizationScheme) -> LinearScheme | None:
    try:
        return scheme_of(args)
    except ValueError:
        return None


def _words(args: QuantizationScheme | None) -> str:
    if args is None:
        return "float"
    scheme = _known(args)
    return str(scheme) if scheme else repr(args)


def _needed(args: QuantizationScheme, scheme: LinearScheme, parts: Mapping[str, TensorInfo]) -> _Need | None:
    """Last part of the name → (types, shape) of every tensor a loader asks for; None without a weight to go by."""
    weight, bits = scheme.weight, 4 if scheme.weight.dtype in (QDType.INT4, QDType.MXFP4) else 8
    packed = args.format in (PACKED, MXFP4)
    info = parts.get("weight_packed" if packed else "weight")
    if info is None or len(info.shape) != 2:
        return None
    rows, columns = info.shape
    scale_info = parts.get("weight_scale")
    if args.format == MXFP4:
        columns *= 2
    elif packed:
        columns *= 32 // bits
        if weight.scope is QScope.PER_GROUP and scale_info is not None and len(scale_info.shape) == 2:
            columns = min(columns, scale_info.shape[1] * weight.group_size)  # the last word may be partly filled
    groups = columns // weight.group_size if weight.scope is QScope.PER_GROUP else 1
    shape: tuple[int, ...] = (rows, groups)
    if weight.is_mx:
        shape = (rows, -(-columns // 32))
    elif weight.scope is QScope.PER_TENSOR:
        shape = (1,)
    elif weight.scope is QScope.PER_BLOCK:
        shape = (-(-rows // weight.block[0]), -(-columns // weight.block[1]))
    code_types = {PACKED: torch.int32, INTS: torch.int8, MXFP4: torch.uint8}
    need: _Need = {
        info.name.rpartition(".")[2]: ((code_types.get(str(args.format), torch.float8_e4m3fn),), tuple(info.shape)),
        "weight_scale": ((torch.uint8,) if weight.is_mx else _FLOATS, shape),
    }
    if args.format == PACKED:
        need["weight_shape"] = ((torch.int64, torch.int32), (2,))
    if not weight.symmetric:
        zero_rows = -(-rows * bits // 32) if args.format == PACKED else rows
        need["weight_zero_point"] = ((torch.int32 if args.format == PACKED else torch.int8,), (zero_rows, groups))
    if scheme.act.is_static:
        need["input_scale"] = (_FLOATS, (1,))
        if not scheme.act.symmetric:
            need["input_zero_point"] = ((torch.int8,), (1,))
    return need
