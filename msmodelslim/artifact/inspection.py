"""What is quantized how: tables on standard output."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from msmodelslim.artifact.directory import open_directory
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import MX_BLOCK
from msmodelslim.report import REPORT_FILE
from msmodelslim.saver.shards import canonical_order
from msmodelslim.saver.stored import ROW_PARALLEL_NAMES, BaseReader, StoredModel

_LAYER = re.compile(r"(.*?\.\d+)\.")
_MOST_DEGREES = 64


def inspect_directory(path: Path) -> None:
    """Print what a directory holds: kinds and sizes, layers, tensor-parallel degrees, patterns of its report.

    Raises:
        InvalidModelError: the directory holds no model.
    """
    path = Path(path)
    opened = open_directory(path)
    stored, reader = opened.stored, opened.reader
    kinds = reader.kinds() if reader else {}
    console = Console(highlight=False)
    console.print(f"{path}: {reader.format_name if reader else 'float model'}", soft_wrap=True)
    console.print(_kind_table(stored, reader, kinds))
    console.print(_layer_table(stored, kinds))
    if reader is not None and kinds and opened.whole:
        linears = {module: reader.restore(module) for module in _one_of_each(kinds)}
        degrees = tensor_parallel_degrees(stored.config, linears)
        console.print(f"tensor-parallel degrees that fit the sizes: {', '.join(map(str, degrees))}")
    report = path / REPORT_FILE
    if report.is_file():
        console.print(_pattern_table(json.loads(report.read_text(encoding="utf-8"))))
    for finding in opened.findings:
        console.print(str(finding), markup=False, soft_wrap=True)


def tensor_parallel_degrees(config: Mapping[str, Any], linears: Mapping[str, QuantLinear]) -> list[int]:
    """Numbers of devices, up to 64, among which engines can split the linears evenly.

    Heads must divide; so must the columns of a linear that is split along its input, in whole groups, and the rows of
    any other, in whole tiles.

    Args:
        config: config.json.
        linears: full name → linear, one of each kind of place.
    """
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 0)
    kv_heads = int(text.get("num_key_value_heads") or heads)

    def fits(degree: int) -> bool:
        if heads and (heads % degree or (kv_heads % degree and degree % kv_heads)):
            return False
        return all(_splits(name, linear, degree) for name, linear in linears.items())

    return [degree for degree in range(1, _MOST_DEGREES + 1) if fits(degree)]


def _splits(name: str, linear: QuantLinear, degree: int) -> bool:
    weight = linear.scheme.weight
    if name.rpartition(".")[2] in ROW_PARALLEL_NAMES:
        unit = weight.dual_block or MX_BLOCK if weight.is_mx else weight.group_size or weight.block[1] or 1
        return linear.in_features % (unit * degree) == 0
    rows = linear.out_features
    last = name.rpartition(".")[2]
    if last in ("k_proj", "v_proj") and rows % degree:
        return True  # fewer key-value heads than devices: each keeps a copy
    return rows % ((weight.block[0] or 1) * degree) == 0


def _kind_table(stored: StoredModel, reader: BaseReader | None, kinds: Mapping[str, str]) -> Table:
    counts, sizes, floats = Counter(kinds.values()), Counter[str](), 0
    item = _item_bytes(stored)
    for module, parts in stored.modules.items():
        for info in parts.values():
            word = kinds.get(module) or str(info.dtype).removeprefix("torch.")
            sizes[word] += info.nbytes
            counts[word] += module not in kinds
            floats += info.nbytes if module not in kinds else 0
    if reader is not None:
        floats += sum(item * rows * columns for rows, columns in map(reader.size, kinds))
    total = sum(sizes.values())
    table = Table(title="what is stored how", title_justify="left")
    for heading in ("kind", "linears or tensors", "MB", "share"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for word, size in sizes.most_common():
        table.add_row(word, str(counts[word]), f"{size / 1e6:,.2f}", f"{size / total:.1%}")
    table.add_row("all", "", f"{total / 1e6:,.2f}", f"{total / floats:.1%} of the float model" if floats else "")
    return table


def _layer_table(stored: StoredModel, kinds: Mapping[str, str]) -> Table:
    """Layers in order, neighbours with the same content in one row."""
    layers: dict[str, Counter[str]] = {}
    for module, parts in stored.modules.items():
        layer = _LAYER.match(module)
        matrix = any(len(info.shape) == 2 for suffix, info in parts.items() if suffix in ("weight", "weight_packed"))
        if layer and matrix:
            layers.setdefault(layer[1], Counter())[kinds.get(module, "float")] += 1
    table = Table(title="linears by layer", title_justify="left")
    table.add_column("layers")
    table.add_column("content")
    runs: list[tuple[str, str, str]] = []
    for layer_name in canonical_order(layers):
        content = ", ".join(f"{count} × {kind}" for kind, count in sorted(layers[layer_name].items()))
        if runs and runs[-1][2] == content and _same_stack(runs[-1][0], layer_name):
            runs[-1] = (runs[-1][0], layer_name, content)
        else:
            runs.append((layer_name, layer_name, content))
    for first, last, content in runs:
        table.add_row(first if first == last else f"{first} to {last.rpartition('.')[2]}", content)
    return table


def _pattern_table(report: Mapping[str, Any]) -> Table:
    table = Table(title="patterns of the recipe", title_justify="left")
    for heading in ("step", "list", "pattern", "linears"):
        table.add_column(heading, justify="right" if heading == "linears" else "left")
    for entry in report.get("patterns", []):
        table.add_row(entry["processor"], entry["list"], entry["pattern"], str(entry["matches"]))
    return table


def _one_of_each(kinds: Mapping[str, str]) -> list[str]:
    """The first module of each place in a layer: names that differ in their numbers only count once."""
    return list({re.sub(r"\d+", "#", module): module for module in reversed(list(kinds))}.values())


def _same_stack(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]


def _item_bytes(stored: StoredModel) -> int:
    """Bytes of a number of the float model, by its embeddings and norms."""
    sizes: Counter[int] = Counter()
    for info in stored.infos.values():
        if info.dtype in (torch.bfloat16, torch.float16, torch.float32) and info.name.endswith("weight"):
            sizes[info.dtype.itemsize] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else 2
