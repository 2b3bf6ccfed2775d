"""A good directory has no findings; each way of breaking it has one that names the place."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from msmodelslim.artifact import verify_directory, verify_main
from msmodelslim.artifact.verification import verify
from msmodelslim.errors import InvalidModelError
from msmodelslim.ir.scheme import LinearScheme
from tests import fixtures
from tests.artifact.damage import change_tensor, edit_json, row
from tests.saver import runs as r

Q, UP, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
DESCRIPTION, INDEX = "quant_model_description.json", "quant_model_weights.safetensors.index.json"
MX8, MX4 = LinearScheme(r.MXFP8, r.MXFP8), LinearScheme(r.MXFP4, r.MXFP4)
ASCEND = {
    "W8A8": (r.W8A8, "vllm-ascend-0.27"),
    "W8A8_DYNAMIC": (r.W8A8_DYNAMIC, "vllm-ascend-0.27"),
    "W8A8_MIX": (r.W8A8_MIX, "vllm-ascend-0.27"),
    "W8A16": (r.W8A16, "vllm-ascend-0.27"),
    "W4A4_DYNAMIC": (r.W4A4, "vllm-ascend-0.27"),
    "W8A8FP8_DYNAMIC": (r.FP8_DYNAMIC, "vllm-ascend-0.27"),
    "W8A8_MXFP8": (MX8, "vllm-ascend-0.27"),
    "W4A4_MXFP4": (MX4, "vllm-ascend-0.27"),
    "W4A8_DYNAMIC": (r.W4A8, "vllm-ascend-0.23"),
    "two level": (LinearScheme(r.TWO_LEVEL, r.A8), "vllm-ascend-0.23"),
    "two level asym": (LinearScheme(r.TWO_LEVEL_ASYM, r.A8), "unchecked"),
    "W8A16 group": (LinearScheme(r.INT8_G32), "unchecked"),
    "W8A16 asym": (LinearScheme(r.INT8_ASYM), "unchecked"),
    "W4A16": (r.W4A16_G32, "unchecked"),
    "W4A4 group asym": (LinearScheme(r.INT4_G32_ASYM, r.A4), "unchecked"),
    "WFP8AFP8_DYNAMIC": (r.FP8_DYNAMIC, "unchecked"),
}
COMPRESSED = {
    "W8A8": r.W8A8_DYNAMIC,
    "W8A8 static act_asym": r.W8A8,
    "W8A16": r.W8A16,
    "W4A16 group": r.W4A16_G32,
    "W4A16 group asym": LinearScheme(r.INT4_G32_ASYM),
    "W4A8 group": LinearScheme(r.INT4_G32, r.A8),
    "FP8_DYNAMIC": r.FP8_DYNAMIC,
    "FP8_STATIC": LinearScheme(r.FP8_TENSOR, r.AFP8_STATIC),
    "MXFP4": MX4,
    "MXFP8": MX8,
}


@pytest.fixture(scope="module")
def made(t_bias: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A fresh copy of what a run wrote; each run is made once."""
    known: dict[Any, Path] = {}

    def make(place: Path, saver: str, scheme: LinearScheme, **config: Any) -> Path:
        key = (saver, scheme, *config.items())
        if key not in known:
            known[key] = tmp_path_factory.mktemp("made") / "out"
            (r.save if saver == "ascend" else r.save_ct)(t_bias, known[key], scheme, **config)
        shutil.copytree(known[key], place)
        return place

    return make


def texts(path: Path, source: Path | None = None) -> list[str]:
    return [str(finding) for finding in verify_directory(path, source)]


@pytest.mark.parametrize("word", ASCEND)
def test_every_kind_of_ascendv1_is_found_good(
    word: str, t_bias: Path, tmp_path: Path, made: Callable[..., Path]
) -> None:
    scheme, target = ASCEND[word]
    out = made(tmp_path / "out", "ascend", scheme, target=target)
    found = verify(out, t_bias)
    assert found.findings == []
    assert sum(found.modules.values()) == 14
    assert all(0 < error < 0.25 for error, _ in found.worst.values())


@pytest.mark.parametrize("word", COMPRESSED)
def test_every_kind_of_compressed_tensors_is_found_good(
    word: str, t_bias: Path, tmp_path: Path, made: Callable[..., Path]
) -> None:
    found = verify(made(tmp_path / "out", "ct", COMPRESSED[word]), t_bias)
    assert found.findings == []
    assert found.modules == {word: 14}


