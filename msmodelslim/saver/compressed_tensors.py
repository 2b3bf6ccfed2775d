"""compressed-tensors: what transformers and vLLM load. The schemes stand in config.json, in that library's schema."""

from pathlib import Path
from typing import Any, Literal

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from pydantic import Field
from torch import Tensor

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import MX_BLOCK, LinearScheme
from msmodelslim.processor.base import RunContext
from msmodelslim.registry import register
from msmodelslim.saver.base import BaseSaver
from msmodelslim.saver.compressed_tensors_kinds import args_of, kind_of, tensors_of
from msmodelslim.saver.compressed_tensors_reader import CompressedTensorsReader
from msmodelslim.saver.json_text import remove_everywhere, set_member
from msmodelslim.saver.name_patterns import name_patterns
from msmodelslim.saver.shards import TensorSpec
from msmodelslim.saver.tied_head import is_embedding

#: what transformers 5.24 with compressed-tensors 0.20 loads and computes, on a CPU; tests load each of them
_TRANSFORMERS = {
    *("W8A8", "W8A8 act_asym", "W8A8 static", "W8A8 static act_asym", "W8A8 group", "W8A8 group asym"),
    *("W8A16", "W8A16 group", "W4A16", "W4A16 group", "W4A8", "W4A8 act_asym", "W4A8 group", "W4A8 group act_asym"),
    *("W4A4", "W4A4 asym", "W4A4 group", "W4A4 group asym"),
    *("FP8_DYNAMIC", "FP8_STATIC", "FP8_BLOCK", "MXFP4A16", "MXFP4", "MXFP8A16", "MXFP8"),
}
#: what vLLM 0.32 for CPUs serves; docs/formats.md says how that was found
_VLLM = {
    *("W8A8", "W8A8 static", "W8A8 static act_asym", "W4A16 group", "W4A16 group asym", "W4A8", "W4A8 group"),
    "FP8_DYNAMIC",
}
#: engine and version → kinds; "any": at least one of the two
TARGETS: dict[str, set[str]] = {
    "any": _TRANSFORMERS | _VLLM,
    "transformers-5.24": _TRANSFORMERS,
    "vllm-0.32": _VLLM,
}
_EXPERT_FORMATS_OF_TRANSFORMERS = ("W4A16", "W8A16", "FP8")  # it fuses experts, and knows how for these only


@register("compressed_tensors")
class CompressedTensorsSaver(BaseSaver):
    """Writes `model*.safetensors` and a `quantization_config` in config.json."""

    file_pattern = "model{suffix}.safetensors"
    reader = CompressedTensorsReader

    class Config(BaseSaver.Config, frozen=True):
        target: Literal["any", "transformers-5.24", "vllm-0.32"] = Field(
            "any", description="engine and version that shall load it; any asks that at least one of them does"
        )

    def __init__(
        self, config: "CompressedTensorsSaver.Config", context: RunContext, save_path: Path, leader: int | None = None
    ) -> None:
        super().__init__(config, context, save_path, leader)
        self._schemes: dict[str, LinearScheme] = {}

    def export(self, name: str, module: QuantLinear) -> tuple[dict[str, Tensor], str]:
        kind, target = kind_of(module.scheme), self.config.target
        fused = target == "transformers-5.24" and ".experts." in name
        kinds = {k for k in TARGETS[target] if not fused or k.startswith(_EXPERT_FORMATS_OF_TRANSFORMERS)}
        if kind not in kinds:
            raise UnsupportedError(
                f"{name}: compressed-tensors for {target} has no reader for {module.scheme} "
                f"({kind or 'the format cannot express it'}); it has {', '.join(sorted(kinds))}",
                "choose a scheme of one of these, exclude the module, or set the saver's target",
            )
        self._refuse_size(name, kind, module)
        self._schemes[name] = module.scheme
        tensors = tensors_of(module, self.context.adapter.dtype)
        return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}, kind

    def _refuse_size(self, name: str, kind: str, module: QuantLinear) -> None:
        dtype = self.context.adapter.dtype
        if module.scheme.weight.is_mx and dtype is not torch.bfloat16:
            word = str(dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"{name}: {kind} of compressed-tensors is decompressed to bfloat16, and the model is {word}",
                "convert the model to bfloat16, or choose another scheme",
            )
        width = MX_BLOCK if module.scheme.weight.is_mx else module.scheme.act.block[1] or 1
        if module.in_features % width:
            raise UnsupportedError(
                f"{name}: {kind} of compressed-tensors quantizes inputs in blocks of {width}, and {module.in_features} "
                "input features do not divide into them",
                "exclude the module or choose another scheme for it",
            )
        sizes = (module.out_features, module.in_features)
        if self.config.target == "vllm-0.32" and kind.startswith("W4A16") and any(size % 32 for size in sizes):
            raise UnsupportedError(
                f"{name}: the {kind} kernel of vllm-0.32 needs sizes in multiples of 32, not {sizes[0]} x {sizes[1]}",
                "exclude the module or set the saver's target",
            )

    def documents(self, config_text: str, tensors: dict[str, TensorSpec]) -> dict[str, str]:
        how = quantization_config(self._schemes, self._ignored(tensors))
        # A source in block FP8 has one already, which no longer holds.
        bare = remove_everywhere(config_text, "quantization_config")
        return {"config.json": set_member(bare, "quantization_config", how)}

    def _ignored(self, tensors: dict[str, TensorSpec]) -> list[str]:
        """Every matrix that stays float, by name: engines take what is not listed for quantized."""
        found = dict.fromkeys(["lm_head", *self.float_linears])
        for name, spec in tensors.items():
            module, _, suffix = name.rpartition(".")
            if suffix == "weight" and len(spec.shape) == 2 and module not in self._schemes and not is_embedding(name):
                found[module] = None
        return list(found)


def quantization_config(schemes: dict[str, LinearScheme], ignore: list[str]) -> dict[str, Any]:
    """The block of config.json, by the library's schema.

    Args:
        schemes: quantized module → scheme.
        ignore: modules that stay float.
    """
    by_scheme: dict[LinearScheme, list[str]] = {}
    for name, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(name)
    groups = {}
    for index, (scheme, names) in enumerate(by_scheme.items()):
        targets = ["Linear"] if len(by_scheme) == 1 else [f"re:{pattern}" for pattern in name_patterns(names)]
        groups[f"group_{index}"] = args_of(scheme, targets)
    formats = {str(group.format) for group in groups.values()}
    config = QuantizationConfig(
        config_groups=groups,
        format=formats.pop() if len(formats) == 1 else CompressionFormat.mixed_precision.value,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=ignore,
    )
    return config.model_dump(mode="json", exclude_none=False)
