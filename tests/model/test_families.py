import json
import shutil
from pathlib import Path

import pytest
import torch

from msmodelslim import registry
from msmodelslim.errors import InvalidModelError, SecurityError, UnsupportedError
from msmodelslim.model.families import open_model
from tests import fixtures

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {family: fixtures.t_dense(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture
def copied(t_dense, tmp_path):
    return Path(shutil.copytree(t_dense, tmp_path / "copied"))


def edit(path: Path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_name_the_config_decides(models, family):
    adapter = open_model(models[family], None)
    assert (adapter.registered_name, adapter.model_type, adapter.pedigree) == (family, family, "dense")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen3-32B", "qwen3"),
        ("qwen3", "qwen3"),
        ("Qwen2.5-7B-Instruct", "qwen2"),
        ("QwQ-32B", "qwen2"),
        ("DeepSeek-R1-Distill-Qwen-7B", "qwen2"),
        ("Llama-3.1-8B", "llama"),
        ("LLaMA-2-7b", "llama"),
        ("SmolLM2-135M", "llama"),
        ("DeepSeek-R1-Distill-Llama-8B", "llama"),
        ("Mistral-7B-v0.3", "mistral"),
    ],
)
def test_a_models_name_is_of_the_family_it_begins_like(models, name, family):
    adapter = open_model(models[family], name)
    assert (adapter.registered_name, adapter.model_type) == (family, name)


def test_a_name_that_nobody_knows_is_answered_with_the_nearest(models):
    with pytest.raises(UnsupportedError) as error:
        open_model(models["qwen3"], "Quen3")
    assert "model type 'Quen3' begins like no known model; write 'qwen3' (of" in str(error.value)
    assert all(family in str(error.value) for family in (*FAMILIES, "default"))


def test_a_name_of_another_family_than_the_config_names_both(models):
    with pytest.raises(InvalidModelError) as error:
        open_model(models["qwen2"], "Qwen3-8B")
    assert "model type 'Qwen3-8B' is family qwen3 (Qwen3ForCausalLM), but" in str(error.value)
    assert f"{models['qwen2'] / 'config.json'} says Qwen2ForCausalLM" in str(error.value)


def test_default_takes_any_architecture(models):
    adapter = open_model(models["qwen3"], "default")
    assert (adapter.registered_name, adapter.pedigree) == ("default", "default")


def test_an_unknown_architecture_is_default_under_its_own_name(tmp_path):
    path = fixtures.t_dense(tmp_path)
    edit(path / "config.json", architectures=["PhiForCausalLM"], model_type="phi")
    adapter = open_model(path, None)
    assert (adapter.registered_name, adapter.model_type) == ("default", "phi")


def test_without_architectures_the_model_type_of_the_config_decides(copied):
    edit(copied / "config.json", architectures=None)
    assert open_model(copied, None).registered_name == "llama"


def test_a_model_type_that_transformers_does_not_know_is_named(copied):
    edit(copied / "config.json", architectures=["NewForCausalLM"], model_type="brand_new")
    with pytest.raises(
        UnsupportedError, match=r"config.json: model_type: transformers [\d.]+ does not know 'brand_new'"
    ):
        open_model(copied, None)


def test_a_config_that_transformers_refuses_is_quoted(copied):
    edit(copied / "config.json", hidden_size="wide")
    with pytest.raises(InvalidModelError, match=r"config.json: transformers refuses it: .*hidden_size"):
        open_model(copied, None)


def test_a_config_of_no_language_model_is_refused(copied):
    edit(copied / "config.json", architectures=["ViTModel"], model_type="vit")
    with pytest.raises(UnsupportedError, match="ViTConfig belongs to no causal language model; give a text model"):
        open_model(copied, None).init_model(CPU)


def test_code_of_the_model_runs_only_with_permission(copied):
    edit(copied / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    with pytest.raises(SecurityError) as error:
        open_model(copied, None)
    assert "config.json: auto_map: the model wants to run Python code of its own (modeling_mine.Mine)" in str(
        error.value
    )
    assert "allow it with --trust_remote_code True" in str(error.value)


def test_code_of_the_model_runs_with_permission(copied, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (copied / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass Mine(LlamaForCausalLM):\n    own = True\n"
    )
    edit(copied / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    adapter = open_model(copied, None, trust_remote_code=True)
    assert adapter.init_model(CPU).own


def test_a_model_with_fused_experts_is_refused_for_now(tmp_path):
    config = fixtures.model_config("llama", torch.bfloat16) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
    }
    path = fixtures.write_checkpoint(tmp_path, config, {"x": torch.ones(1)}, shards=1)
    with pytest.raises(UnsupportedError, match=r"put together from differently named ones in the files"):
        open_model(path, None).init_model(CPU)


# --- structure


@pytest.mark.parametrize("family", FAMILIES)
def test_the_structure_names_what_the_layer_has(models, family):
    adapter = open_model(models[family], None)
    model = adapter.init_model(CPU)
    layer = model.model.layers[0]
    found = adapter.structure(layer)
    assert dict(found.norm_linears) == {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    assert found.ov == (("self_attn.v_proj", "self_attn.o_proj"),)
    assert found.up_down == (("mlp.up_proj", "mlp.down_proj"),)
    assert found.fused == (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    )
    assert found.row_parallel == {"self_attn.o_proj", "mlp.down_proj"}
    assert (found.heads, found.kv_heads) == (4, 2)
    assert found.head_width == {"qwen3": 32}.get(family, 16)
    names = {name for name, _ in layer.named_modules()}
    linears = {name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name for _, group in found.norm_linears for name in group} | found.row_parallel == linears
    assert {name for name, _ in found.norm_linears} <= names


def test_the_structure_of_a_default_model_is_the_usual_one(models):
    for family in FAMILIES:
        usual, default = open_model(models[family], family), open_model(models[family], "default")
        layer = default.init_model(CPU).model.layers[0]
        assert default.structure(layer) == usual.structure(layer)


def build(tmp_path: Path, model_type: str, **config) -> tuple:
    """A default adapter and the meta layer of another architecture; the weights of the directory do not fit it."""
    path = fixtures.t_dense(tmp_path)
    edit(path / "config.json", architectures=None, model_type=model_type, **config)
    adapter = open_model(path, "default")
    return adapter, adapter._build().get_submodule(adapter.layer_names[0])


def test_missing_parts_are_named(tmp_path):
    adapter, layer = build(tmp_path, "phi3")
    with pytest.raises(UnsupportedError) as error:
        adapter.structure(layer)
    assert "the parts of Phi3DecoderLayer are not the usual ones: no self_attn.q_proj" in str(error.value)
    assert "no mlp.gate_proj" in str(error.value)
    assert "self_attn.qkv_proj besides" in str(error.value)


def test_a_norm_between_the_usual_ones_is_named(tmp_path):
    adapter, layer = build(tmp_path, "gemma2", head_dim=16, query_pre_attn_scalar=16)
    with pytest.raises(UnsupportedError, match="pre_feedforward_layernorm besides"):
        adapter.structure(layer)


def test_a_norm_that_adds_one_to_its_weight_is_refused(tmp_path):
    adapter, layer = build(tmp_path, "gemma", head_dim=16)
    with pytest.raises(UnsupportedError, match="input_layernorm does not multiply by its weight"):
        adapter.structure(layer)


def test_every_family_says_which_recipes_are_made_for_it():
    for name in registry.names("model"):
        assert registry.lookup("model", name).pedigree in ("dense", "default")