@pytest.mark.parametrize("saver", ["ascend", "ct"])
@pytest.mark.parametrize("fixture", ["t_mtp", "t_tied", "t_fp8"])
def test_other_shapes_of_sources_are_found_good(
    saver: str, fixture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(fixture)
    pick = r.only(r.W8A8_DYNAMIC, "*.mlp.*")
    run = r.Run(source, tmp_path / "out", pick, r.AscendV1Saver if saver == "ascend" else r.CompressedTensorsSaver)
    run.saver.part_file_bytes = 100_000
    run.rehearse()
    run.write()
    assert texts(run.saver.directory, source) == []  # before it is put in its place, too
    run.saver.commit()
    assert texts(tmp_path / "out", source) == []


# --- the rules whose breach ascendV1's engine serves as garbage, or stops at


def _drop(tensor: torch.Tensor) -> None:
    return None


ASCEND_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing scale": (
        lambda p: change_tensor(p, f"{UP}.deq_scale", _drop),
        f"{UP}.deq_scale: is missing; W8A8 needs it",
    ),
    "a missing scale is still described": (
        lambda p: change_tensor(p, f"{UP}.input_scale", _drop),
        f"{UP}.input_scale: is described as W8A8, but no file holds it",
    ),
    "deq_scale for another served type": (
        lambda p: change_tensor(p, f"{UP}.deq_scale", lambda t: t.view(torch.int32).to(torch.int64)),
        "served as|engines read torch.float32: silent garbage",
    ),
    "config served as float16": (
        lambda p: edit_json(p / "config.json", lambda c: c.update(dtype="float16")),
        "serving in float16, as config.json says, engines read torch.int64: silent garbage",
    ),
    "deq_scale twice too large": (
        lambda p: change_tensor(p, f"{UP}.deq_scale", row(3, 2)),
        f"{UP}.deq_scale: 1 of its values do not follow from the module's other tensors",
    ),
    "quant_bias of another calibration": (
        lambda p: change_tensor(p, f"{UP}.quant_bias", lambda t: t + 100),
        f"{UP}.quant_bias: 128 of its values do not follow",
    ),
    "fused parts with two input scales": (
        lambda p: change_tensor(p, f"{Q}.input_scale", lambda t: t * 1.5),
        f"{Q}.input_scale: the engine uses one value for the fused linear: {Q} has",
    ),
    "fused parts with two input offsets": (
        lambda p: change_tensor(p, f"{Q}.input_offset", lambda t: t + 1),
        f"{Q}.input_offset: the engine uses one value for the fused linear",
    ),
    "a fused part labelled float": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.update({f"{Q}.weight": "FLOAT"})),
        f"the engine computes these as one linear, which needs one kind: {Q} is FLOAT",
    ),
    "float label on codes": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.update({f"{DOWN}.weight": "FLOAT"})),
        f"{DOWN}.weight: is labelled FLOAT, but it is torch.int8",
    ),
    "a label of another kind": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.update({f"{DOWN}.deq_scale": "W8A8_DYNAMIC"})),
        f"{DOWN}.deq_scale: is labelled W8A8_DYNAMIC, and its module is W8A8: write W8A8",
    ),
    "a bias labelled quantized": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.update({f"{DOWN}.bias": "W8A8"})),
        f"{DOWN}.bias: is labelled W8A8, and its module is W8A8: write FLOAT",
    ),
    "an unknown kind": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.update({f"{DOWN}.weight": "W3A3"})),
        f"{DOWN}: kind W3A3 is unknown; known are W4A16,",
    ),
    "no head key": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.pop("lm_head.weight")),
        "has no lm_head.weight; the engine looks it up even when the embedding is the head",
    ),
    "a tensor without a key": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.pop("model.norm.weight")),
        "model.norm.weight: quant_model_description.json has no such key; the engine stops with a KeyError",
    ),
    "a key that is no word": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.update({"model.norm.weight": 3})),
        "model.norm.weight: its kind is 3, not a word",
    ),
    "an older version": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.update(version="0.1")),
        "version is '0.1'; tensors are laid out as 1.0.0",
    ),
    "no group size": (
        lambda p: edit_json(p / DESCRIPTION, lambda d: d.pop("group_size")),
        "group_size is None, not a number",
    ),
    "an empty description": (lambda p: (p / DESCRIPTION).write_text("[]"), "is empty or no JSON object"),
    "a broken description": (lambda p: (p / DESCRIPTION).write_text("{"), f"{DESCRIPTION}: is not JSON"),
    "a leftover quantization_config": (
        lambda p: edit_json(p / "config.json", lambda c: c.update(text_config={"quantization_config": {}})),
        "config.json: text_config: has quantization_config; the engine stops",
    ),
    "a wrong shape": (
        lambda p: change_tensor(p, f"{UP}.weight_scale", lambda t: t.flatten()),
        f"{UP}.weight_scale: has shape [128]; W8A8 stores [128, 1] (N 1)",
    ),
    "a wrong type": (
        lambda p: change_tensor(p, f"{UP}.input_scale", lambda t: t.bfloat16()),
        f"{UP}.input_scale: is bfloat16; W8A8 stores float32",
    ),
    "a weight that is no matrix": (
        lambda p: change_tensor(p, f"{UP}.weight", lambda t: t.flatten()),
        f"{UP}: is W8A8, but its weight is missing or has no two dimensions",
    ),
    "a tensor that the kind has not": (
        lambda p: change_tensor(p, f"{UP}.bias", _drop) or _add(p, f"{UP}.scale_bias", torch.ones(128, 1)),
        f"{UP}.scale_bias: W8A8 has no such tensor; the engine finds no parameter for it",
    ),
    "a stray weight file": (
        lambda p: save_file({"model.extra": torch.zeros(2)}, p / "extra.safetensors"),
        f"extra.safetensors: is not in {INDEX}: a stray weight file",
    ),
    "a second copy of a tensor": (
        lambda p: save_file({"model.norm.weight": torch.zeros(64)}, p / "copy.safetensors"),
        "model.norm.weight: lies in copy.safetensors and in quant_model_weights-00001-of-00001.safetensors",
    ),
    "the source's index": (
        lambda p: (p / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json: is the index of other files; vLLM stops when those are not there",
    ),
    "weights of another format": (
        lambda p: (p / "pytorch_model.bin").write_text(""),
        "is a weight file of another format",
    ),
    "consolidated weights": (lambda p: (p / "consolidated.00.x").write_text(""), "consolidated.00.x: is a weight file"),
    "an index with a wrong total": (
        lambda p: edit_json(p / INDEX, lambda i: i["metadata"].update(total_size=7)),
        f"{INDEX}: says 7 bytes in all, and the tensors have",
    ),
    "an index without a tensor": (
        lambda p: edit_json(p / INDEX, lambda i: i["weight_map"].pop("model.norm.weight")),
        f"{INDEX}: lacks model.norm.weight",
    ),
    "an index that points to nothing": (
        lambda p: edit_json(p / INDEX, lambda i: i["weight_map"].update(ghost="x.safetensors")),
        f"{INDEX}: places ghost in x.safetensors, and it is nowhere",
    ),
    "a broken index": (lambda p: (p / INDEX).write_text("[]"), f"{INDEX}: is no index"),
    "a NaN": (
        lambda p: change_tensor(p, "model.norm.weight", row(2, float("nan"))),
        "model.norm.weight: 1 of its numbers are infinite or NaN",
    ),
    "a scale of zero": (
        lambda p: change_tensor(p, f"{UP}.weight_scale", row(2, 0)),
        f"{UP}.weight_scale: 1 of its scales are not above zero",
    ),
    "a head that is not the embedding it is tied to": (
        lambda p: edit_json(p / "config.json", lambda c: c.update(tie_word_embeddings=True)),
        "lm_head.weight: differs from model.embed_tokens.weight, and config.json says they are tied: loaders drop it",
    ),
    "no config.json": (lambda p: (p / "config.json").unlink(), "config.json: is missing"),
    "a broken config.json": (lambda p: (p / "config.json").write_text("{"), "config.json: is not JSON"),
    "a truncated file": (
        lambda p: _truncate(next(p.glob("*.safetensors"))),
        "quant_model_weights-00001-of-00001.safetensors: 9",
    ),
}


