"""ascendV1: what vllm-ascend and MindIE load. Weights beside a description that names each tensor's kind."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from msmodelslim import __version__
from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import LinearScheme
from msmodelslim.processor.base import RunContext
from msmodelslim.registry import register
from msmodelslim.saver.ascendv1_kinds import (
    FLOAT_KIND,
    LAYOUTS,
    OLD_FP8_KIND,
    PER_GROUP,
    PLAIN,
    ROW_PARTS,
    STATIC_SCOPES,
    TWO_LEVEL,
    group_size_of,
    kind_of,
    tensors_of,
    variant_of,
)
from msmodelslim.saver.ascendv1_reader import DESCRIPTION, AscendV1Reader
from msmodelslim.saver.base import BaseSaver
from msmodelslim.saver.json_text import remove_everywhere
from msmodelslim.saver.shards import TensorSpec
from msmodelslim.saver.tied_head import HEAD_NAMES, outermost

_Support = dict[str, dict[str, tuple[str, ...]]]  # layer kind → kind → variants that the engine's reader computes right


def _plain(*kinds: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(kinds, (PLAIN,))


_LINEAR_AND_MOE = ("W8A8_DYNAMIC", "W8A8FP8_DYNAMIC", "W8A8_MXFP8", "W4A8_MXFP", "W4A4_MXFP4")
_VLLM_ASCEND_027: _Support = {
    "linear": _plain(*_LINEAR_AND_MOE, "W8A8", "W8A8_MIX", "W8A16", "W4A4_DYNAMIC"),
    "moe": _plain(*_LINEAR_AND_MOE, "W4A8_DYNAMIC", "W4A16_MXFP4") | {"W4A16": (PER_GROUP,)},
}
#: Its reader of int4 groups multiplies the two scales and looks at no offset, so only symmetric ones come out right.
_VLLM_ASCEND_023: _Support = {
    "linear": _VLLM_ASCEND_027["linear"] | {"W4A8_DYNAMIC": (PLAIN, TWO_LEVEL)},
    "moe": _VLLM_ASCEND_027["moe"] | {"W4A8_DYNAMIC": (PLAIN, TWO_LEVEL), "W8A8_MIX": (PLAIN,)},
}
#: engine and version → what it reads. "unchecked": every layout, whether or not anything reads it.
TARGETS: dict[str, _Support] = {
    "vllm-ascend-0.27": _VLLM_ASCEND_027,
    "vllm-ascend-0.23": _VLLM_ASCEND_023,
    "unchecked": {"linear": LAYOUTS, "moe": LAYOUTS},
}
#: `model_quant_type` is the last of these that occurs. W4A8_DYNAMIC does not count: its readers go by the other kinds.
_PRIORITY = (
    *(FLOAT_KIND, "W8A16", "W4A16", "W8A8_DYNAMIC", "W8A8_MIX", "W8A8", OLD_FP8_KIND, "W8A8FP8_DYNAMIC", "W8A8_MXFP8"),
    *("W4A16_MXFP4", "W4A8_MXFP", "W4A4_DYNAMIC", "W4A4_MXFP4", "W4A4_MXFP4_DUALSCALE"),
)
_EXPERT = re.compile(r"\.experts\.\d+\.")


def layer_kind(module: str) -> str:
    """ "moe" for a routed expert's linear, else "linear": engines have a reader for each."""
    return "moe" if _EXPERT.search(module) else "linear"


