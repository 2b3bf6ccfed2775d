"""Time and loss of every weight method on one weight: `python benchmarks/weight_methods.py --size 4096 --threads 2`.

The loss is tr(Δ H Δᵀ) on inputs with related columns of uneven size, as a share of what min-max rounding loses. Where
llm-compressor is installed, its GPTQ runs on the same weight, Gram matrix and min-max scales; what it takes to find
those is not counted. Ours and its run by turns then, and the fastest of each is kept.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from workload import store

from msmodelslim import registry
from msmodelslim.ir.packing import pack_columns_int32, pack_rows_int4
from msmodelslim.ir.quantize import dequantize_weight, quantize_weight
from msmodelslim.ir.scheme import QDType, QScheme, QScope
from msmodelslim.weight.base import Gram

SYM4 = QScheme(QDType.INT4, QScope.PER_GROUP, group_size=128)
ASYM4 = QScheme(QDType.INT4, QScope.PER_GROUP, symmetric=False, group_size=128)
CHANNEL4 = QScheme(QDType.INT4, QScope.PER_CHANNEL)
CHANNEL8 = QScheme(QDType.INT8, QScope.PER_CHANNEL)
MXFP8, MXFP4 = QScheme(QDType.MXFP8, QScope.PER_BLOCK), QScheme(QDType.MXFP4, QScope.PER_BLOCK)
TOKENS_A_COLUMN = 1.125
_TURNS = 4
CASES: tuple[tuple[str, QScheme, dict[str, object]], ...] = (
    ("minmax", SYM4, {}),
    ("ssz", SYM4, {}),
    ("ssz", SYM4, {"importance": True}),
    ("ssz", SYM4, {"algo": "grid"}),
    ("ssz", SYM4, {"algo": "als"}),
    ("awq_clip", SYM4, {}),
    ("awq_clip", SYM4, {"weighting": "diagonal"}),
    ("gptq", SYM4, {}),
    ("gptq", SYM4, {"negative_scale": True}),
    ("gptq", SYM4, {"refine": 2}),
    ("ssz", ASYM4, {}),
    ("gptq", ASYM4, {}),
    ("ssz", CHANNEL4, {"importance": True}),
    ("gptq", CHANNEL4, {}),
    ("minmax", CHANNEL8, {}),
    ("ssz", CHANNEL8, {}),
    ("gptq", CHANNEL8, {}),
    ("mx_search", MXFP8, {}),
    ("mx_search", MXFP4, {}),
    ("gptq", MXFP4, {}),
)


@dataclass(frozen=True)
class Row:
    """One measurement; the loss as a share of min-max's for the same scheme, None where nothing is rounded."""

    what: str
    scheme: str
    wall_s: float
    cpu_s: float
    loss: float | None


