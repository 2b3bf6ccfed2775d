"""Block FP8: float8_e4m3fn weights where each block of rows and columns shares one scale.

Letters: O output rows, I input columns. weight = code times the scale of its block; blocks at the edges may be partial,
so there are ceil(O / block rows) x ceil(I / block columns) scales.
Source: the weights section of github.com/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from msmodelslim.errors import InvalidModelError
from msmodelslim.model.shard_header import TensorInfo

SCALE_SUFFIX = "_scale_inv"  # a factor, whatever the name says
_CHUNK_ELEMENTS = 1 << 22  # float32 elements a step of decoding: 16 MiB


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, None for a checkpoint that is not quantized.

    Raises:
        InvalidModelError: the checkpoint is quantized in any other way; the message names the method.
    """
    for place in ("", "text_config."):
        holder = config.get("text_config") or {} if place else config
        for key in ("quantization_config", "compression_config"):
            how = holder.get(key)
            if how is None:
                continue
            match how:
                case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if (
                    rows > 0 and columns > 0
                ):
                    return rows, columns
            raise InvalidModelError(
                f"config.json: {place}{key}: the weights are already quantized by {_method(how)}; only "
                "float8 with weight_block_size (quant_method fp8) can be read",
                "give the original checkpoint, in bfloat16, float16 or float32",
            )
    return None


def _method(how: Any) -> str:
    if not isinstance(how, dict):
        return repr(how)
    if how.get("quant_method") == "fp8":
        return f"'fp8' with weight_block_size {how.get('weight_block_size')!r}"
    return repr(how.get("quant_method") or ", ".join(sorted(how)) or "an unnamed method")


def check_scales(tensors: Mapping[str, TensorInfo], block: tuple[int, int] | None) -> list[str]:
    """A sentence for each float8 tensor whose values cannot be known: no scale, or one of another shape."""
    problems = []
    for name, info in tensors.items():
        if info.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            continue
        scale = tensors.get(name + SCALE_SUFFIX)
        if block is None:
            problems.append(f"{info.file}: {name} is float8, but config.json has no quantization_config")
        elif info.dtype != torch.float8_e4m3fn or len(info.shape) != 2:
            problems.append(f"{info.file}: {name} is {info.dtype} of shape {info.shape}, not a float8_e4m3fn matrix")
        elif scale is None:
            problems.append(f"{info.file}: {name} is float8, but there is no {name}{SCALE_SUFFIX}")
        elif scale.shape != scale_shape(info.shape, block):
            problems.append(
                f"{scale.file}: {scale.name} has shape {scale.shape}, but {info.shape} in blocks of {block} needs "
                f"{scale_shape(info.shape, block)}"
            )
    return problems


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a matrix."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def decode(codes_OI: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, multiplied out in float32, some rows at a time.

    Args:
        codes_OI: float8_e4m3fn.
        scale: [ceil(O / block[0]), ceil(I / block[1])], any floating type.
    """
    rows, columns = codes_OI.shape
    weight_OI = torch.empty(rows, columns, dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // (block[0] * columns)) * block[0]
    for top in range(0, rows, step):
        part_OI = codes_OI[top : top + step].float()
        part_scale = scale[top // block[0] : math.ceil((top + step) / block[0])].float()
        scale_OI = part_scale.repeat_interleave(block[1], dim=1)[:, :columns].repeat_interleave(block[0], dim=0)
        weight_OI[top : top + step] = part_OI.mul_(scale_OI[: part_OI.shape[0]])
    return weight_OI
