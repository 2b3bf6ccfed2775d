"""What a run did, for people (closing table, `quant_report.png`) and for programs (`quant_report.json`)."""

import hashlib
import importlib.metadata
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from msmodelslim import __version__
from msmodelslim.error_plot import Panel, by_kind, by_layer, draw
from msmodelslim.processor.base import RunRecord

REPORT_FILE = "quant_report.json"
PLOT_FILE = "quant_report.png"
_PACKAGES = ("torch", "transformers", "safetensors", "compressed-tensors", "numpy")


@dataclass
class RunFacts:
    """What the report says besides the record of the processors.

    Args:
        model: {"path", "family", "dtype", "parameters"}.
        recipe: {"source", "config_id", "text"}.
        data: {"source", "fingerprint", "samples", "tokens"}; empty for a recipe that needs no data.
        output: {"path", "format", "target", "files", "bytes", "source_bytes"}.
        run: {"runner", "device", "ranks", "threads"}.
        seconds: phase of the whole run → seconds.
        peak_memory_mib: largest memory of the run.
    """

    model: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_mib: float = 0.0


def versions() -> dict[str, str]:
    """Our version and those of the libraries that decide the result."""
    return {"msmodelslim": __version__} | {name: importlib.metadata.version(name) for name in _PACKAGES}


def build_report(facts: RunFacts, record: RunRecord, weights: dict[str, int]) -> dict[str, Any]:
    """The content of `quant_report.json`.

    Args:
        weights: full module name of every linear in the decoder layers → parameters of its weight.
    """
    quantized = sum(weights.get(name, 0) for name in record.modules)
    parameters = facts.model["parameters"]
    left_float = sorted(set(weights) - set(record.modules))
    return {
        "versions": versions(),
        "model": facts.model | {"quantized_parameters": quantized, "quantized_share": round(quantized / parameters, 6)},
        "recipe": facts.recipe | {"sha256": hashlib.sha256(facts.recipe["text"].encode()).hexdigest()},
        "data": facts.data,
        "run": facts.run,
        "output": facts.output,
        "patterns": record.patterns,
        "schemes": dict(Counter(entry["scheme"] for entry in record.modules.values())),
        "modules": record.modules,
        "left_float": left_float,
        "rewritten": sorted(set(record.rewritten)),
        "smoothing": record.smoothing,
        "fallbacks": record.fallbacks,
        "warnings": record.warnings,
        "layers": record.layers,
        "seconds": {name: round(seconds, 3) for name, seconds in facts.seconds.items()},
        "peak_memory_mib": round(facts.peak_memory_mib, 1),
    }


def plot_report(report: dict[str, Any]) -> bytes:
    """The content of `quant_report.png`: errors by layer, of weights and, where measured, of outputs."""
    names = [entry["name"] for entry in report["layers"]]
    weights = {name: entry["weight_error"] for name, entry in report["modules"].items()}
    outputs = {entry["name"]: entry["output_error"] for entry in report["layers"] if "output_error" in entry}
    panels = [Panel("error of the weights, by kind of linear", "‖W − Ŵ‖ / ‖W‖", by_kind(weights, names), True)]
    if outputs:
        series = {"layer": by_layer(outputs, names)}
        panels.append(Panel("error of the layer's output, first calibration sample", "‖y − ŷ‖ / ‖y‖", series, True))
    title = f"{report['model']['model_type']}, {report['recipe']['config_id']}: what rounding changed"
    return draw(title, panels, len(names))


def print_summary(report: dict[str, Any], planned: bool = False) -> None:
    """The closing table on standard output, then what deserves a second look.

    Args:
        planned: nothing was done yet (`--dry_run`), so that memory is an estimate and no time is known.
    """
    console = Console(highlight=False)
    table = Table(title="plan; nothing is written" if planned else "quantized", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for label, value in _summary_rows(report, planned):
        table.add_row(label, value)
    console.print(table)
    for sentence in attention(report):
        console.print(f"note: {sentence}", markup=False, soft_wrap=True)


def attention(report: dict[str, Any]) -> list[str]:
    """What was left out, fell back or matched nothing, one sentence each."""
    dead = [
        f"{p['list']} pattern {p['pattern']!r} of {p['processor']} matched nothing it works on"
        for p in report["patterns"]
        if not p["matches"] and p["pattern"] != "*"
    ]
    left = report["left_float"]
    floats = [f"{len(left)} linear(s) of the decoder layers stay in float: {_some(left)}"] if left else []
    fallbacks = [f"{f['module']}: {f['what']} ({f['why']})" for f in report["fallbacks"]]
    return dead + floats + fallbacks + report["warnings"]


def _summary_rows(report: dict[str, Any], planned: bool) -> list[tuple[str, str]]:
    model, output, run, data = report["model"], report["output"], report["run"], report["data"]
    rows = [
        (
            "model",
            f"{model['path']} ({model['family']}, {model['dtype']}, {model['parameters'] / 1e6:,.1f} M parameters)",
        ),
        ("recipe", f"{report['recipe']['config_id']} ({report['recipe']['source']})"),
        ("result", f"{output['path']} ({output['format']}, for {output['target']})"),
        ("quantized", f"{model['quantized_share']:.1%} of the parameters in {len(report['modules'])} linears"),
        *(("", f"{count} × {scheme}") for scheme, count in report["schemes"].items()),
        (
            "size",
            f"{output['bytes'] / 1e6:,.1f} MB in {output['files']} files, from {output['source_bytes'] / 1e6:,.1f} MB",
        ),
    ]
    if data:
        rows.append(("data", f"{data['samples']} samples, {data['tokens']:,} tokens of {data['source']}"))
    for key, label in (("weight_error", "weight error"), ("output_error", "layer output error")):
        worst = max((entry for entry in report["layers"] if key in entry), key=lambda entry: entry[key], default=None)
        if worst is not None:
            mean = sum(entry.get(key, 0.0) for entry in report["layers"]) / len(report["layers"])
            rows.append((label, f"{mean:.3%} on average, {worst[key]:.3%} in {worst['name']}"))
    rows.append(("ran on", f"{run['ranks']} × {run['device']}, {run['threads']} thread(s) each, {run['runner']}"))
    if not planned:
        rows.append(("seconds", ", ".join(f"{name} {seconds:.1f}" for name, seconds in report["seconds"].items())))
    rows.append(("peak memory", f"{'about ' if planned else ''}{report['peak_memory_mib']:,.0f} MiB"))
    return rows


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
