"""Pictures of a figure by layer: one group of points a kind of linear, or one bar a layer.

matplotlib is imported when something is drawn, and only its Agg canvas, so no display is needed and nothing waits for
it before. The same values give the same bytes on one machine.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: of Okabe and Ito: told apart by people with any colour vision; each kind of linear has a marker of its own, too
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7F7F7F")
_MARKERS = "osD^vP*XphdH"
_USUAL_ORDER = ("q", "k", "v", "o", "gate", "up", "down")
_WIDE = 30.0  # largest over median value from which an axis is logarithmic
_DPI = 110
_PANEL_INCHES = 3.4
_HEAD_INCHES = 0.45


@dataclass(frozen=True)
class Panel:
    """One pair of axes; the layer's number runs to the right.

    Args:
        title: what is shown.
        y_label: the figure, with its unit.
        series: kind → (layer number, value) pairs; a single series is drawn as bars.
        is_share: label the axis in per cent.
    """

    title: str
    y_label: str
    series: Mapping[str, Sequence[tuple[int, float]]]
    is_share: bool = False


def by_kind(values: Mapping[str, float], layer_names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Module → value as series by kind of module: what is left of the name without its layer, numbers as `*`.

    The last word of a kind, without `_proj`, stands for the whole where no other kind ends in it.
    """
    numbers = {name: index for index, name in enumerate(layer_names)}
    found: dict[str, list[tuple[int, float]]] = {}
    for name, value in values.items():
        layer = next(one for one in _parents(name) if one in numbers)
        kind = re.sub(r"\b\d+\b", "*", name.removeprefix(layer).lstrip("."))
        found.setdefault(kind, []).append((numbers[layer], value))
    short = {kind: _last_word(kind) for kind in found}
    words = list(short.values())
    named = {short[kind] if words.count(short[kind]) == 1 else kind: points for kind, points in found.items()}
    return dict(sorted(named.items(), key=lambda item: _place(item[0])))


def by_layer(values: Mapping[str, float], layer_names: Sequence[str]) -> list[tuple[int, float]]:
    """Layer → value as one series."""
    return [(index, values[name]) for index, name in enumerate(layer_names) if name in values]


def draw(title: str, panels: Sequence[Panel], layers: int) -> bytes:
    """A PNG file of `make_figure`'s picture."""
    content = io.BytesIO()
    make_figure(title, panels, layers).savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def make_figure(title: str, panels: Sequence[Panel], layers: int) -> "Figure":
    """All panels, one below the other.

    Args:
        title: of the whole picture.
        panels: at least one.
        layers: how many the model has.
    """
    from matplotlib.figure import Figure

    width, height = min(16.0, max(8.0, 0.2 * layers + 3)), _HEAD_INCHES + _PANEL_INCHES * len(panels)
    figure = Figure(figsize=(width, height), dpi=_DPI)
    # Placed by hand: matplotlib's own layout draws everything twice, which takes longer than all the rest.
    right = 1 - (1.5 if any(len(panel.series) > 1 for panel in panels) else 0.3) / width
    figure.subplots_adjust(
        left=0.85 / width, right=right, bottom=0.6 / height, top=1 - 0.75 / height, hspace=0.75 / _PANEL_INCHES * 1.2
    )
    figure.suptitle(title, x=0.85 / width, y=1 - 0.12 / height, ha="left", va="top", fontsize=12, fontweight="bold")
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_panel(axes, panel, layers)
    return figure


def _draw_panel(axes: Any, panel: Panel, layers: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    _set_scale(axes, [value for points in panel.series.values() for _, value in points])
    if len(panel.series) == 1:
        ((_, points),) = panel.series.items()
        axes.bar(*_columns(points), color=_COLORS[0], width=0.75)
    else:
        for index, (kind, points) in enumerate(_together(panel.series)):
            color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
            once = len({layer for layer, _ in points}) == len(points)
            line = {"linestyle": "-", "linewidth": 0.7} if once else {"linestyle": "none"}
            axes.plot(*_columns(points), color=color, marker=marker, markersize=4.5, alpha=0.85, label=kind, **line)
        columns = 1 + (len(axes.get_lines()) - 1) // 12
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9, ncols=columns)
    if panel.is_share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True, min_n_ticks=1))
    axes.set_xlim(-0.7, layers - 0.3)
    axes.set_title(panel.title, loc="left", fontsize=10, y=1.0)
    axes.set_xlabel("decoder layer")
    axes.set_ylabel(panel.y_label)


def _together(series: Mapping[str, Sequence[tuple[int, float]]]) -> list[tuple[str, Sequence[tuple[int, float]]]]:
    """Kinds with the same points throughout (linears that read one tensor) as one: else one hides the others."""
    kinds: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for kind, points in series.items():
        kinds.setdefault(tuple(points), []).append(kind)
    return [(", ".join(names), points) for points, names in kinds.items()]


def _set_scale(axes: Any, values: Sequence[float]) -> None:
    """Linear, unless a few values dwarf the rest."""
    sizes = sorted(abs(value) for value in values if value)
    if not sizes or sizes[-1] <= _WIDE * sizes[len(sizes) // 2]:
        return
    if min(values) > 0:
        axes.set_yscale("log")
    else:
        axes.set_yscale("symlog", linthresh=sizes[len(sizes) // 2])


def _columns(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    ordered = sorted(points)
    return [layer for layer, _ in ordered], [value for _, value in ordered]


def _parents(name: str) -> Iterable[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _last_word(kind: str) -> str:
    return kind.rpartition(".")[2].removesuffix("_proj")


def _place(kind: str) -> tuple[int, str]:
    word = _last_word(kind)
    return (_USUAL_ORDER.index(word) if word in _USUAL_ORDER else len(_USUAL_ORDER), kind)
