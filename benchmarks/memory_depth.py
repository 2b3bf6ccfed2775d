"""Memory does not grow with depth: `python benchmarks/memory_depth.py [--large]`.

Makes Llama-shaped checkpoints of the same layer, 4, 16 and 64 times (and one of about 8 B parameters with --large),
quantizes each with one thread, and sets the peak resident memory against the size of one layer. A recipe without data
also shows how near the run is to the speed of the disk: bytes read and written a second, against a plain copy.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from workload import measure, quant_command, store

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMALL = BASE | {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
LARGE = BASE | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SAMPLES, LENGTH = 16, 256
RECIPES = {
    "W8A8 dynamic": "{dtype: int8, scope: per_token, symmetric: true, method: minmax}",
    "W8A8 static": "{dtype: int8, scope: per_tensor, symmetric: true, method: minmax}",
}


def make_model(folder: Path, config: dict[str, object], layers: int) -> int:
    """Write a checkpoint of `layers` equal layers, a shard a layer; returns the bytes of one layer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    width, inner, vocabulary = (int(str(config[k])) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = width // int(str(config["num_attention_heads"])) * int(str(config["num_key_value_heads"]))
    shapes = {
        **{f"self_attn.{n}_proj": (r, width) for n, r in (("q", width), ("k", kv), ("v", kv), ("o", width))},
        **{f"mlp.{n}_proj": (inner, width) for n in ("gate", "up")},
        "mlp.down_proj": (width, inner),
    }
    generator = torch.Generator().manual_seed(0)
    layer = {n: torch.empty(s, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator) for n, s in shapes.items()}
    layer |= {n: torch.ones(width, dtype=torch.bfloat16) for n in ("input_layernorm", "post_attention_layernorm")}
    shards = [{f"model.layers.{index}.{n}.weight": t for n, t in layer.items()} for index in range(layers)]
    table = torch.empty(vocabulary, width, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    shards.append({"model.embed_tokens.weight": table, "model.norm.weight": layer["input_layernorm"]})
    shards.append({"lm_head.weight": table})
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(tensor.nbytes for tensor in layer.values())


def write_recipe(folder: Path, act: str, vocabulary: int) -> Path:
    """W8A8 with this activation half, on random token ids."""
    ids = torch.randint(0, vocabulary, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    dataset = folder / "samples.jsonl"
    dataset.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids))
    recipe = folder / "recipe.yaml"
    weight = "{dtype: int8, scope: per_channel, symmetric: true, method: minmax}"
    recipe.write_text(
        "apiversion: modelslim_v1\nmetadata: {config_id: benchmark}\nspec:\n"
        f"  process: [{{type: linear_quant, qconfig: {{act: {act}, weight: {weight}}}}}]\n"
        f"  save: [{{type: compressed_tensors}}]\n  dataset: {dataset}\n"
    )
    return recipe


def copy_rate(source: Path, target: Path) -> float:
    """Bytes read and written a second by a plain copy of the directory."""
    start = time.perf_counter()
    shutil.copytree(source, target)
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in target.iterdir())
    shutil.rmtree(target)
    return 2 * size / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also about 8 B parameters; needs 30 GB of disk")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    table = Table(title="peak memory over depth, one thread", title_justify="left")
    headings = ("recipe", "layers", "one layer MiB", "activations MiB", "peak RSS MiB", "of 3 layers + act. + 600")
    for heading in (*headings, "seconds", "of a plain copy's rate"):
        table.add_column(heading, justify="right")
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for config, layers in [(SMALL, 4), (SMALL, 16), (SMALL, 64)] + ([(LARGE, 32)] if options.large else []):
            folder = Path(name) / f"model{layers}"
            layer_mib = make_model(folder, config, layers) / 2**20
            rate = copy_rate(folder, Path(name) / "copy")
            for title, act in RECIPES.items():
                if title == "W8A8 static" and config is LARGE:
                    continue  # hours of forward on two cores; the memory of a layer is the same
                recipe = write_recipe(Path(name), act, int(str(config["vocab_size"])))
                out = Path(name) / "out"
                run = measure(quant_command(folder, out, recipe, "--device_id", "0", "--threads", "1"))
                report = json.loads((out / "quant_report.json").read_text())
                moved = report["output"]["source_bytes"] + report["output"]["bytes"]
                act_mib = SAMPLES * LENGTH * int(str(config["hidden_size"])) * 2 / 2**20 if "static" in title else 0.0
                limit = 3 * layer_mib + act_mib + 600
                row = {
                    "recipe": title,
                    "layers": layers,
                    "layer_mib": layer_mib,
                    "activations_mib": act_mib,
                    "peak_rss_mib": run.peak_rss_mib,
                    "of_limit": run.peak_rss_mib / limit,
                    "seconds": run.wall_s,
                    "of_copy_rate": moved / report["seconds"]["layers"] / rate,
                }
                rows.append(row)
                cells = (row["layer_mib"], row["activations_mib"], row["peak_rss_mib"])
                table.add_row(
                    title,
                    str(layers),
                    *(f"{cell:.0f}" for cell in cells),
                    f"{row['of_limit']:.2f}",
                    f"{row['seconds']:.1f}",
                    f"{row['of_copy_rate']:.2f}",
                )
                shutil.rmtree(out)
            shutil.rmtree(folder)
    Console(width=140).print(table)
    store("memory_depth", {"rows": rows})


if __name__ == "__main__":
    main()
