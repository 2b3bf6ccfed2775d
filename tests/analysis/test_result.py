"""What is listed, printed and written of a result, and where it may not be written."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from msmodelslim.analysis import result as module
from msmodelslim.analysis.result import (
    AnalysisResult,
    LayerScore,
    exclude_items,
    plot_scores,
    print_result,
    refuse_unsafe_result,
    result_file,
    save_result,
    sqnr_db,
)
from msmodelslim.errors import EnvError, SchemaValidateError, SecurityError

SCORES = (
    ("model.layers.1.mlp.up_proj", 9.0),
    ("model.layers.0.it's", 5.0),
    ("model.layers.0.a", 5.0),
    ("model.layers.2.b", 0.5),
)


def made(**changes: Any) -> AnalysisResult:
    values: dict[str, Any] = {
        "layer_scores": tuple(LayerScore(*one) for one in SCORES),
        "method": "kurtosis",
        "patterns": ("*",),
        "scope": "linear",
        "model_type": "llama",
        "scheme": "",
        "layer_names": ("model.layers.0", "model.layers.1", "model.layers.2"),
        "samples": 3,
        "tokens": 4000,
        "notes": ("something was left out",),
        "seconds": 1.25,
    }
    return AnalysisResult(**values | changes)


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 3), (3, 3), (4, 4), (99, 4)])
def test_the_top_keeps_ties(count: int, kept: int) -> None:
    assert [one.name for one in made().top(count)] == [name for name, _ in SCORES[:kept]]


def test_nothing_scored_has_an_empty_top() -> None:
    assert made(layer_scores=()).top(15) == []


def test_the_list_is_yaml_that_gives_the_names_back() -> None:
    assert exclude_items(made(), 1) == ["- 'model.layers.1.mlp.up_proj'"]
    assert yaml.safe_load("\n".join(exclude_items(made(), 4))) == [name for name, _ in SCORES]


def test_blocks_are_listed_as_patterns_of_what_they_hold() -> None:
    scores = (LayerScore("model.layers.1", 0.5),)
    assert exclude_items(made(scope="layer", method="mse_layer_wise", layer_scores=scores), 1) == [
        "- 'model.layers.1.*'"
    ]


def test_a_result_survives_the_way_through_json() -> None:
    result = made(layer_scores=(LayerScore("a", 0.1 + 0.2), LayerScore("b", 1e-300)))
    assert AnalysisResult.from_plain(json.loads(json.dumps(result.plain()))) == result


def test_the_table_tells_scores_decibels_the_list_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    scores = (LayerScore("model.layers.1", 0.5), LayerScore("model.layers.0", 0.001))
    print_result(made(scope="layer", method="mse_layer_wise", layer_scores=scores, scheme="mxfp4 blocks"), 1)
    shown = capsys.readouterr().out
    assert "mse_layer_wise: square error of the block's output over the square of the output" in shown
    assert "llama, quantized by mxfp4 blocks: 3 samples, 4,000 tokens, 1.2 s; the 1 most sensitive of 2:" in shown
    row = next(line for line in shown.splitlines() if "│ 1 │" in line)
    assert row.split("│")[2:5] == [" model.layers.1 ", "   0.5 ", "     3.0 "]
    assert "\n- 'model.layers.1.*'\n" in shown
    assert "note: something was left out" in shown


def test_decibels_of_a_share_of_squares() -> None:
    assert [sqnr_db(share) for share in (1.0, 0.1, 0.001)] == pytest.approx([0, 10, 30])
    assert sqnr_db(0.0) == float("inf")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a.yaml", "a.yaml"),
        ("new/a.yml", "new/a.yml"),
        ("new", "new/Qwen_Qwen3-8B-std.yaml"),
        ("there.d", "there.d/Qwen_Qwen3-8B-std.yaml"),
        ("there.yaml", "there.yaml/Qwen_Qwen3-8B-std.yaml"),
    ],
)
def test_a_directory_gets_a_file_named_after_model_and_metric(given: str, meant: str, tmp_path: Path) -> None:
    for folder in ("there.d", "there.yaml"):
        (tmp_path / folder).mkdir()
    assert result_file(tmp_path / given, "Qwen/Qwen3-8B", "std") == tmp_path / meant


def test_a_name_that_is_no_yaml_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaValidateError, match=r"a\.json is no directory that exists, and not named as a YAML file"):
        result_file(tmp_path / "a.json", "llama", "std")


def test_list_and_picture_are_written_and_may_be_replaced(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "new" / "a.yaml"
    model.mkdir()
    for top_k in (1, 4):
        refuse_unsafe_result(model, file)
        assert save_result(made(), top_k, file) == [file, file.with_suffix(".png")]
        assert yaml.safe_load(file.read_text()) == [name for name, _ in SCORES[:top_k]]
    assert "- 'model.layers.2.b'  # 0.5\n" in file.read_text()
    assert sorted(path.name for path in file.parent.iterdir()) == ["a.png", "a.yaml"]
    assert file.with_suffix(".png").read_bytes() == plot_scores(made())


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.yaml").write_text("apiversion: modelslim_v1\n")
    (tmp_path / "photo.png").write_bytes(b"a photo")
    for name, said in (("recipe.yaml", r"recipe\.yaml"), ("photo.yaml", r"photo\.png")):
        with pytest.raises(SecurityError, match=f"{said} exists and is not known to be of an earlier analysis"):
            refuse_unsafe_result(tmp_path / "model", tmp_path / name)


def test_neither_list_nor_picture_may_lie_in_the_model(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="lies inside --model_path"):
        refuse_unsafe_result(tmp_path, tmp_path / "a.yaml")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(EnvError, match=r"a\.png is a directory"):
        refuse_unsafe_result(tmp_path / "model", tmp_path / "a.yaml")


def test_a_list_without_its_picture_is_not_left_when_the_picture_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(result: AnalysisResult) -> bytes:
        raise EnvError("no picture")

    monkeypatch.setattr(module, "plot_scores", fail)
    with pytest.raises(EnvError, match="no picture"):
        save_result(made(), 1, tmp_path / "a.yaml")
    assert list(tmp_path.iterdir()) == []