def problem(size: int) -> tuple[Tensor, Gram]:
    """A weight with some outliers, and the Gram matrix of inputs with a few strong directions and uneven columns."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=generator) * 0.02
    weight *= 1 + 2 * (torch.rand(size, size, generator=generator) < 0.01)
    tokens = int(size * TOKENS_A_COLUMN)
    x = torch.randn(tokens, size, generator=generator)
    x += torch.randn(tokens, 64, generator=generator) @ torch.randn(64, size, generator=generator) * 0.15
    x *= torch.rand(size, generator=generator) ** 2 * 3 + 0.1
    return weight.bfloat16(), Gram(x.T @ x, tokens)


def timed(call: Callable[[], Tensor], runs: int = 2) -> tuple[Tensor, float, float]:
    """Its result, and the wall and CPU seconds of the fastest run."""
    best = (float("inf"), float("inf"))
    for _ in range(runs):
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        best = min(best, (time.perf_counter() - wall, time.process_time() - cpu))
    return result, *best


def loss(weight: Tensor, rounded: Tensor, gram: Gram) -> float:
    """tr(Δ H Δᵀ)."""
    lost = weight.float() - rounded
    return float((lost @ gram.sum_II).mul_(lost).sum(dtype=torch.float64))


def rows_of_ours(weight: Tensor, gram: Gram) -> list[Row]:
    plain = {}
    rows = []
    for name, scheme, options in CASES:
        cls = registry.lookup("weight", name)
        method = cls(cls.Ext(**options))

        def run(method=method, scheme=scheme):  # type: ignore[no-untyped-def] # bound early
            fresh = Gram(gram.sum_II, gram.tokens)  # nothing prepared
            return method.quantize(weight, scheme, scale_dtype=torch.bfloat16, gram=fresh).codes

        codes, wall_s, cpu_s = timed(run)
        if scheme not in plain:
            minmax = quantize_weight(weight, scheme, scale_dtype=torch.bfloat16)
            plain[scheme] = loss(weight, dequantize_weight(minmax, scheme), gram)
        share = loss(weight, dequantize_weight(codes, scheme), gram) / plain[scheme]
        words = " ".join(f"{key}={value}" for key, value in options.items())
        rows.append(Row(f"{name} {words}".strip(), str(scheme), wall_s, cpu_s, share))
        print(rows[-1], flush=True)
    codes_OI = quantize_weight(weight, SYM4).codes_OI
    for packer, call in (
        ("pack_rows_int4", lambda: pack_rows_int4(codes_OI)),
        ("pack_columns_int32", lambda: pack_columns_int32(codes_OI, 4)),
    ):
        _, wall_s, cpu_s = timed(call)
        rows.append(Row(packer, "int4", wall_s, cpu_s, None))
    return rows


def rows_by_turns(weight: Tensor, gram: Gram) -> list[Row]:
    """Our GPTQ and, with min-max scales, static act-order and damping, llm-compressor's where it is installed."""
    try:
        peer = import_module("llmcompressor.modifiers.gptq.gptq_quantize").quantize_weight
        arguments = import_module("compressed_tensors.quantization").QuantizationArgs
    except ImportError as error:
        print(f"llm-compressor is not compared: {error}")
        return []
    scheme = arguments(num_bits=4, type="int", symmetric=True, strategy="group", group_size=128, actorder="static")
    scale = quantize_weight(weight, SYM4, scale_dtype=torch.bfloat16).scale[None]
    hessian = gram.sum_II * (2 / gram.tokens)

    def run() -> Tensor:
        return peer(weight.float()[None], hessian[None].clone(), scale, torch.zeros_like(scale), None, scheme)[0][0]

    method = registry.lookup("weight", "gptq")

    def run_ours() -> Tensor:
        fresh = Gram(gram.sum_II, gram.tokens)
        codes = method(method.Ext()).quantize(weight, SYM4, scale_dtype=torch.bfloat16, gram=fresh).codes
        return dequantize_weight(codes, SYM4)

    plain = dequantize_weight(quantize_weight(weight, SYM4, scale_dtype=torch.bfloat16), SYM4)
    words = ("gptq, by turns with", "llm-compressor GPTQ, without its scales")
    best: dict[str, Row] = {}
    for _ in range(_TURNS):
        for what, call in zip(words, (run_ours, run), strict=True):
            rounded, wall_s, cpu_s = timed(call, runs=1)
            share = loss(weight, rounded.float(), gram) / loss(weight, plain, gram)
            row = Row(what, str(SYM4), wall_s, cpu_s, share)
            best[what] = min(best.get(what, row), row, key=lambda one: one.wall_s)
    return list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weight, gram = problem(options.size)
    rows = rows_of_ours(weight, gram)
    rows += rows_by_turns(weight, gram)
    table = Table(title=f"One {options.size} x {options.size} weight, {options.threads} threads", title_justify="left")
    for heading in ("method", "scheme", "wall s", "CPU s", "loss of min-max's"):
        table.add_column(heading, justify="left" if heading in ("method", "scheme") else "right")
    for row in rows:
        share = "" if row.loss is None else f"{row.loss:.3f}"
        table.add_row(row.what, row.scheme, f"{row.wall_s:.2f}", f"{row.cpu_s:.2f}", share)
    Console(width=110).print(table)
    name = f"weight_methods_{options.size}_{options.threads}"
    store(name, {"size": options.size, "threads": options.threads, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
