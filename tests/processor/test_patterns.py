"""Include and exclude patterns."""

import pytest

from msmodelslim.processor.patterns import Selection, matches


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("*", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("*.{gate,up}_proj", "model.layers.3.mlp.gate_proj", True),
        ("*.{gate,up}_proj", "model.layers.3.mlp.down_proj", False),
        ("*.gate", "model.layers.3.mlp.gate_proj", False),
        ("*mlp.gate", "model.layers.3.mlp.gate", True),
        ("*mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("*mlp.gate", "model.layers.3.mlp.experts.7.gate_proj", False),
        ("model.layers.*", "model.language_model.layers.0.mlp.up_proj", False),
        ("*.layers.0.*", "model.language_model.layers.0.mlp.up_proj", True),
        ("model.layers.[01].*", "model.layers.1.self_attn.q_proj", True),
        ("model.layers.?.*", "model.layers.12.self_attn.q_proj", False),
        ("Model.*", "model.layers.0", False),
        ("weird[name", "weird[name", True),
    ],
)
def test_a_pattern_fits_whole_names_across_dots(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


def test_exclude_wins_over_include() -> None:
    selection = Selection(["*"], ["*.down_proj"])
    assert selection.selects("model.layers.0.mlp.up_proj")
    assert not selection.selects("model.layers.0.mlp.down_proj")


def test_every_pattern_that_fits_is_counted_so_overlaps_are_not_called_dead() -> None:
    selection = Selection(["*", "*.up_proj", "*.no_such"], ["*.up_*"])
    selection.count("a.up_proj")
    selection.count("a.down_proj")
    assert {r["pattern"]: r["matches"] for r in selection.as_records("linear_quant")} == {
        "*": 2,
        "*.up_proj": 1,
        "*.no_such": 0,
        "*.up_*": 1,
    }
