"""Perplexity by our own layer-wise forward is what transformers computes, for sources and for results."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from msmodelslim import perplexity
from msmodelslim.calibration import SHIPPED
from msmodelslim.errors import InvalidDatasetError, InvalidModelError, SchemaValidateError
from msmodelslim.perplexity import eval_main, evaluate
from msmodelslim.quant_service import QuantJob, quantize
from tests import fixtures

WINDOWS, LENGTH = 4, 96


def expected_windows(model: Path) -> list[list[int]]:
    """The windows by their definition: cut the text into whole windows, take every (whole / windows)th."""
    text = (SHIPPED / "eval.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"]
    whole = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return [whole[int(index * len(whole) / WINDOWS)] for index in range(WINDOWS)]


def transformers_perplexity(model: Path) -> float:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    total = 0.0
    with torch.no_grad():
        for ids in expected_windows(model):
            tokens = torch.tensor([ids])
            total += float(loaded(input_ids=tokens, labels=tokens).loss) * (LENGTH - 1)
    return math.exp(total / (WINDOWS * (LENGTH - 1)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_source_has_the_perplexity_of_transformers(tmp_path, family):
    model = fixtures.t_dense(tmp_path, family)
    found = evaluate(model, windows=WINDOWS, window_length=LENGTH)
    assert found.value == pytest.approx(transformers_perplexity(model), rel=1e-4)
    assert (found.windows, found.tokens) == (WINDOWS, WINDOWS * (LENGTH - 1))


def test_a_tied_head_and_biases_count(t_tied, t_bias):
    for model in (t_tied, t_bias):
        found = evaluate(model, windows=WINDOWS, window_length=LENGTH)
        assert found.value == pytest.approx(transformers_perplexity(model), rel=1e-4)


def test_slices_of_the_logits_give_the_same_value(t_dense, monkeypatch):
    whole = evaluate(t_dense, windows=WINDOWS, window_length=LENGTH)
    monkeypatch.setattr(perplexity, "LOGITS_AT_ONCE", 7 * fixtures.VOCABULARY)
    assert evaluate(t_dense, windows=WINDOWS, window_length=LENGTH).value == pytest.approx(whole.value, rel=1e-6)


RECIPE = """
apiversion: modelslim_v1
metadata: {{config_id: test}}
spec:
  process:
    - type: linear_quant
      qconfig:
        act: {act}
        weight: {weight}
      exclude: ["*.0.mlp.down_proj"]
  save: [{{type: {save}}}]
  dataset: mix_calib.jsonl
"""
ACT = {
    "dynamic": "{dtype: int8, scope: per_token, symmetric: true, method: minmax}",
    "static": "{dtype: int8, scope: per_tensor, symmetric: false, method: minmax}",
    "float": "{dtype: float}",
}
INT8 = "{dtype: int8, scope: per_channel, symmetric: true, method: minmax}"
INT4 = "{dtype: int4, scope: per_group, symmetric: true, method: minmax, ext: {group_size: 32}}"


def quantized(model: Path, result: Path, save: str, act: str, weight: str = INT8) -> Path:
    """A result of two calibration samples."""
    recipe = RECIPE.format(act=ACT[act], weight=weight, save=save)
    dataset = result.with_suffix(".jsonl")
    dataset.write_text('{"text": "The sun rises in the east."}\n{"input_ids": [7, 5, 3, 200, 90]}\n')
    quantize(QuantJob(model, result, recipe, "test.yaml", dataset=str(dataset), threads=1))
    return result


@pytest.mark.parametrize(("act", "weight"), [("dynamic", INT8), ("static", INT8), ("float", INT8), ("float", INT4)])
def test_a_compressed_tensors_result_has_the_perplexity_of_transformers(tmp_path, t_bias, act, weight):
    result = quantized(t_bias, tmp_path / "result", "compressed_tensors", act, weight)
    found = evaluate(result, windows=WINDOWS, window_length=LENGTH)
    assert found.value == pytest.approx(transformers_perplexity(result), rel=1e-2)
    assert found.value != evaluate(t_bias, windows=WINDOWS, window_length=LENGTH).value


@pytest.mark.parametrize("act", ["dynamic", "static"])
def test_both_formats_of_one_recipe_have_one_perplexity(tmp_path, t_dense, act):
    found = [
        evaluate(quantized(t_dense, tmp_path / save, save, act), windows=WINDOWS, window_length=LENGTH).value
        for save in ("compressed_tensors", "ascendv1_saver")
    ]
    # The scales of one are stored in bfloat16, those of the other in float32.
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_a_stored_block_that_is_not_built_does_not_matter(tmp_path, t_mtp):
    result = quantized(t_mtp, tmp_path / "result", "ascendv1_saver", "dynamic")
    assert evaluate(result, windows=1, window_length=LENGTH).value > 1


def test_a_damaged_result_is_refused_under_its_own_name(tmp_path, t_dense):
    result = quantized(t_dense, tmp_path / "result", "compressed_tensors", "dynamic")
    (weights,) = result.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InvalidModelError, match=r"result is damaged: .*; write it again"):
        evaluate(result)


def test_a_result_without_its_norm_is_refused_under_its_own_name(tmp_path, t_dense):
    result = quantized(t_dense, tmp_path / "result", "compressed_tensors", "dynamic")
    (weights,) = result.glob("*.safetensors")
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(InvalidModelError) as error:
        evaluate(result)
    assert f"{result} lacks 1 tensors" in str(error.value)
    assert "model.norm.weight" in str(error.value)


def test_a_short_text_gives_fewer_windows(tmp_path, t_dense, capsys):
    text = tmp_path / "short.txt"
    text.write_text("The sun rises in the east. " * 40, encoding="utf-8")
    found = evaluate(t_dense, text, windows=32, window_length=64)
    assert 1 < found.windows < 32
    eval_main(t_dense, text, 32, 64, "cpu")
    printed = capsys.readouterr().out
    assert f"{found.windows} x 64 tokens (of 32 asked" in printed
    assert f"{found.value:.4f}" in printed


def test_a_text_shorter_than_a_window_is_refused(tmp_path, t_dense):
    text = tmp_path / "short.txt"
    text.write_text("The sun", encoding="utf-8")
    with pytest.raises(InvalidDatasetError, match=r"short.txt has \d tokens and a window 512; give a longer text"):
        evaluate(t_dense, text)


def test_a_text_that_is_none_is_refused(tmp_path, t_dense):
    with pytest.raises(
        InvalidDatasetError, match=r"nosuch\.txt cannot be read: No such file or directory; give a plain"
    ):
        evaluate(t_dense, tmp_path / "nosuch.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidDatasetError, match=r"binary\.txt cannot be read: not UTF-8 at byte 0; give a plain"):
        evaluate(t_dense, tmp_path / "binary.txt")


@pytest.mark.parametrize(("windows", "length"), [(0, 512), (3, 1)])
def test_windows_that_predict_nothing_are_refused(t_dense, windows, length):
    with pytest.raises(SchemaValidateError, match=f"{windows} windows of {length} tokens predict nothing"):
        evaluate(t_dense, windows=windows, window_length=length)
