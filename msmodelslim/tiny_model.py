"""A small random model and samples that differ, for checks that need some model and no particular one.

Weights are random with a factor for each block of rows and columns, over several powers of two, and each sample uses
tokens of its own whose embeddings lie in channels of their own. So samples differ much in the ranges they show, and a
statistic that misses some of them gives another result.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_BLOCK = 16  # rows and columns that share a factor
_OCTAVES = 2.0  # standard deviation of a factor's logarithm to base 2
_BANDS = 8  # groups of tokens, and of channels
_VOCABULARY = 256
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": _VOCABULARY,
}


def write_tiny_model(directory: Path) -> Path:
    """Write a Llama of two layers, 0.5 MB, without a tokenizer; the same bytes every time. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: _values(name, shape, generator).to(torch.bfloat16) for name, shape in _shapes().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_samples(file: Path, count: int, config: Mapping[str, Any] = _CONFIG) -> Path:
    """Write `count` tokenized samples of different lengths as JSONL; returns `file`.

    Args:
        config: of the model, for the size of its vocabulary.
    """
    vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", _VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    width = vocabulary // _BANDS
    with file.open("w", encoding="utf-8") as lines:
        for index in range(count):
            ids = torch.randint(width, (6 + 5 * index % 11,), generator=generator) + width * (index % _BANDS)
            lines.write(json.dumps({"input_ids": ids.tolist()}) + "\n")
    return file


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, width, heads = _CONFIG["hidden_size"], _CONFIG["intermediate_size"], _CONFIG["num_attention_heads"]
    keys = hidden // heads * _CONFIG["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCABULARY, hidden)}
    for index in range(_CONFIG["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        shapes |= {f"model.layers.{index}.{part}.weight": shape for part, shape in parts.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (_VOCABULARY, hidden)}


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.1 * noise
    if "embed" in name:
        rows, columns = shape
        own = torch.arange(rows).unsqueeze(1) * _BANDS // rows == torch.arange(columns) * _BANDS // columns
        return noise * torch.where(own, 1.0, 0.02)
    blocks = [size // _BLOCK for size in shape]
    factor = torch.exp2(_OCTAVES * torch.randn(blocks, generator=generator))
    factor = factor.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return noise * factor / (factor.square().mean() * shape[1]).sqrt()
