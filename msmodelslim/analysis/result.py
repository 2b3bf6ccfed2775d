"""What an analysis found, and how it is shown: a table, a list to paste into `exclude`, a picture."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from msmodelslim.analysis.metrics import METRICS, Metric
from msmodelslim.error_plot import Panel, by_kind, by_layer, draw
from msmodelslim.errors import SchemaValidateError, SecurityError
from msmodelslim.paths import refuse_unsafe_file
from msmodelslim.whole_file import write_whole

_HEADER = "# msmodelslim analyze"
_SUFFIXES = (".yaml", ".yml")
_NOT_OF_A_NAME = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class LayerScore:
    """One linear or block; a higher score is more sensitive."""

    name: str
    score: float


@dataclass(frozen=True)
class AnalysisResult:
    """The scores of one run.

    Args:
        layer_scores: the most sensitive first; equal ones in the model's order.
        method: the metric.
        patterns: which linears were looked at, or quantized.
        scope: "linear" or "layer".
        model_type: of the model.
        scheme: the quantization that was tried out; empty for metrics of the inputs alone.
        layer_names: all decoder layers, in order.
        samples, tokens: how many.
        notes: what was left out, as sentences.
        seconds: wall time.
    """

    layer_scores: tuple[LayerScore, ...]
    method: str
    patterns: tuple[str, ...]
    scope: str
    model_type: str
    scheme: str
    layer_names: tuple[str, ...]
    samples: int
    tokens: int
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def metric(self) -> Metric:
        return METRICS[self.scope][self.method]

    def top(self, count: int) -> list[LayerScore]:
        """The `count` most sensitive, and whatever is as sensitive as the last of them."""
        least = self.layer_scores[:count][-1].score if self.layer_scores else math.inf
        return [one for one in self.layer_scores if one.score >= least]

    def plain(self) -> dict[str, Any]:
        """As values that JSON can hold, for other processes."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "AnalysisResult":
        """The result again, from `plain`."""
        tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        tuples["layer_scores"] = tuple(LayerScore(**one) for one in values["layer_scores"])
        return cls(**{**values, **tuples})


def exclude_items(result: AnalysisResult, top_k: int) -> list[str]:
    """The lines of a YAML list for `exclude`, one a module of the top."""
    tail = ".*" if result.scope == "layer" else ""
    names = ((one.name + tail).replace("'", "''") for one in result.top(top_k))
    return [f"- '{name}'" for name in names]


def print_result(result: AnalysisResult, top_k: int) -> None:
    """Table, list and notes on standard output."""
    top = result.top(top_k)
    shown = f"the {len(top)} most sensitive of {len(result.layer_scores)}"
    table = Table()
    table.add_column("", justify="right")
    table.add_column("linear" if result.scope == "linear" else "block", overflow="fold")
    table.add_column("score", justify="right")
    if result.metric.is_error:
        table.add_column("SQNR dB", justify="right")
    for place, one in enumerate(top, 1):
        decibels = [f"{sqnr_db(one.score):.1f}"] if result.metric.is_error else []
        table.add_row(str(place), one.name, f"{one.score:.6g}", *decibels)
    console = Console(highlight=False)
    console.print(f"{result.method}: {result.metric.meaning}", markup=False, soft_wrap=True)
    console.print(f"{_described(result)}; {shown}:", markup=False, soft_wrap=True)
    console.print(table)
    console.print("to leave them in float, paste below `exclude:` of a step:", markup=False, soft_wrap=True)
    for line in exclude_items(result, top_k):
        console.print(line, markup=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def sqnr_db(share: float) -> float:
    """Signal-to-quantization-noise ratio in decibels of a share of squares that is lost; infinite where none is."""
    return -10 * math.log10(share) if share > 0 else math.inf


def result_file(save_path: Path, model_type: str, method: str) -> Path:
    """The file that `--save_path` means: itself, or `<model_type>-<method>.yaml` in a directory.

    Raises:
        SchemaValidateError: it is neither a directory nor named as a YAML file.
    """
    if save_path.suffix in _SUFFIXES and not save_path.is_dir():
        return save_path
    if save_path.suffix and not save_path.is_dir():
        raise SchemaValidateError(
            f"--save_path {save_path} is no directory that exists, and not named as a YAML file",
            "give a directory, or a file whose name ends in .yaml",
        )
    return save_path / f"{_NOT_OF_A_NAME.sub('_', model_type)}-{method}.yaml"


def refuse_unsafe_result(model_path: Path, file: Path) -> None:
    """Check that list and picture may be written, before any work.

    Raises:
        SecurityError: inside the model's directory, or in place of a file that no analysis wrote.
        EnvError: the place takes no files.
    """
    for path in (file, file.with_suffix(".png")):
        refuse_unsafe_file(model_path, path)
    ours = file.is_file() and file.read_bytes().startswith(_HEADER.encode())
    for path in (file, file.with_suffix(".png")):
        if path.exists() and not ours:
            raise SecurityError(
                f"--save_path {path} exists and is not known to be of an earlier analysis", "choose another name"
            )


def save_result(result: AnalysisResult, top_k: int, file: Path) -> list[Path]:
    """Write the list to `file` and the picture beside it; returns both paths."""
    top = result.top(top_k)
    lines = [
        f"{_HEADER} {result.scope} --metrics {result.method}: {result.metric.meaning}",
        f"# {_described(result)}",
        f"# the {len(top)} most sensitive of {len(result.layer_scores)}; paste below `exclude:` of a step",
        *(f"{item}  # {one.score:.6g}" for item, one in zip(exclude_items(result, top_k), top, strict=True)),
    ]
    picture = file.with_suffix(".png")
    write_whole(picture, plot_scores(result))
    write_whole(file, ("\n".join(lines) + "\n").encode())
    return [file, picture]


def plot_scores(result: AnalysisResult) -> bytes:
    """A PNG file of all scores by layer: one group of points a kind of linear, or one bar a block."""
    scores = {one.name: one.score for one in result.layer_scores}
    if result.scope == "linear":
        series = by_kind(scores, result.layer_names)
    else:
        series = {"block": by_layer(scores, result.layer_names)}
    title = f"{result.model_type}: {result.method}" + (f", {result.scheme}" if result.scheme else "")
    return draw(title, [Panel(result.metric.meaning, result.metric.label, series)], len(result.layer_names))


def _described(result: AnalysisResult) -> str:
    scheme = f", quantized by {result.scheme}" if result.scheme else ""
    return f"{result.model_type}{scheme}: {result.samples} samples, {result.tokens:,} tokens, {result.seconds:.1f} s"
