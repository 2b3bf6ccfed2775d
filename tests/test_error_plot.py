"""What a person must be able to read off a picture: kinds, layers, units, and no label on top of another."""

import itertools
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from msmodelslim.error_plot import Panel, by_kind, by_layer, draw, make_figure

KINDS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


def layer_names(count: int) -> list[str]:
    return [f"model.layers.{index}" for index in range(count)]


def panels(layers: int, *, wide: bool = False) -> list[Panel]:
    names = layer_names(layers)
    values = {
        f"{name}.{kind}": 0.001 * (1 + index + place)
        for index, name in enumerate(names)
        for place, kind in enumerate(KINDS)
    }
    bars = {name: 1e-4 if not wide or index else 0.9 for index, name in enumerate(names)}
    return [
        Panel("weights", "lost share", by_kind(values, names), True),
        Panel("outputs", "lost share", {"layer": by_layer(bars, names)}, True),
    ]


def boxes(figure: Figure) -> list[list[Any]]:
    """Where the words of each axis lie, and those of titles and legends, one list an axis."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    found = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
            low, high = sorted(axis.get_view_interval())
            labels = [label for label in labels if low <= label.get_position()[axis is axes.yaxis] <= high]
            found.append([label.get_window_extent(renderer) for label in [*labels, axis.label]])
        legend = axes.get_legend()
        found.append(
            [axes.title.get_window_extent(renderer)] + ([legend.get_window_extent(renderer)] if legend else [])
        )
    return found


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 30, 48, 61, 80, 126])
def test_no_two_labels_overlap_and_nothing_is_cut_off(layers: int, wide: bool) -> None:
    figure = make_figure("model, recipe: what rounding changed", panels(layers, wide=wide), layers)
    every = list(itertools.chain.from_iterable(boxes(figure)))
    assert len(every) > 10
    for one, other in itertools.combinations(every, 2):
        assert not one.overlaps(other), (one, other)
    width, height = figure.canvas.get_width_height()
    for box in every:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, box


def test_axes_say_what_they_show_and_the_legend_names_each_kind_in_the_order_of_a_layer() -> None:
    figure = make_figure("a title", panels(3), 3)
    points, bars = figure.axes
    assert figure.get_suptitle() == "a title"
    assert (points.get_title(loc="left"), bars.get_title(loc="left")) == ("weights", "outputs")
    for axes in (points, bars):
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("decoder layer", "lost share")
    assert [text.get_text() for text in points.get_legend().get_texts()] == list(KINDS.values())
    assert len({line.get_marker() for line in points.get_lines()}) == len(KINDS)
    assert len({line.get_color() for line in points.get_lines()}) == len(KINDS)
    (up,) = [line for line in points.get_lines() if line.get_label() == "up"]
    assert list(up.get_ydata()) == pytest.approx([0.006, 0.007, 0.008])
    assert [bar.get_height() for bar in bars.patches] == [1e-4] * 3
    assert bars.get_legend() is None


def test_kinds_with_the_same_points_share_one_line_and_its_name() -> None:
    series = {"q": [(0, 1.0)], "k": [(0, 1.0)], "o": [(0, 2.0)], "v": [(0, 1.0)]}
    (axes,) = make_figure("", [Panel("", "", series)], 1).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["q, k, v", "o"]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1.0, 2.0, 3.0], "linear"),
        ([1.0, 2.0, 300.0], "log"),
        ([-1.0, 2.0, 300.0], "symlog"),
        ([0.0, 0.0, 0.0], "linear"),
    ],
)
def test_an_axis_is_logarithmic_only_when_few_values_dwarf_the_rest(values: list[float], scale: str) -> None:
    figure = make_figure("", [Panel("", "", {"layer": list(enumerate(values))})], 3)
    assert figure.axes[0].get_yscale() == scale


def test_shares_are_told_in_per_cent_however_small() -> None:
    figure = make_figure("", [Panel("", "", {"layer": [(0, 1e-5), (1, 1e-5), (2, 0.5)]}, True)], 3)
    boxes(figure)
    labels = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert {"0.001%", "0.1%", "10%"} <= labels


def test_experts_are_one_kind_and_equal_last_words_are_told_apart() -> None:
    names = layer_names(2)
    values = {
        "model.layers.1.mlp.experts.0.up_proj": 1.0,
        "model.layers.1.mlp.experts.11.up_proj": 2.0,
        "model.layers.1.mlp.shared_expert.up_proj": 3.0,
        "model.layers.0.self_attn.qkv": 4.0,
    }
    assert by_kind(values, names) == {
        "mlp.experts.*.up_proj": [(1, 1.0), (1, 2.0)],
        "mlp.shared_expert.up_proj": [(1, 3.0)],
        "qkv": [(0, 4.0)],
    }


def test_the_same_values_give_the_same_bytes() -> None:
    assert draw("a", panels(3), 3) == draw("a", panels(3), 3)