@register("ascendv1_saver")
class AscendV1Saver(BaseSaver):
    """Writes `quant_model_weights*.safetensors` and `quant_model_description.json`."""

    file_pattern = "quant_model_weights{suffix}.safetensors"
    numbered = True
    always_index = True
    keeps_equal_head = True
    reader = AscendV1Reader

    class Config(BaseSaver.Config, frozen=True):
        target: Literal["vllm-ascend-0.27", "vllm-ascend-0.23", "unchecked"] = Field(
            "vllm-ascend-0.27",
            description="engine and version that shall load it; unchecked writes every layout there is",
        )

    def __init__(
        self, config: "AscendV1Saver.Config", context: RunContext, save_path: Path, leader: int | None = None
    ) -> None:
        super().__init__(config, context, save_path, leader)
        self._schemes: dict[str, LinearScheme] = {}

    def export(self, name: str, module: QuantLinear) -> tuple[dict[str, Tensor], str]:
        kind = self._kind(name, module)
        self._schemes[name] = module.scheme
        parts = ROW_PARTS if name in self.row_parallel else 1
        tensors = tensors_of(kind, module, self.context.adapter.dtype, parts, name)
        self._remark_clamped(name, tensors.get("quant_bias"))
        return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}, kind

    def documents(self, config_text: str, tensors: dict[str, TensorSpec]) -> dict[str, str]:
        description: dict[str, Any] = {name: self._label(name) for name in tensors}
        if outermost(tensors, HEAD_NAMES) is None:
            description["lm_head.weight"] = FLOAT_KIND  # the reader looks it up even when it is the embedding
        description["version"] = "1.0.0"
        description["model_quant_type"] = max([FLOAT_KIND, *self.kinds.values()], key=_priority)
        description["group_size"] = self._group_size()
        served = str(self.context.adapter.dtype).removeprefix("torch.")
        description["metadata"] = {
            "producer": f"msmodelslim {__version__}",
            "served_dtype": served,
            "target": self.config.target,
        }
        if any(kind in STATIC_SCOPES for kind in self.kinds.values()):
            fp16 = self.context.adapter.dtype is torch.float16
            self.notes.append(
                f"deq_scale is stored for engines that serve in {'float16' if fp16 else 'bfloat16'}: served in "
                f"{'bfloat16' if fp16 else 'float16'} this model gives garbage without an error"
            )
        return {
            DESCRIPTION: json.dumps(description, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
            "config.json": remove_everywhere(config_text, "quantization_config"),
        }

    def _kind(self, name: str, module: QuantLinear) -> str:
        kind, variant = kind_of(module.scheme), variant_of(module.scheme.weight)
        support = TARGETS[self.config.target][layer_kind(name)]
        if kind is None or variant not in support.get(kind, ()):
            what = "routed experts" if layer_kind(name) == "moe" else "linears"
            readable = ", ".join(f"{k} {v}".strip() for k, variants in sorted(support.items()) for v in variants)
            raise UnsupportedError(
                f"{name}: no reader of ascendV1 in {self.config.target} takes {module.scheme} "
                f"({f'{kind} {variant}'.strip() if kind else 'no kind fits'}); for {what} it has {readable}",
                "choose a scheme of one of these, exclude the module, or set the saver's target",
            )
        self._refuse_size(name, kind, module)
        if kind == "W4A8_DYNAMIC" and (why := self.unknown_parts(name)):
            raise UnsupportedError(
                f"{name}: {kind} of ascendV1 depends on whether engines split the linear along its input, but {why}",
                "choose another scheme for it",
            )
        return OLD_FP8_KIND if kind == "W8A8FP8_DYNAMIC" and self.config.target == "unchecked" else kind

    def _remark_clamped(self, name: str, quant_bias_O: Tensor | None) -> None:
        if quant_bias_O is None or quant_bias_O.is_meta:
            return
        ends = torch.iinfo(torch.int32)
        clamped = int(((quant_bias_O == ends.max) | (quant_bias_O == ends.min)).sum())
        if clamped:
            self.remarks.append(
                f"{name}: the bias of {clamped} rows is too large for int32 in steps of weights this small, so they "
                "lose most of it; exclude the module or choose a dynamic scheme"
            )

    def _refuse_size(self, name: str, kind: str, module: QuantLinear) -> None:
        factor = {"W4A16": 8, "W4A8_MXFP": 32, "W4A4_MXFP4": 32, "W4A16_MXFP4": 32}.get(kind, 1)
        if kind == "W8A8_MXFP8" and layer_kind(name) == "moe":
            factor = 64
        factor = module.scheme.weight.dual_block or factor
        if module.in_features % factor:
            raise UnsupportedError(
                f"{name}: {kind} of ascendV1 needs input features in multiples of {factor}, not {module.in_features}",
                "exclude the module or choose another scheme for it",
            )

    def _label(self, tensor: str) -> str:
        module, _, suffix = tensor.rpartition(".")
        return FLOAT_KIND if suffix == "bias" else self.kinds.get(module, FLOAT_KIND)

    def _group_size(self) -> int:
        """The description has one value for all modules."""
        wanted: dict[int, str] = {}
        for name, kind in self.kinds.items():
            size = group_size_of(kind, self._schemes[name].weight)
            if size is not None:
                wanted.setdefault(size, name)
        if len(wanted) > 1:
            what = " and ".join(f"{size} ({name}: {self.kinds[name]})" for size, name in sorted(wanted.items()))
            raise UnsupportedError(
                f"ascendV1 has one group_size for a model, and the modules need {what}",
                "use one group size, and no MX kind beside W4A8_DYNAMIC",
            )
        return next(iter(wanted), 0)


def _priority(kind: str) -> int:
    return _PRIORITY.index(kind) if kind in _PRIORITY else -1