def _add(path: Path, name: str, tensor: torch.Tensor) -> None:
    """A new tensor, described like its module."""
    file = next(path.glob("*.safetensors"))
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})
    edit_json(path / DESCRIPTION, lambda d: d.update({name: "W8A8"}))


def _truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.filterwarnings("ignore:.*passes int32")  # a scale of zero makes the bias infinitely many units
@pytest.mark.parametrize("damage", ASCEND_DAMAGE)
def test_damage_of_an_ascendv1_directory_is_named(damage: str, tmp_path: Path, made: Callable[..., Path]) -> None:
    change, message = ASCEND_DAMAGE[damage]
    out = made(tmp_path / "out", "ascend", r.W8A8)
    change(out)
    found = texts(out)
    assert any(part in text for text in found for part in message.split("|")), found


@pytest.mark.parametrize(
    ("scheme", "target", "edit", "message"),
    [
        (MX8, "vllm-ascend-0.27", {"group_size": 0}, "group_size is 0, and MX kinds have blocks of 32"),
        (r.W4A8, "vllm-ascend-0.23", {"group_size": 32}, "W4A8_DYNAMIC has one scale a row: the engine wants 0"),
    ],
)
def test_a_group_size_that_stops_the_engine_is_named(
    scheme: LinearScheme, target: str, edit: dict[str, int], message: str, tmp_path: Path, made: Callable[..., Path]
) -> None:
    out = made(tmp_path / "out", "ascend", scheme, target=target)
    edit_json(out / DESCRIPTION, lambda d: d.update(edit))
    assert any(message in text for text in texts(out))


