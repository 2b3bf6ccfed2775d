"""What vllm-ascend's ascendV1 reader asks a directory for, restated from docs/formats.md and from nothing of our code.

Level 1, parse: every module's kind is looked up as the engine does it, fused modules and experts included. Level 2,
shapes: the parameters that the kind's class creates are compared with the safetensors headers.

Letters: N output rows, K input columns.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

BF16, F32, I8, U8, I32, I64 = torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int32, torch.int64
FP8 = torch.float8_e4m3fn

#: kind → layers that vllm-ascend at commit 182b75ea84 registers a class for
REGISTRY = {
    "W8A8": "linear",
    "W8A8_DYNAMIC": "linear moe",
    "W8A8_MIX": "linear",
    "W8A16": "linear",
    "W4A8_DYNAMIC": "moe",
    "W4A16": "moe",
    "W4A4_DYNAMIC": "linear",
    "W8A8_MXFP8": "linear moe",
    "W4A8_MXFP": "linear moe",
    "W4A4_MXFP4": "linear moe",
    "W4A16_MXFP4": "moe",
    "W8A8FP8_DYNAMIC": "linear moe",
}
#: 0.23 read int4 weights of dense layers, too, and mixed kinds of experts
OLDER = REGISTRY | {"W4A8_DYNAMIC": "linear moe", "W8A8_MIX": "linear moe"}
#: the fused modules of the dense families, from the vLLM model classes
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROW_PARALLEL = ("o_proj", "down_proj")


class LoaderError(Exception):
    """What the engine would stop with, or would not notice."""


class Engine:
    """The engine's view of a model: which linears it has, of which size.

    Args:
        directory: the artifact.
        linears: full name → (N, K, has a bias), from the model's own shapes.
        registry: the engine's version.
        served: type of the model.
    """

    def __init__(
        self,
        directory: Path,
        linears: dict[str, tuple[int, int, bool]],
        registry: dict[str, str] | None = None,
        served: torch.dtype = torch.bfloat16,
    ) -> None:
        self.directory = directory
        self.linears = linears
        self.registry = registry or REGISTRY
        self.served = served
        self.headers: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

    def load(self) -> None:
        """Levels 1 and 2; raises the first thing that is wrong."""
        self._config()
        description = self._description()
        self._headers()
        used: set[str] = set()
        for name, (rows, columns, bias) in self.linears.items():
            kind = self._kind(description, name)
            wanted = self._parameters(kind, name, rows, columns, bias, description)
            for suffix, (dtypes, shape) in wanted.items():
                tensor = f"{name}.{suffix}"
                if tensor not in self.headers:
                    raise LoaderError(f"{tensor} is not in the files: the parameter keeps what memory held")
                dtype, found = self.headers[tensor]
                if found != shape or dtype not in dtypes:
                    raise LoaderError(f"{tensor} is {dtype} {found}, the {kind} class has {dtypes} {shape}")
                used.add(tensor)
            for spare in ("weight_scale", "weight_offset"):
                if kind == "W8A8":
                    used.add(f"{name}.{spare}")
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            if description[name] != "FLOAT":  # KeyError: the engine's own
                raise LoaderError(f"{name} is {description[name]}")
        strays = {name for name in self.headers if name.rpartition(".")[0] in self.linears} - used
        if strays:
            raise LoaderError(f"There is no module or parameter named {sorted(strays)[0]}")

    def _config(self) -> None:
        config = json.loads((self.directory / "config.json").read_text())
        if "quantization_config" in config or "quantization_config" in config.get("text_config", {}):
            raise LoaderError("Quantization method specified in the model config does not match")

    def _description(self) -> dict[str, Any]:
        path = self.directory / "quant_model_description.json"
        if not path.is_file():
            raise LoaderError("ModelSlim Quantization Config Not Found")
        return json.loads(path.read_text())

    def _headers(self) -> None:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            for file in set(json.loads(index.read_text())["weight_map"].values()):
                if not (self.directory / file).is_file():
                    raise LoaderError("Weight files referenced in index but missing")
        for file in sorted(self.directory.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 # no mapping, only a method of that name
                    tensor = opened.get_tensor(name)
                    self.headers[name] = (tensor.dtype, tuple(tensor.shape))

    def _kind(self, description: dict[str, Any], name: str) -> str:
        keys = {key.replace("weight_packed", "weight"): value for key, value in description.items()}
        layer = "moe" if re.search(r"\.experts\.\d+\.", name) else "linear"
        if layer == "moe":
            first = re.sub(r"\.experts\.\d+\.", ".experts.0.", name)
            place = first.rpartition(".")[0]
            kinds = {keys[f"{place}.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")}
        else:
            parent, _, last = name.rpartition(".")
            parts = next((parts for parts in PACKED.values() if last in parts), (last,))
            kinds = {keys[f"{parent}.{part}.weight"] for part in parts}
        if "FLOAT" in kinds and len(kinds) > 1:
            raise LoaderError(f"Detected some but not all shards of {name} are quantized")
        if len(kinds) > 1:
            raise LoaderError(f"Not all shards of {name} are quantized with same quant type")
        kind = kinds.pop()
        if kind != "FLOAT" and layer not in self.registry.get(kind, ""):
            raise LoaderError(f"vLLM Ascend doesn't support quant_type={kind} for layer_type={layer}")
        return kind

    def _parameters(
        self, kind: str, name: str, rows: int, columns: int, bias: bool, description: dict[str, Any]
    ) -> dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
        """Suffix → (types a writer may use, shape) of what the class asks for."""
        row = name.endswith(ROW_PARALLEL)
        channel = {"weight_scale": ((F32,), (rows, 1)), "weight_offset": ((F32,), (rows, 1))}
        int8 = {"weight": ((I8,), (rows, columns))}
        deq = I64 if self.served is torch.float16 else F32
        static = int8 | {
            "input_scale": ((F32,), (1,)),
            "input_offset": ((F32,), (1,)),
            "quant_bias": ((I32,), (rows,)),
            "deq_scale": ((deq,), (rows,)),
        }
        group = description["group_size"]
        blocks = -(-columns // (group if "MXFP" in kind else 32))  # a group_size of 0 is the engine's ZeroDivisionError
        mxfp4 = {"weight": ((U8,), (rows, columns // 2)), "weight_scale": ((U8,), (rows, blocks))}
        if kind == "W4A8_DYNAMIC":
            wanted = (
                {"weight": ((I8,), (rows // 2, columns))} | channel | {"scale_bias": ((F32,), (rows, 16 if row else 1))}
            )
            if group > 0:
                if self.registry is REGISTRY:
                    raise LoaderError("The current weights use Per-Group quantization, which is no longer supported")
                second = ((F32,), (rows, columns // group))
                wanted |= {"weight_scale_second": second, "weight_offset_second": second}
        else:
            wanted = {
                "FLOAT": {"weight": ((self.served,), (rows, columns))},
                "W8A8": static,
                "W8A8_DYNAMIC": int8 | channel,
                "W8A8_MIX": static | channel,
                "W8A16": int8 | channel,
                "W4A16": {
                    "weight_packed": ((I32,), (rows, columns // 8)),
                    "weight_scale": ((self.served,), (rows, columns // max(group, 1))),
                    "weight_shape": ((I32,), (2,)),
                },
                "W4A4_DYNAMIC": int8 | channel,
                "W8A8_MXFP8": {"weight": ((FP8,), (rows, columns)), "weight_scale": ((U8,), (rows, blocks))},
                "W4A8_MXFP": mxfp4,
                "W4A4_MXFP4": mxfp4,
                "W4A16_MXFP4": mxfp4,
                "W8A8FP8_DYNAMIC": {
                    "weight": ((FP8,), (rows, columns)),
                    "weight_scale": ((F32,), (rows, 1)),
                    "weight_offset": ((self.served,), (rows, 1)),
                },
            }[kind]
        if bias:
            wanted |= {"bias": ((F32,) if kind in ("W8A8", "W8A8_MIX") else (self.served,), (rows,))}
        return wanted
