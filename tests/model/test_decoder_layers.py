import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from msmodelslim.errors import InvalidModelError
from msmodelslim.model.families import open_model
from tests import fixtures
from tests.model.chain import CPU, layer_outputs, logits

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def ids(length: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, fixtures.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def reference(path: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


def reference_logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(path)(tokens, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_gives_the_logits_of_transformers(tmp_path, family):
    path = fixtures.t_dense(tmp_path, family)
    assert torch.equal(logits(open_model(path, None), ids()), reference_logits(path, ids()))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("llama", {"num_hidden_layers": 1}),
        ("llama", {"num_hidden_layers": 5}),
    ],
)
def test_masks_positions_and_depth_are_the_models_own(tmp_path, family, config):
    path = fixtures.t_dense(tmp_path, family, **config)
    assert torch.equal(logits(open_model(path, None), ids()), reference_logits(path, ids()))


def test_layers_of_different_attention_get_different_masks(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    adapter = open_model(fixtures.t_dense(tmp_path, "qwen2", **window), None)
    model = adapter.init_model(CPU)
    flow = adapter.generate_model_forward(model, {"input_ids": ids()}, CPU)
    first = next(flow)
    second = flow.send(first.args[0])
    assert first.kwargs["attention_mask"] is None  # causal, all positions: attention needs no mask for that
    assert second.kwargs["attention_mask"][0, 0].sum(-1).tolist() == [*range(1, 8), *[8] * 33]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_type_of_the_config_is_the_type_of_the_forward(tmp_path, dtype):
    path = fixtures.t_dense(tmp_path, dtype=dtype)
    adapter = open_model(path, None)
    assert adapter.dtype == dtype
    found = logits(adapter, ids())
    assert found.dtype == dtype
    assert torch.equal(found, reference_logits(path, ids()))


def test_weights_are_cast_to_the_type_of_the_config(tmp_path):
    path = fixtures.t_dense(tmp_path, dtype=torch.float32)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    assert torch.equal(logits(open_model(path, None), ids()), reference_logits(path, ids()))


def test_biases_are_loaded(t_bias):
    assert torch.equal(logits(open_model(t_bias, None), ids()), reference_logits(t_bias, ids()))


def test_tensors_without_a_module_are_no_hindrance(t_mtp):
    assert torch.equal(logits(open_model(t_mtp, None), ids()), reference_logits(t_mtp, ids()))


def test_an_fp8_model_computes_as_its_bfloat16_decoding(t_fp8, t_fp8_plain):
    assert torch.equal(logits(open_model(t_fp8, None), ids()), reference_logits(t_fp8_plain, ids()))


def test_a_model_of_no_known_family_opens_as_default(t_dense):
    assert torch.equal(logits(open_model(t_dense, "default"), ids()), reference_logits(t_dense, ids()))


def test_every_weight_arrives_where_transformers_puts_it(t_dense):
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    adapter.load_module("", model, CPU)
    expected = reference(t_dense).state_dict()
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name])


# --- the skeleton