def test_scale_bias_is_checked_for_columns_and_values(tmp_path: Path, made: Callable[..., Path]) -> None:
    out = made(tmp_path / "out", "ascend", r.W4A8, target="vllm-ascend-0.23")
    change_tensor(out, f"{UP}.scale_bias", row(0, 2))
    change_tensor(out, f"{DOWN}.scale_bias", lambda t: t.sum(1, keepdim=True))
    found = texts(out)
    assert f"{UP}.scale_bias: 1 of its values do not follow from the module's other tensors" in found
    assert any(
        f"{DOWN}.scale_bias: has 1 columns; the engine splits this linear along its input and reads 16" in t
        for t in found
    )


def test_an_mx_exponent_of_nan_is_named(tmp_path: Path, made: Callable[..., Path]) -> None:
    out = made(tmp_path / "out", "ascend", MX8)
    change_tensor(out, f"{UP}.weight_scale", lambda t: torch.full_like(t, 255))
    assert any(f"{UP}.weight_scale: 256 of its numbers are infinite or NaN" in text for text in texts(out))


def test_experts_of_a_layer_need_one_kind(tmp_path: Path, made: Callable[..., Path]) -> None:
    out = made(tmp_path / "out", "ascend", r.W8A8_DYNAMIC)
    experts = {
        f"model.layers.0.mlp.experts.{i}.up_proj.weight": torch.zeros(4, 4, dtype=torch.bfloat16) for i in range(2)
    }
    save_file(experts, out / "experts.safetensors")
    kinds = dict(zip(experts, ("FLOAT", "W8A8_DYNAMIC"), strict=True))
    edit_json(out / DESCRIPTION, lambda d: d.update(kinds))
    assert any(
        "model.layers.0.mlp.experts: the engine takes expert 0's kind for all of them" in text for text in texts(out)
    )


# --- compressed-tensors


