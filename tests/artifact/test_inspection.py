import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from msmodelslim.artifact import inspect_directory
from msmodelslim.artifact.inspection import tensor_parallel_degrees
from msmodelslim.errors import InvalidModelError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.scheme import LinearScheme, QDType, QScheme, QScope
from tests import fixtures
from tests.saver import runs as r


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def printed(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    inspect_directory(path)
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_kinds_layers_and_sizes_of_a_mixed_model(
    t_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    r.save(t_dense, tmp_path / "out", r.only(r.W8A8_DYNAMIC, "*.mlp.*"))
    found = printed(tmp_path / "out", capsys)
    assert "out: ascendV1" in found
    codes = 2 * 3 * 64 * 128
    scales = 2 * (128 + 128 + 64) * 2 * 4
    share = (codes + scales) / sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert f"W8A8_DYNAMIC 6 {(codes + scales) / 1e6:.2f} {100 * share:.0f}" in found.replace(
        f".{int(1000 * share) % 10}%", ""
    )
    assert "model.layers.0 to 1 3 × W8A8_DYNAMIC, 4 × float" in found
    assert "tensor-parallel degrees that fit the sizes: 1, 2, 4" in found


def test_layers_that_differ_have_rows_of_their_own(
    t_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    r.save_ct(t_dense, tmp_path / "out", r.only(r.W8A16, "*.1.*"))
    found = printed(tmp_path / "out", capsys)
    assert "compressed-tensors" in found
    assert "model.layers.0 7 × float" in found
    assert "model.layers.1 7 × W8A16" in found


def test_packed_weights_count_as_the_float_weights_they_replace(
    t_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    r.save_ct(t_dense, tmp_path / "out", r.W4A16_G32)
    source = sum(t.nbytes for t in r.open_model(t_dense, None).checkpoint.tensors.values())
    stored = sum(t.nbytes for t in r.open_model(t_dense, None).checkpoint.tensors.values() if ".layers." not in t.name)
    assert stored < source
    found = printed(tmp_path / "out", capsys)
    total = float(found.split("all ")[1].split(" ")[1].rstrip("%")) / 100
    written = sum(t.numel() * t.element_size() for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert total == pytest.approx(written / source, abs=6e-4)


def test_a_source_can_be_inspected(t_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(t_dense, capsys)
    assert "float model" in found
    assert "bfloat16 21" in found
    assert "model.layers.0 to 1 7 × float" in found


def test_patterns_of_the_report_are_shown(t_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    r.save(t_dense, tmp_path / "out", r.W8A16)
    pattern = {"processor": "linear_quant", "list": "exclude", "pattern": "*.gate", "matches": 0}
    (tmp_path / "out" / "quant_report.json").write_text(json.dumps({"patterns": [pattern]}))
    assert "linear_quant exclude *.gate 0" in printed(tmp_path / "out", capsys)


def test_damage_is_told_beside_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = fixtures.t_dense(tmp_path / "source")
    (source / "config.json").unlink()
    assert "config.json: is missing" in printed(source, capsys)
    with pytest.raises(InvalidModelError, match="is no directory"):
        inspect_directory(tmp_path / "nothing")


def linear(rows: int, columns: int, weight: QScheme) -> QuantLinear:
    act = QScheme() if weight.dtype is not QDType.MXFP8 else weight
    return QuantLinear.on_meta(LinearScheme(weight, act), rows, columns, None)


def test_groups_of_128_in_896_columns_fit_one_and_seven_devices() -> None:
    group = QScheme(QDType.INT4, QScope.PER_GROUP, group_size=128)
    assert tensor_parallel_degrees({}, {"model.layers.0.mlp.down_proj": linear(64, 896, group)}) == [1, 7]


def test_heads_and_rows_limit_the_degrees() -> None:
    config = {"num_attention_heads": 12, "num_key_value_heads": 4}
    up = {"model.layers.0.mlp.up_proj": linear(48, 64, r.INT8)}
    assert tensor_parallel_degrees(config, up) == [1, 2, 4, 12]
    assert tensor_parallel_degrees({"text_config": config}, up) == [1, 2, 4, 12]
    blocks = {"model.layers.0.mlp.down_proj": linear(64, 96, QScheme(QDType.MXFP8, QScope.PER_BLOCK))}
    assert tensor_parallel_degrees({}, blocks) == [1, 3]
    keys = {"model.layers.0.self_attn.k_proj": linear(2, 64, r.INT8)}
    assert tensor_parallel_degrees({"num_attention_heads": 8, "num_key_value_heads": 2}, keys) == [1, 2, 4, 8]


def test_bytes_are_those_of_the_tensors(t_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    total = sum(t.nbytes for t in r.open_model(t_dense, None).checkpoint.tensors.values())
    assert f"all {total / 1e6:.2f} 100.0% of the float model" in printed(t_dense, capsys)
    assert torch.bfloat16.itemsize == 2