@pytest.mark.parametrize("family", FAMILIES)
def test_the_skeleton_has_no_weight_and_all_buffers_of_transformers(tmp_path, family):
    path = fixtures.t_dense(tmp_path, family)
    model = open_model(path, None).init_model(CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    found, expected = dict(model.named_buffers()), dict(reference(path).named_buffers())
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_opening_reads_no_weight(t_dense, monkeypatch):
    adapter = open_model(t_dense, None)
    monkeypatch.setattr(adapter.checkpoint, "tensor", None)
    monkeypatch.setattr(adapter.checkpoint, "weight", None)
    adapter.init_model(CPU)
    assert adapter.layer_names == ["model.layers.0", "model.layers.1"]


def test_modules_that_transformers_keeps_in_float32_stay_so(t_dense, monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["q_proj"])
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    (_, layer), *_ = adapter.generate_decoder_layer(model, CPU)
    assert layer.self_attn.q_proj.weight.dtype == torch.float32
    assert layer.self_attn.k_proj.weight.dtype == torch.bfloat16


def test_global_torch_state_is_left_alone(t_dense, tmp_path):
    def snapshot():
        return (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.get_rng_state().tolist(),
            torch.are_deterministic_algorithms_enabled(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        )

    before = snapshot()
    adapter = open_model(t_dense, None)
    logits(adapter, ids())
    assert snapshot() == before
    flow = adapter.generate_model_forward(adapter.init_model(CPU), {"input_ids": ids()}, CPU)
    next(flow)
    assert snapshot() == before  # also in the middle
    flow.close()
    with pytest.raises(InvalidModelError):
        open_model(lacking(tmp_path, "model.norm.weight"), None).init_model(CPU)
    assert snapshot() == before


def test_two_models_of_one_adapter_do_not_share_settings(t_dense):
    adapter = open_model(t_dense, None)
    first, second = adapter.init_model(CPU), adapter.init_model(CPU)
    adapter.enable_kv_cache(first, True)
    assert not second.config.use_cache


# --- one layer at a time


def test_a_layer_is_loaded_when_it_is_reached_and_not_before(t_dense):
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    for index, (name, layer) in enumerate(adapter.generate_decoder_layer(model, CPU)):
        assert name == f"model.layers.{index}"
        assert layer is model.model.layers[index]
        assert [weight.is_meta for weight in model.model.layers.parameters()].count(True) == 9 * (1 - index)


def test_visiting_yields_every_layer_without_arguments(t_dense):
    adapter = open_model(t_dense, None)
    visits = list(adapter.generate_model_visit(adapter.init_model(CPU), CPU))
    assert [(visit.name, visit.args, visit.kwargs) for visit in visits] == [
        (name, (), {}) for name in adapter.layer_names
    ]


def test_weights_on_the_cpu_are_views_of_the_files(t_dense):
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    next(adapter.generate_decoder_layer(model, CPU))
    maps = Path("/proc/self/maps").read_text()
    assert str(t_dense) in maps
    model.model.layers[0].to_empty(device="meta")
    assert str(t_dense) not in Path("/proc/self/maps").read_text()


def test_the_forward_does_not_touch_layers_nor_norm_nor_head_before_the_first_layer(t_dense):
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    called = []
    for name in ("model.norm", "lm_head"):
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    flow = adapter.generate_model_forward(model, {"input_ids": ids()}, CPU)
    request = next(flow)
    assert request.name == "model.layers.0"
    assert called == []
    assert "forward" not in vars(model.model.layers[0])
    assert model.lm_head.weight.is_meta
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    expected = torch.nn.functional.embedding(ids(), load_file(t_dense / "model-00001-of-00003.safetensors")[EMBEDDING])
    assert torch.equal(request.args[0], expected)


EMBEDDING = "model.embed_tokens.weight"


def test_what_is_sent_back_is_the_next_input_also_from_a_tuple(t_dense):
    adapter = open_model(t_dense, None)
    flow = adapter.generate_model_forward(adapter.init_model(CPU), {"input_ids": ids()}, CPU)
    first = next(flow)
    sent = torch.full_like(first.args[0], 7)
    assert flow.send((sent, "attention weights")).args[0] is sent
    with pytest.raises(StopIteration):
        flow.send(sent)


def test_an_output_that_is_not_sent_back_is_a_callers_error(t_dense):
    adapter = open_model(t_dense, None)
    flow = adapter.generate_model_forward(adapter.init_model(CPU), {"input_ids": ids()}, CPU)
    next(flow)
    with pytest.raises(ValueError, match=r"model\.layers\.0: send the layer's output"):
        next(flow)


def test_samples_side_by_side_get_what_they_get_alone(t_dense):
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    samples = [ids(length, seed) for seed, length in enumerate((3, 17, 17, 1))]
    flows = [adapter.generate_model_forward(model, {"input_ids": sample}, CPU) for sample in samples]
    requests = [next(flow) for flow in flows]
    with torch.no_grad():
        outputs = [request.module(*request.args, **request.kwargs) for request in requests]
        requests = [flow.send(output) for flow, output in zip(flows, outputs, strict=True)]
        outputs = [request.module(*request.args, **request.kwargs) for request in requests]
    for sample, output in zip(samples, outputs, strict=True):
        alone = open_model(t_dense, None)
        assert torch.equal(layer_outputs(alone, alone.init_model(CPU), sample)[-1], output)


def test_samples_of_one_length_share_their_tables(t_dense):
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    flows = [adapter.generate_model_forward(model, {"input_ids": ids(17, seed)}, CPU) for seed in range(3)]
    requests = [next(flow) for flow in flows]
    tables = [request.kwargs["position_embeddings"] for request in requests]
    assert {id(table[0]) for table in tables} == {id(tables[0][0])}
    assert requests[0].args[0] is not requests[1].args[0]
    following = flows[0].send(requests[0].args[0])
    assert following.kwargs["position_embeddings"][1] is tables[0][1]


def test_the_cache_is_off_unless_it_is_asked_for(t_dense):
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    request = next(adapter.generate_model_forward(model, {"input_ids": ids()}, CPU))
    assert not request.kwargs["use_cache"]
    adapter.enable_kv_cache(model, True)
    request = next(adapter.generate_model_forward(model, {"input_ids": ids()}, CPU))
    assert request.kwargs["use_cache"]
    with torch.no_grad():
        request.module(*request.args, **request.kwargs)
    assert request.kwargs["cache"].get_seq_length() == 40


# --- tied heads


def test_a_tied_head_takes_the_embeddings_weight(t_tied):
    adapter = open_model(t_tied, None)
    assert torch.equal(logits(adapter, ids()), reference_logits(t_tied, ids()))
    model = adapter.init_model(CPU)
    adapter.load_module("model.embed_tokens", model.model.embed_tokens, CPU)
    adapter.load_module("lm_head", model.lm_head, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_head_can_be_loaded_first(t_tied):
    adapter = open_model(t_tied, None)
    model = adapter.init_model(CPU)
    adapter.load_module("lm_head", model.lm_head, CPU)
    assert not model.lm_head.weight.is_meta
    adapter.load_module("model.embed_tokens", model.model.embed_tokens, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_model_may_store_its_head_alone(tmp_path):
    config = fixtures.model_config("llama", torch.bfloat16, tie_word_embeddings=True)
    tensors = fixtures.dense_tensors(config, 0, torch.bfloat16)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    path = fixtures.write_checkpoint(tmp_path, config, tensors)
    assert torch.equal(logits(open_model(path, None), ids()), reference_logits(path, ids()))


def test_a_head_that_is_stored_is_read_even_if_the_config_ties_it(tmp_path):
    config = fixtures.model_config("llama", torch.bfloat16)
    tensors = fixtures.dense_tensors(config, 0, torch.bfloat16)
    path = fixtures.write_checkpoint(tmp_path, {**config, "tie_word_embeddings": True}, tensors)
    assert torch.equal(logits(open_model(path, None), ids()), reference_logits(path, ids()))


# --- what the checkpoint lacks


def lacking(path: Path, *names: str) -> Path:
    config = fixtures.model_config("llama", torch.bfloat16)
    tensors = fixtures.dense_tensors(config, 0, torch.bfloat16)
    kept = {name: value for name, value in tensors.items() if name not in names}
    return fixtures.write_checkpoint(path, config, kept)


def test_missing_tensors_are_an_error_that_names_them(tmp_path):
    names = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    adapter = open_model(lacking(tmp_path, *names), None)
    assert adapter.missing_tensors() == names
    with pytest.raises(InvalidModelError) as error:
        adapter.init_model(CPU)
    message = str(error.value)
    assert f"lacks 2 tensors that LlamaForCausalLM needs: {', '.join(names)}" in message
    assert "fetch the checkpoint again, or correct config.json" in message


def test_a_long_list_of_missing_tensors_is_cut(tmp_path):
    path = fixtures.t_dense(tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 5'))
    with pytest.raises(InvalidModelError, match=r"lacks 27 tensors .* and 7 more; fetch"):
        open_model(path, None).init_model(CPU)


def test_a_missing_tensor_that_the_index_leaves_out_is_pointed_at(tmp_path):
    path = lacking(tmp_path, "model.norm.weight")
    first = path / "model-00001-of-00003.safetensors"
    save_file({**load_file(first), "model.norm.weight": torch.ones(64).bfloat16()}, first)
    with pytest.raises(InvalidModelError, match=r"the index leaves out model\.norm\.weight, which its shards hold"):
        open_model(path, None).init_model(CPU)


def test_a_tied_pair_of_which_nothing_is_stored_is_missing(tmp_path):
    config = fixtures.model_config("llama", torch.bfloat16, tie_word_embeddings=True)
    tensors = fixtures.dense_tensors(config, 0, torch.bfloat16)
    del tensors[EMBEDDING]
    adapter = open_model(fixtures.write_checkpoint(tmp_path, config, tensors), None)
    assert adapter.missing_tensors() == [EMBEDDING, "lm_head.weight"]


def test_shapes_that_the_config_does_not_mean_are_an_error(tmp_path):
    config = fixtures.model_config("llama", torch.bfloat16)
    tensors = fixtures.dense_tensors(config, 0, torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(63).bfloat16()
    adapter = open_model(fixtures.write_checkpoint(tmp_path, config, tensors), None)
    with pytest.raises(InvalidModelError) as error:
        adapter.init_model(CPU)
    assert "1 tensors have another shape than config.json says: model.norm.weight (63,), not (64,)" in str(error.value)


def test_loading_a_tensor_that_is_not_stored_names_it(t_dense):
    adapter = open_model(t_dense, None)
    model = adapter.init_model(CPU)
    with pytest.raises(InvalidModelError, match=r"has no tensor model\.nowhere\.weight"):
        adapter.load_module("model.nowhere", model.model.norm, CPU)