def _block(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda p: edit_json(p / "config.json", lambda c: edit(c["quantization_config"]))


COMPRESSED_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no quantization_status": (
        _block(lambda b: b.pop("quantization_status")),
        "quantization_status: is None, not 'compressed': transformers would take codes for weights, without an error",
    ),
    "the head is not ignored": (
        _block(lambda b: b.update(ignore=[])),
        "lm_head.weight_scale: is missing",
    ),
    "an unknown format": (_block(lambda b: b.update(format="int8")), "quantization_config.format: is 'int8'"),
    "an unknown key": (
        _block(lambda b: b["config_groups"]["group_0"]["weights"].update(observer2=1)),
        "config_groups.group_0",
    ),
    "a target that matches nothing": (
        _block(lambda b: b["config_groups"]["group_0"].update(targets=["re:.*nothing"])),
        "config_groups.group_0.targets: no module matches ['re:.*nothing']",
    ),
    "codes that the config leaves float": (
        _block(lambda b: b["ignore"].append(DOWN)),
        f"{DOWN}: config.json leaves it float, but it is stored with input_scale and weight_scale and a weight of int8",
    ),
    "a fused part ignored": (
        _block(lambda b: b["ignore"].append(Q)),
        f"{Q}: vLLM computes these as one linear, which needs one scheme: {Q} is float",
    ),
    "another quantization method": (_block(lambda b: b.update(quant_method="fp8")), "is in no known format"),
    "a missing scale": (
        lambda p: change_tensor(p, f"{UP}.weight_scale", _drop),
        f"{UP}.weight_scale: is missing; int-quantized needs it, and engines serve garbage without it",
    ),
    "a missing input scale": (lambda p: change_tensor(p, f"{UP}.input_scale", _drop), f"{UP}.input_scale: is missing"),
    "a one-dimensional scale": (
        lambda p: change_tensor(p, f"{UP}.weight_scale", lambda t: t.flatten()),
        f"{UP}.weight_scale: has shape [128]; int-quantized stores [128, 1]",
    ),
    "a scale of a wrong type": (
        lambda p: change_tensor(p, f"{UP}.weight_scale", lambda t: t.to(torch.int32)),
        f"{UP}.weight_scale: is int32; int-quantized stores float32 or bfloat16 or float16",
    ),
    "a missing weight": (
        lambda p: change_tensor(p, f"{UP}.weight", _drop),
        f"{UP}: has scales and no weight; engines serve what memory held",
    ),
    "a tensor too many": (
        lambda p: change_tensor(p, f"{UP}.bias", _drop) or _add_ct(p, f"{UP}.weight_zero_point"),
        f"{UP}.weight_zero_point: int-quantized with this scheme has no such tensor",
    ),
    "fused parts with two input scales": (
        lambda p: change_tensor(p, f"{Q}.input_scale", lambda t: t * 2),
        f"{Q}.input_scale: engines use one value for the fused linear: {Q} has",
    ),
    "fused parts with two zero points": (
        lambda p: change_tensor(p, f"{Q}.input_zero_point", lambda t: t + 1),
        f"{Q}.input_zero_point: engines use one value for the fused linear",
    ),
    "a file name that transformers does not look for": (
        lambda p: (p / "model.safetensors").rename(p / "weights.safetensors"),
        "weights.safetensors: transformers looks for model.safetensors only",
    ),
    "two files without an index": (
        lambda p: save_file({"x.y": torch.zeros(1)}, p / "second.safetensors"),
        "model.safetensors.index.json: is missing, and the weights are in 2 files",
    ),
}


def _add_ct(path: Path, name: str) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(
        {**tensors, name: torch.zeros(1, dtype=torch.int8)}, path / "model.safetensors", metadata={"format": "pt"}
    )


@pytest.mark.parametrize("damage", COMPRESSED_DAMAGE)
def test_damage_of_a_compressed_tensors_directory_is_named(
    damage: str, tmp_path: Path, made: Callable[..., Path]
) -> None:
    change, message = COMPRESSED_DAMAGE[damage]
    out = made(tmp_path / "out", "ct", r.W8A8)
    change(out)
    found = texts(out)
    assert any(message in text for text in found), found


def test_a_tied_head_that_a_target_claims_is_named(t_tied: Path, tmp_path: Path) -> None:
    r.save_ct(t_tied, tmp_path / "out", r.W8A8_DYNAMIC)
    edit_json(tmp_path / "out" / "config.json", lambda c: c["quantization_config"].update(ignore=[]))
    assert any("lacks lm_head, and a target claims it" in text for text in texts(tmp_path / "out"))


def test_a_scheme_of_another_writer_is_reported_as_unchecked(tmp_path: Path, made: Callable[..., Path]) -> None:
    out = made(tmp_path / "out", "ct", r.W8A8_DYNAMIC)
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 6, "type": "int", "strategy": "channel"},
        "format": "int-quantized",
    }
    edit_json(out / "config.json", lambda c: c["quantization_config"].update(config_groups={"group_0": group}))
    assert any("its scheme is not one this tool writes, so its tensors were not checked" in text for text in texts(out))


# --- against the source


@pytest.mark.parametrize(
    "word", ["W8A8_DYNAMIC", "W4A4_DYNAMIC", "W8A8FP8_DYNAMIC", "W8A16 group", "W4A8_DYNAMIC", "two level"]
)
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_one_scale_off_by_two_is_named(
    word: str, factor: float, t_bias: Path, tmp_path: Path, made: Callable[..., Path]
) -> None:
    scheme, target = ASCEND[word]
    out = made(tmp_path / "out", "ascend", scheme, target=target)
    change_tensor(out, f"{UP}.weight_scale", row(5, factor))
    found = texts(out, t_bias)
    assert any(
        f"{UP}: 1 of 128 rows of its weight are further from the source than rounding moves them; row 5" in t
        for t in found
    )
    assert all(UP in text for text in found)


