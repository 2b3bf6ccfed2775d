"""What single layers hold now and then, as whole runs: bad rows and channels, tiny weights, names under a prefix."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from msmodelslim.artifact import verify_directory
from msmodelslim.cli import main
from msmodelslim.model.families import open_model
from tests import fixtures
from tests.artifact.damage import change_tensor, edit_json, row
from tests.test_cases import DYNAMIC, STATIC, Quant, data, quant, recipe, savers, step, tensors_of  # noqa: F401

NINTH = torch.tensor([9])
MINUTE = 1e-7  # below the smallest normal float16


def int4(method: str) -> str:
    return f"{{weight: {{dtype: int4, scope: per_group, symmetric: true, method: {method}, ext: {{group_size: 32}}}}}}"


def bad_rows(weight_OI: torch.Tensor) -> torch.Tensor:
    weight_OI = weight_OI.clone()
    weight_OI[1], weight_OI[:, 7] = 0, 0
    weight_OI[3] = (weight_OI[3].float().sign() * MINUTE).to(weight_OI.dtype)
    return weight_OI


def dead(norm_C: torch.Tensor) -> torch.Tensor:
    return norm_C.index_fill(0, torch.tensor([0, 33]), 0.0)


FP8 = "{act: {dtype: fp8_e4m3, scope: per_token, method: minmax}, weight: {dtype: fp8_e4m3, scope: per_channel}}"
STEPS = {
    "fp8": [step(FP8)],
    "static": [step(STATIC)],
    "smoothed": ["    - {type: flex_smooth_quant}\n", step(DYNAMIC)],
    "int4": [
        step(int4("gptq"), ", include: ['*.{q,k,v}_proj']"),
        step(int4("ssz"), ", include: ['*.o_proj']"),
        step(int4("awq_clip"), ", include: ['*.{gate,up}_proj']"),
        step(int4("minmax"), ", include: ['*.down_proj']"),
    ],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("saver", ["compressed_tensors", "ascendv1_saver"])
@pytest.mark.parametrize("steps", STEPS)
def test_zero_rows_dead_channels_tiny_weights_and_biases_come_out_finite_in_every_source_type(
    steps: str,
    saver: str,
    dtype: torch.dtype,
    quant: Quant,  # noqa: F811
    tmp_path: Path,
) -> None:
    """C28 and C41: four equal samples of one token, so that every Gram matrix has rank one."""
    source = fixtures.t_bias(tmp_path / "source", dtype=dtype, shards=1)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        change_tensor(source, f"model.layers.0.{name}.weight", bad_rows)
    change_tensor(source, "model.layers.1.mlp.gate_proj.weight", torch.zeros_like)
    for name in ("input_layernorm", "post_attention_layernorm"):
        change_tensor(source, f"model.layers.1.{name}.weight", dead)
    (tmp_path / "same.jsonl").write_text(4 * (json.dumps({"input_ids": [5]}) + "\n"))
    if saver == "ascendv1_saver" and steps == "int4":
        saver += ", target: unchecked"
    done = quant(recipe(*STEPS[steps], saver=saver), source=source, dataset=tmp_path / "same.jsonl")
    assert done.code == 0, done.err
    assert verify_directory(done.path, source) == []
    assert all(t.float().isfinite().all() for t in tensors_of(done.path).values() if t.is_floating_point())
    assert done.report["left_float"] == []


@pytest.mark.parametrize("method", ["ssz", "gptq"])
def test_scales_below_zero_that_the_recipe_allows_are_no_finding_and_all_others_are(
    method: str,
    quant: Quant,  # noqa: F811
) -> None:
    half = int4(method).replace("32}", "32, negative_scale: true}")
    done = quant(recipe(step(half), saver="compressed_tensors"))
    assert done.code == 0, done.err
    name = "model.layers.0.mlp.up_proj"
    below = int((tensors_of(done.path)[f"{name}.weight_scale"] < 0).sum())
    assert done.report["modules"][name]["negative_scales"] == below > 0
    assert verify_directory(done.path) == []
    change_tensor(done.path, f"{name}.weight_scale", row(2, 0))
    assert any("of its scales are zero" in str(finding) for finding in verify_directory(done.path))
    edit_json(done.path / "quant_report.json", lambda r: r["modules"][name].pop("negative_scales"))
    assert any(f"{name}.weight_scale: " in str(f) and "not above zero" in str(f) for f in verify_directory(done.path))


def test_a_bias_that_int32_cannot_hold_beside_tiny_weights_is_in_the_report(
    quant: Quant,  # noqa: F811
    tmp_path: Path,
) -> None:
    source = fixtures.t_bias(tmp_path / "source", shards=1)
    change_tensor(source, "model.layers.1.mlp.up_proj.weight", row(3, 1e-20))
    for ranks in ("1", "2"):
        words = ("--device", "cpu", "--device_id", "0", "1") if ranks == "2" else ()
        done = quant(recipe(saver="ascendv1_saver"), *words, source=source, out=ranks)
        assert done.code == 0, done.err
        (told,) = [sentence for sentence in done.report["warnings"] if "int32" in sentence]
        assert told.startswith(
            "model.layers.1.mlp.up_proj: the bias of 1 rows is too large for int32 in steps of weights"
        )
        assert ranks == "2" or told in done.out  # a rank's own process prints it


@savers
def test_symmetric_smoothing_writes_no_bias_that_the_source_lacks(
    saver: str,
    quant: Quant,  # noqa: F811
) -> None:
    """C32"""
    done = quant(recipe("    - {type: iter_smooth}\n", step(DYNAMIC), saver=saver))
    assert done.code == 0, done.err
    assert len(done.report["smoothing"]) == 8
    assert [name for name in tensors_of(done.path) if name.endswith(".bias")] == []


def test_a_layer_whose_error_stands_out_is_named_as_the_worst(
    quant: Quant,  # noqa: F811
    tmp_path: Path,
) -> None:
    """C39: one channel that nothing reads takes the whole range of the inputs."""
    source = fixtures.t_dense(tmp_path / "source", shards=1, num_hidden_layers=3)
    layer = "model.layers.1"
    change_tensor(source, f"{layer}.post_attention_layernorm.weight", row(9, 1e4))
    for name in ("gate_proj", "up_proj"):
        change_tensor(source, f"{layer}.mlp.{name}.weight", lambda weight_OI: weight_OI.index_fill(1, NINTH, 0.0))
    done = quant(recipe(), source=source)
    assert done.code == 0, done.err
    found = {entry["name"]: entry["output_error"] for entry in done.report["layers"]}
    assert max(found, key=lambda name: found[name]) == layer
    assert found[layer] > 5 * found["model.layers.0"]
    assert re.search(r"layer output error .* in model\.layers\.1 ", done.out)


# --- names under a prefix

MODELING = """
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class NestedConfig(LlamaConfig):
    model_type = "nested"


