"""Tiny random checkpoints, written as a model hub would hand them out; seconds on a CPU and the same bytes every time.

Names and shapes are written down here by hand, not asked of transformers, so that they can contradict the code under
test. Every `t_*` function writes a directory and returns its path.

| function | what it is |
|---|---|
| t_dense | 2 layers, hidden 64, 4 heads, 2 KV heads, bfloat16, three shards with an index |
| t_bias  | the same with a bias on every linear that its family allows |
| t_tied  | embedding and head are one tensor, stored once |
| t_fp8   | linears in float8_e4m3fn with block scales, widths no multiple of 128; and the same weights in bfloat16 |
| t_mtp   | t_dense and tensors that the module tree has no place for |
| t_gemma2 | four norms a layer: an architecture of no known family, whose layer has parts of its own |
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCABULARY = 320  # of the model; the tokenizer has fewer, as published models do
SHARDS = 3
BLOCK = 128  # side of a block that shares one scale in block-FP8 checkpoints
FP8_MAX = 448.0  # largest finite float8_e4m3fn

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_PAIRS = ("Ġ t", "h e", "Ġ a", "i n", "r e", "Ġt he", "o n", "e r", "Ġ s", "a t", "o r", "e n", "Ġ o", "i s", "i t")

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": None},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 32},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "head_dim": 16},
}
_DTYPE_WORDS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def t_dense(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = SHARDS,
    **config: Any,
) -> Path:
    """Write a dense model of `family` (llama, qwen2, qwen3, mistral); `config` overrides keys of its config.json."""
    full = model_config(family, dtype, **config)
    return write_checkpoint(directory, full, dense_tensors(full, seed, dtype), shards=shards)


def t_bias(directory: Path, family: str = "llama", **options: Any) -> Path:
    """Write a model whose linears have biases: all seven of llama, q, k and v of qwen2."""
    extra = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    return t_dense(directory, family, **extra, **options)


def t_tied(directory: Path, family: str = "llama", **options: Any) -> Path:
    """Write a model whose head is its embedding: `tie_word_embeddings`, no `lm_head.weight` stored."""
    return t_dense(directory, family, tie_word_embeddings=True, **options)


def t_mtp(directory: Path, family: str = "llama", **options: Any) -> Path:
    """Write a dense model with a prediction block behind its last layer, and tensors of an unknown prefix."""
    full = model_config(family, torch.bfloat16, num_nextn_predict_layers=1, **options)
    tensors = dense_tensors(full, 0, torch.bfloat16)
    generator = torch.Generator().manual_seed(99)
    hidden, tail = full["hidden_size"], f"model.layers.{full['num_hidden_layers']}"
    for name, shape in layer_shapes(full, tail).items():
        tensors[name] = _values(name, shape, generator).to(torch.bfloat16)
    for name, shape in {
        f"{tail}.eh_proj.weight": (hidden, 2 * hidden),
        f"{tail}.enorm.weight": (hidden,),
        f"{tail}.hnorm.weight": (hidden,),
        f"{tail}.shared_head.norm.weight": (hidden,),
        "visual.patch_embed.weight": (8, 3, 2, 2),
    }.items():
        tensors[name] = _values(name, shape, generator).to(torch.bfloat16)
    tensors["visual.steps"] = torch.tensor([3, 1, 4], dtype=torch.int64)
    return write_checkpoint(directory, full, tensors)


def t_gemma2(directory: Path) -> Path:
    """Write a model whose layer has two norms more than usual, each of which multiplies by 1 + its weight."""
    more = {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}
    full = model_config("llama", torch.bfloat16, **more, model_type="gemma2", attention_bias=False)
    del full["mlp_bias"]
    tensors = dense_tensors(full, 0, torch.bfloat16)
    for index in range(full["num_hidden_layers"]):
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"model.layers.{index}.{norm}.weight"] = torch.full((64,), 0.25, dtype=torch.bfloat16)
    return write_checkpoint(directory, full, tensors)


def t_fp8(directory: Path, plain: Path, family: str = "llama", **options: Any) -> tuple[Path, Path]:
    """Write a block-FP8 model to `directory` and what its weights mean, in bfloat16, to `plain`.

    weight = code times the scale of its 128 x 128 block, in float32, then rounded to bfloat16. Hidden size 192 and
    width 320 leave partial blocks everywhere; one weight and its scale lie in different shards.
    """
    full = model_config(family, torch.bfloat16, **{"hidden_size": 192, "intermediate_size": 320, **options})
    stored, decoded = {}, {}
    for name, value in dense_tensors(full, 0, torch.float32).items():
        if ".layers." in name and name.endswith("_proj.weight"):
            codes, scale = _fp8_blocks(value)
            stored[name], stored[f"{name}_scale_inv"] = codes, scale
            decoded[name] = _fp8_decoded(codes, scale).to(torch.bfloat16)
        else:
            stored[name] = decoded[name] = value.to(torch.bfloat16)
    how = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    split = "model.layers.0.mlp.up_proj.weight_scale_inv"
    write_checkpoint(directory, {**full, "quantization_config": how}, stored, apart=split)
    return directory, write_checkpoint(plain, full, decoded)


def model_config(family: str, dtype: torch.dtype, **overrides: Any) -> dict[str, Any]:
    """config.json of `family` as a dict."""
    return {"model_type": family, **_COMMON, **_FAMILIES[family], "dtype": _DTYPE_WORDS[dtype], **overrides}


def layer_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of the decoder layer called `prefix`."""
    hidden, width, family = config["hidden_size"], config["intermediate_size"], config["model_type"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    biased = set()
    if config.get("attention_bias"):
        biased |= {name for name in linears if name.startswith("self_attn")}
    if config.get("mlp_bias"):
        biased |= {name for name in linears if name.startswith("mlp")}
    if family == "qwen2":
        biased |= {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.input_layernorm.weight": (hidden,)}
    for name, shape in linears.items():
        shapes[f"{prefix}.{name}.weight"] = shape
        if name in biased:
            shapes[f"{prefix}.{name}.bias"] = shape[:1]
    if family == "qwen3":
        shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
    return shapes | {f"{prefix}.post_attention_layernorm.weight": (hidden,)}


def dense_tensors(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Name → random tensor of the whole model, in the order of the forward."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"model.layers.{index}")
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return {name: _values(name, shape, generator).to(dtype) for name, shape in shapes.items()}


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    shards: int = SHARDS,
    apart: str | None = None,
) -> Path:
    """Write config, tokenizer, generation config and weights; the tensor `apart` goes to the last shard."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    # A temperature without sampling: transformers refuses to save such a pair, yet published models have it.
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "do_sample": False, "temperature": 0.9})
    write_tokenizer(directory)
    names = [name for name in tensors if name != apart] + ([apart] if apart else [])
    share = math.ceil(len(names) / shards)
    where: dict[str, str] = {}
    for index in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index * share : (index + 1) * share]
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        _write_json(
            directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where}
        )
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE with `<s>` 0 (put before every text), `</s>` 1, `<pad>` 2 and a chat template."""
    special = ["<s>", "</s>", "<pad>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + [pair.replace(" ", "") for pair in _PAIRS]
    merges = [(pair.split(" ")[0], pair.split(" ")[1]) for pair in _PAIRS]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "chat_template": CHAT_TEMPLATE,
            "eos_token": "</s>",
            "model_max_length": 512,
            "pad_token": "<pad>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.1 * noise
    return noise / math.sqrt(shape[-1])


def _fp8_blocks(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (math.ceil(size / BLOCK) for size in weight_OI.shape)
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scale[row, column] = weight_OI[block].abs().max() / FP8_MAX
            codes_OI[block] = (weight_OI[block] / scale[row, column]).to(torch.float8_e4m3fn)
    return codes_OI, scale


def _fp8_decoded(codes_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    weight_OI = codes_OI.float()
    for row in range(weight_OI.shape[0]):
        for block in range(scale.shape[1]):
            weight_OI[row, block * BLOCK : (block + 1) * BLOCK] *= scale[row // BLOCK, block]
    return weight_OI


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