@pytest.mark.parametrize("scheme", [MX8, MX4], ids=["mxfp8", "mxfp4"])
def test_one_exponent_off_by_one_is_named(
    scheme: LinearScheme, t_bias: Path, tmp_path: Path, made: Callable[..., Path]
) -> None:
    out = made(tmp_path / "out", "ascend", scheme)
    change_tensor(
        out, f"{UP}.weight_scale", lambda t: t + torch.nn.functional.one_hot(torch.tensor(5), 128)[:, None].to(t.dtype)
    )
    assert any(f"{UP}: 1 of 128 rows" in text for text in texts(out, t_bias))


@pytest.mark.parametrize("word", COMPRESSED)
def test_swapped_codes_are_named(word: str, t_bias: Path, tmp_path: Path, made: Callable[..., Path]) -> None:
    out = made(tmp_path / "out", "ct", COMPRESSED[word])
    packed = word.startswith(("W4A16", "W8A16", "MXFP4"))
    change_tensor(out, f"{UP}.weight{'_packed' if packed else ''}", lambda t: t.view(torch.uint8).flip(0).view(t.dtype))
    assert any(f"{UP}: 128 of 128 rows" in text for text in texts(out, t_bias))


def test_what_was_not_quantized_must_be_as_in_the_source(
    t_bias: Path, tmp_path: Path, made: Callable[..., Path]
) -> None:
    out = made(tmp_path / "out", "ascend", r.W8A8)
    change_tensor(out, "model.norm.weight", row(0, 1.5))
    change_tensor(out, "model.embed_tokens.weight", _drop)
    change_tensor(out, f"{UP}.bias", lambda t: t + 1)
    (out / "tokenizer.json").write_text("{}")
    (out / "generation_config.json").unlink()
    found = texts(out, t_bias)
    for text in (
        "model.norm.weight: differs from the source, and it is not quantized",
        "model.embed_tokens.weight: is in the source and in no file here",
        f"{UP}.bias: differs from the source, and it is not quantized",
        "tokenizer.json: differs from the source's",
        "generation_config.json: is missing; the source has it beside its weights",
    ):
        assert text in found


def test_what_a_step_rewrote_is_not_compared(t_bias: Path, tmp_path: Path, made: Callable[..., Path]) -> None:
    out = made(tmp_path / "out", "ascend", r.W8A8_DYNAMIC)
    change_tensor(out, "model.norm.weight", row(0, 1.5))
    change_tensor(out, f"{UP}.weight_scale", row(5, 2))
    assert len(texts(out, t_bias)) == 2
    names = ["model.norm.weight", f"{UP}.weight"]
    assert verify_directory(out, t_bias, names) == []
    (out / "quant_report.json").write_text(json.dumps({"rewritten": names[:1]}))
    (left,) = texts(out, t_bias)
    assert left.startswith(f"{UP}: 1 of 128 rows")


def test_another_model_s_source_is_noticed(tmp_path: Path, made: Callable[..., Path]) -> None:
    out = made(tmp_path / "out", "ascend", r.W8A8)
    other = fixtures.t_bias(tmp_path / "other", hidden_size=128)
    found = texts(out, other)
    assert any(f"{UP}: is (128, 64), in the source (128, 128)" in text for text in found)
    shallow = fixtures.t_bias(tmp_path / "shallow", num_hidden_layers=1)
    found = texts(out, shallow)
    assert f"{UP}: is quantized, and the source has no such weight" in found
    assert "model.layers.1.input_layernorm.weight: is not in the source; loaders have no place for it" in found


# --- the command


def test_the_command_prints_a_table_and_says_no_findings(
    t_bias: Path, tmp_path: Path, made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path / "out", "ascend", r.W8A8)
    assert verify_main(out, t_bias) == 0
    printed = capsys.readouterr().out
    assert "W8A8" in printed
    assert "14" in printed
    assert "no findings" in printed


def test_the_command_prints_findings_and_fails(
    tmp_path: Path, made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path / "out", "ascend", r.W8A8)
    change_tensor(out, f"{UP}.deq_scale", _drop)
    assert verify_main(out, None) == 1
    printed = capsys.readouterr().out
    assert f"{UP}.deq_scale: is missing; W8A8 needs it" in printed
    assert "2 findings" in printed


def test_a_float_model_is_in_no_known_format(t_dense: Path) -> None:
    (found,) = texts(t_dense)
    assert (
        "is in no known format: no quant_model_description.json or a quantization_config of compressed-tensors" in found
    )


def test_a_path_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="holds no model; give the directory that quant wrote"):
        verify_directory(tmp_path)
    with pytest.raises(InvalidModelError, match="is no directory"):
        verify_directory(tmp_path / "nothing")