class Outer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.language_model = LlamaModel(config)

    def forward(self, *args, **kwargs):
        return self.language_model(*args, **kwargs)


class NestedForCausalLM(LlamaForCausalLM):
    config_class = NestedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Outer(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.language_model.embed_tokens
"""


@pytest.fixture
def nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """t_dense with its language model under `model.language_model`."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = fixtures.t_dense(tmp_path / "nested", shards=1)
    (source / "modeling_nested.py").write_text(MODELING)
    auto = {"AutoConfig": "modeling_nested.NestedConfig", "AutoModelForCausalLM": "modeling_nested.NestedForCausalLM"}
    edit_json(
        source / "config.json",
        lambda config: config.update(architectures=["NestedForCausalLM"], auto_map=auto, model_type="nested"),
    )
    file = source / "model.safetensors"
    tensors = {nest(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return source


def nest(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


Words = Callable[[Path], set[str]]


def described(path: Path) -> set[str]:
    """Linears that the written files say are float."""
    if (path / "quant_model_description.json").exists():
        words = json.loads((path / "quant_model_description.json").read_text())
        return {name.removesuffix(".weight") for name, word in words.items() if word == "FLOAT" and "_proj.w" in name}
    ignored = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    return {name for name in ignored if "_proj" in name}


@savers
@pytest.mark.parametrize(
    ("options", "left"),
    [
        (", exclude: ['*.down_proj']", ["0.mlp.down_proj", "1.mlp.down_proj"]),
        (", exclude: ['model.language_model.layers.0.mlp.down_proj']", ["0.mlp.down_proj"]),
        (
            ", include: ['model.language_model.layers.*'], exclude: ['*.1.mlp.*']",
            [f"1.mlp.{p}_proj" for p in ("down", "gate", "up")],
        ),
    ],
    ids=["pattern", "full name", "prefix"],
)
def test_a_language_model_under_a_prefix_gives_the_tensors_of_the_plain_one_under_its_names(
    options: str,
    left: list[str],
    saver: str,
    nested: Path,
    quant: Quant,  # noqa: F811
    tmp_path: Path,
) -> None:
    """C116: patterns are matched against, and results written under, the names of the source."""
    plain = fixtures.t_dense(tmp_path / "plain", shards=1)
    smoothing = "    - {type: iter_smooth}\n"
    one = quant(recipe(smoothing, step(STATIC, options), saver=saver), "--trust_remote_code", source=nested, out="one")
    assert one.code == 0, one.err
    same = options.replace("model.language_model.", "model.")
    other = quant(recipe(smoothing, step(STATIC, same), saver=saver), source=plain, out="other")
    assert other.code == 0, other.err
    expected = [f"model.language_model.layers.{name}" for name in left]
    assert one.report["left_float"] == expected
    assert described(one.path) == set(expected)
    found, wanted = tensors_of(one.path), {nest(name): t for name, t in tensors_of(other.path).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in wanted.items())
    assert [entry["module"] for entry in one.report["smoothing"]] == [
        nest(entry["module"]) for entry in other.report["smoothing"]
    ]


def test_a_pattern_for_the_plain_names_matches_nothing_under_a_prefix_and_is_told(
    nested: Path,
    quant: Quant,  # noqa: F811
) -> None:
    """C116"""
    done = quant(
        recipe(step(DYNAMIC, ", exclude: ['model.layers.0.*']")), "--trust_remote_code", "--dry_run", source=nested
    )
    assert done.code == 0, done.err
    assert "exclude pattern 'model.layers.0.*' of linear_quant matched nothing it works on" in done.out


def test_a_structure_names_parts_from_the_layer_on_whatever_the_prefix(nested: Path, t_dense: Path) -> None:
    """C116"""
    adapters = [open_model(nested, None, True), open_model(t_dense, None)]
    found = [
        adapter.structure(adapter.init_model(torch.device("cpu")).get_submodule(adapter.layer_names[1]))
        for adapter in adapters
    ]
    assert adapters[0].layer_names == ["model.language_model.layers.0", "model.language_model.layers.1"]
    assert found[0] == found[1]


@savers
def test_verify_and_inspect_read_a_result_under_a_prefix(
    saver: str,
    nested: Path,
    quant: Quant,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """C116"""
    done = quant(recipe(step(DYNAMIC), saver=saver), "--trust_remote_code", source=nested)
    assert done.code == 0, done.err
    assert main(["verify", str(done.path), "--source", str(nested)]) == 0
    assert main(["inspect", str(done.path)]) == 0
    out = capsys.readouterr().out
    assert "tensor-parallel degrees that fit the sizes: 1, 2, 4\n" in out
