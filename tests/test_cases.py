"""What people who quantize models complain about, each as a whole run of the command on a tiny model.

Parts have their own tests beside them; here the command is what a stranger would type, and what it prints, returns and
writes is what is judged.
"""

import hashlib
import json
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from msmodelslim.cli import main
from msmodelslim.model.checkpoint import Checkpoint
from tests import fixtures
from tests.artifact.damage import change_tensor, edit_json, row

W8 = "weight: {dtype: int8, scope: per_channel, symmetric: true, method: minmax}"
STATIC = f"{{act: {{dtype: int8, scope: per_tensor, symmetric: true, method: minmax}}, {W8}}}"
DYNAMIC = f"{{act: {{dtype: int8, scope: per_token, symmetric: true, method: minmax}}, {W8}}}"
TEXTS = ["The sun rises in the east.", "A cat sat on the mat, and then it ran.", "One more line.", "And another one."]
SAVERS = {"ascendv1": "ascendv1_saver", "compressed-tensors": "compressed_tensors"}
savers = pytest.mark.parametrize("saver", SAVERS.values(), ids=SAVERS)


@dataclass
class Done:
    """What one command came to."""

    code: int
    out: str
    err: str
    path: Path

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.path.joinpath("quant_report.json").read_text()))


Quant = Callable[..., Done]


def step(qconfig: str = STATIC, options: str = "") -> str:
    return f"    - {{type: linear_quant, qconfig: {qconfig}{options}}}\n"


def recipe(*steps: str, saver: str = "compressed_tensors", more: str = "") -> str:
    process = "".join(steps or (step(),))
    return f"apiversion: modelslim_v1\nspec:\n  process:\n{process}  save: [{{type: {saver}}}]\n{more}"


def jsonl(texts: list[str], end: str = "\n") -> str:
    return "".join(json.dumps({"text": text}) + end for text in texts)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(jsonl(TEXTS))
    return path


@pytest.fixture
def quant(t_dense: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> Quant:
    """Runs `msmodelslim quant` with a recipe's text; by default on t_dense, the four texts, one CPU."""

    def run(text: str, *words: str, source: Path = t_dense, out: str = "out", dataset: Path = data) -> Done:
        (tmp_path / "recipe.yaml").write_text(text)
        line: list[object] = ["quant", "--model_path", source, "--save_path", tmp_path / out]
        line += ["--config_path", tmp_path / "recipe.yaml", "--dataset", dataset]
        device = [] if "--device" in words else ["--device", "cpu"]
        code = main([str(word) for word in [*line, *device, *words]])
        return Done(code, *capsys.readouterr(), path=tmp_path / out)

    return run


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a weight fails."""

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "tensor", refuse)
    monkeypatch.setattr(Checkpoint, "weight", refuse)


def hashes(folder: Path, pattern: str = "*") -> dict[str, str]:
    files = sorted(path for path in folder.rglob(pattern) if path.is_file() and path.name != "quant_report.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# --- data


def test_a_byte_order_mark_and_line_ends_change_no_byte_of_the_result(quant: Quant, tmp_path: Path) -> None:
    plain = jsonl(TEXTS)
    spellings = {
        "plain": plain.encode(),
        "bom": b"\xef\xbb\xbf" + plain.encode(),
        "crlf": jsonl(TEXTS, "\r\n").encode(),
        "bom_crlf": b"\xef\xbb\xbf" + jsonl(TEXTS, "\r\n").encode(),
        "no_last_newline": plain.rstrip().encode(),
    }
    found = []
    for name, content in spellings.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
        done = quant(recipe(), dataset=tmp_path / f"{name}.jsonl", out=name)
        assert done.code == 0, done.err
        found.append((hashes(done.path), done.report["data"]["fingerprint"], done.report["data"]["tokens"]))
    assert all(entry == found[0] for entry in found)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("device", ["cpu", "cpu:0,1"])
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"text": "a b"}', "", "  ", "[1,2]", '"abc"', "null", "{broken"], "set.jsonl:4 (sample 1) is a list"),
        ([], "0 records read, 0 too short, 0 kept"),
        (['{"text": ""}', '{"text": " "}'], "2 records read, 2 too short, 0 kept"),
        (['{"content": "a"}'], "keys found: content"),
        (
            ['{"text": "a"}', '{"messages": [{"role": "user"}]}'],
            "set.jsonl:2 (sample 1) messages[0] has no content; keys found: role",
        ),
    ],
)
def test_bad_data_is_told_once_before_a_weight_is_read_or_a_rank_started(
    device: str, lines: list[str], said: str, quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msmodelslim.runner.dp_layer_wise_runner.DPLayerWiseRunner.run", lambda _: pytest.fail("ran"))
    (tmp_path / "set.jsonl").write_text("".join(line + "\n" for line in lines))
    done = quant(recipe(), "--device", device, dataset=tmp_path / "set.jsonl")
    assert done.code == 1
    assert done.err.count("error:") == 1
    assert said in done.err
    assert not done.path.exists()


def test_a_sample_of_300000_characters_is_cut_and_told_and_costs_little_memory(quant: Quant, tmp_path: Path) -> None:
    limit = "  max_length: 128\n"
    (tmp_path / "usual.jsonl").write_text(jsonl(["word " * 200, *TEXTS]))
    (tmp_path / "long.jsonl").write_text(jsonl([*TEXTS[:3], "word " * 60_000]))
    usual = quant(recipe(more=limit), dataset=tmp_path / "usual.jsonl", out="usual").report
    done = quant(recipe(more=limit), dataset=tmp_path / "long.jsonl", out="long")
    assert done.code == 0
    assert re.search(r"WARNING 1 of 4 samples are cut to 128 tokens; the longest, long\.jsonl:4, has \d{5,}", done.err)
    assert "long.jsonl:4 is 300000 characters long" in done.out
    # Attention over the whole line would take terabytes; its text and token numbers take megabytes.
    assert done.report["peak_memory_mib"] - usual["peak_memory_mib"] < 200


def test_the_limit_holds_for_token_numbers_too(quant: Quant, tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [3 + i % 200 for i in range(5000)]}) + "\n")
    done = quant(recipe(more="  max_length: 128\n"), dataset=tmp_path / "ids.jsonl")
    assert done.code == 0
    assert done.report["data"]["tokens"] == 128


def test_the_default_data_needs_no_network(
    t_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something called the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "recipe.yaml").write_text(recipe(more="  max_samples: 2\n  max_length: 16\n"))
    words = f"quant --model_path {t_dense} --save_path {tmp_path}/out --config {tmp_path}/recipe.yaml --device cpu"
    assert main(words.split()) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "quant_report.json").read_text())
    assert report["data"]["source"].endswith("lab_calib/mix_calib.jsonl")


# --- the source


@savers
@pytest.mark.parametrize("qconfig", [STATIC, DYNAMIC, f"{{{W8}}}"], ids=["static", "dynamic", "w8a16"])
def test_a_block_fp8_source_gives_the_bytes_of_its_decoding(
    qconfig: str, saver: str, t_fp8: Path, t_fp8_plain: Path, quant: Quant
) -> None:
    text = recipe(step(qconfig, ", exclude: ['*.o_proj']"), saver=saver)
    one, other = quant(text, source=t_fp8, out="fp8"), quant(text, source=t_fp8_plain, out="plain")
    assert (one.code, other.code) == (0, 0), one.err + other.err
    assert hashes(one.path, "*.safetensors") == hashes(other.path, "*.safetensors")
    configs = [json.loads((done.path / "config.json").read_text()) for done in (one, other)]
    assert configs[0] == configs[1]


def test_a_stray_weight_file_changes_nothing_and_is_not_copied(quant: Quant, tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source")
    before = hashes(quant(recipe(), source=source, out="before").path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({name: torch.zeros(128, 64, dtype=torch.bfloat16)}, source / "extra.safetensors")
    done = quant(recipe(), source=source, out="after")
    assert hashes(done.path) == before
    assert "files of the source that were not copied: extra.safetensors" in done.out


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, torch.float16),
        ({}, torch.bfloat16),
    ],
    ids=["old key", "new key", "keys that disagree", "no key"],
)
def test_the_type_is_found_under_either_key_and_the_keys_stay_as_they_were(
    keys: dict[str, str], expected: torch.dtype, quant: Quant, tmp_path: Path
) -> None:
    source = fixtures.t_dense(tmp_path / "source")
    edit_json(source / "config.json", lambda config: (config.pop("dtype"), config.update(keys)))
    done = quant(recipe(step(DYNAMIC)), source=source)
    assert done.code == 0
    written = json.loads((done.path / "config.json").read_text())
    assert {key: value for key, value in written.items() if "dtype" in key} == keys
    assert list(written)[: len(written) - 1] == list(json.loads((source / "config.json").read_text()))
    scale = tensors_of(done.path)["model.layers.0.mlp.up_proj.weight_scale"]
    assert scale.dtype == expected
    assert ("disagrees" in done.err) == (len(keys) == 2)


MODELING = """
from transformers import LlamaForCausalLM


class Mine(LlamaForCausalLM):
    _tied_weights_keys = {ties}
"""


@pytest.mark.parametrize("ties", ['{"lm_head.weight": "model.embed_tokens.weight"}', '["lm_head.weight"]', "None"])
def test_a_model_with_code_of_its_own_runs_when_allowed_and_takes_its_code_along(
    ties: str, quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = fixtures.t_dense(tmp_path / "source")
    (source / "modeling_mine.py").write_text(MODELING.replace("{ties}", ties))
    edit_json(
        source / "config.json", lambda config: config.update(auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    )
    refused = quant(recipe(), source=source)
    assert refused.code == 1
    assert "wants to run Python code of its own (modeling_mine.Mine)" in refused.err
    done = quant(recipe(), "--trust_remote_code", source=source)
    assert done.code == 0, done.err
    assert (done.path / "modeling_mine.py").read_bytes() == (source / "modeling_mine.py").read_bytes()
    (tmp_path / "text.txt").write_text("The sun rises in the east. " * 20)
    words = ["eval", str(done.path), "--device", "cpu", "--windows", "1", "--window_length", "16"]
    assert main([*words, "--text", str(tmp_path / "text.txt")]) == 1
    assert main([*words, "--text", str(tmp_path / "text.txt"), "--trust_remote_code"]) == 0, capsys.readouterr().err


# --- the result


@savers
def test_a_linear_excluded_in_every_layer_keeps_its_bytes_and_is_listed(saver: str, t_bias: Path, quant: Quant) -> None:
    done = quant(recipe(step(DYNAMIC, ", exclude: ['*.o_proj']"), saver=saver), source=t_bias)
    assert done.code == 0, done.err
    source, found = tensors_of(t_bias), tensors_of(done.path)
    kept = [name for name in source if ".o_proj." in name]
    assert len(kept) == 4
    assert all(same_bytes(found[name], source[name]) for name in kept)
    assert done.report["left_float"] == [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    if saver == "ascendv1_saver":
        words = json.loads((done.path / "quant_model_description.json").read_text())
        assert {name for name, word in words.items() if word == "FLOAT"} >= set(kept)
        assert words["model.layers.0.self_attn.q_proj.weight"] == "W8A8_DYNAMIC"
    else:
        ignored = json.loads((done.path / "config.json").read_text())["quantization_config"]["ignore"]
        listed = [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
        assert all(name in ignored for name in [*listed, "lm_head"])


@savers
def test_an_extra_prediction_block_is_described_as_float(saver: str, t_mtp: Path, quant: Quant) -> None:
    done = quant(recipe(step(DYNAMIC), saver=saver), source=t_mtp)
    assert done.code == 0, done.err
    tail = [name for name in tensors_of(t_mtp) if name.startswith("model.layers.2.")]
    if saver == "ascendv1_saver":
        words = json.loads((done.path / "quant_model_description.json").read_text())
        assert {words[name] for name in tail} == {"FLOAT"}
    else:
        ignored = json.loads((done.path / "config.json").read_text())["quantization_config"]["ignore"]
        linears = {name.removesuffix(".weight") for name in tail if name.endswith("_proj.weight")}
        assert linears <= set(ignored)


def test_everything_beside_the_weights_comes_along_byte_for_byte(quant: Quant, tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}\r\n")
    (source / "LICENSE").write_text("Do what you like.\n")
    (source / "assets").mkdir()
    (source / "assets" / "logo.svg").write_bytes(b"<svg/>\xff")
    (source / "empty").mkdir()
    with (source / "recording.wav").open("wb") as stream:
        stream.truncate(65 << 20)
    done = quant(recipe(), source=source)
    assert done.code == 0, done.err
    beside = {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and ".safetensors" not in path.name
    }
    beside -= {Path("config.json"), Path("recording.wav")}
    assert {Path("tokenizer.json"), Path("tokenizer_config.json"), Path("assets/logo.svg")} < beside
    for name in beside:
        assert (done.path / name).read_bytes() == (source / name).read_bytes(), name
    # Sampling settings that transformers would refuse to save are none of our business.
    assert json.loads((done.path / "generation_config.json").read_text())["temperature"] == 0.9
    assert "files of the source that were not copied: recording.wav" in done.out
    assert all(path.stat().st_size if path.is_file() else any(path.iterdir()) for path in done.path.rglob("*"))


def test_a_second_run_into_a_result_is_refused_or_replaces_it_as_a_whole(quant: Quant) -> None:
    first = quant(recipe(saver="ascendv1_saver"))
    assert first.code == 0
    before = hashes(first.path)
    refused = quant(recipe())
    assert refused.code == 1
    assert "is not empty" in refused.err
    assert hashes(first.path) == before
    assert quant(recipe(), "--overwrite").code == 0
    assert not set(before) & set(hashes(first.path, "*.safetensors"))
    assert not (first.path / "quant_model_description.json").exists()


# --- what engines make of it


def test_inspect_prints_the_tensor_parallel_degrees(
    quant: Quant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {"hidden_size": 896, "intermediate_size": 896, "num_attention_heads": 14, "num_key_value_heads": 7}
    source = fixtures.t_dense(tmp_path / "source", num_hidden_layers=1, **wide)
    w4 = "{weight: {dtype: int4, scope: per_group, symmetric: true, method: minmax, ext: {group_size: 128}}}"
    assert quant(recipe(step(w4)), source=source).code == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "tensor-parallel degrees that fit the sizes: 1, 7\n" in capsys.readouterr().out


def test_verify_names_a_scale_that_is_off_by_two(
    quant: Quant, t_dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = quant(recipe(step(DYNAMIC)))
    line = ["verify", str(done.path), "--source", str(t_dense)]
    assert main(line) == 0
    assert "no findings" in capsys.readouterr().out
    change_tensor(done.path, "model.layers.1.mlp.up_proj.weight_scale", row(7, 2.0))
    assert main(line) == 1
    out = capsys.readouterr().out
    assert "model.layers.1.mlp.up_proj: 1 of 128 rows" in out
    assert "1 finding\n" in out


# --- layers and numbers


@savers
def test_a_layer_whose_parts_are_not_known_is_quantized_with_a_warning(
    saver: str, quant: Quant, tmp_path: Path
) -> None:
    source = fixtures.t_gemma2(tmp_path / "gemma2")
    weight = "{weight: {dtype: int4, scope: per_channel, symmetric: true, method: gptq}}"
    done = quant(recipe(step(STATIC if saver == "ascendv1_saver" else weight), saver=saver), source=source)
    assert done.code == 0, done.err
    assert len(done.report["modules"]) == 14
    (warning,) = [sentence for sentence in done.report["warnings"] if "not the usual ones" in sentence]
    assert warning.startswith("the parts of Gemma2DecoderLayer are not the usual ones: pre_feedforward_layernorm bes")
    assert warning.endswith("so nobody checked that linears which engines fuse have one scheme and one input scale")
    assert warning in done.out


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("steps", "saver", "said"),
    [
        (
            ["    - {type: smooth_quant}\n", step()],
            "compressed_tensors",
            "leave out the steps that need the structure of a layer (smoothing, rotation)",
        ),
        (
            [step(DYNAMIC.replace("weight: {dtype: int8", "weight: {dtype: int4"))],
            "ascendv1_saver, target: vllm-ascend-0.23",
            "model.layers.0.self_attn.q_proj: W4A8_DYNAMIC of ascendV1 depends on whether engines split the linear "
            "along its input, but the parts of Gemma2DecoderLayer are not the usual ones",
        ),
    ],
    ids=["smoothing", "sums of the parts of an input"],
)
def test_what_needs_the_parts_of_a_layer_is_refused_where_they_are_not_known(
    steps: list[str], saver: str, said: str, quant: Quant, tmp_path: Path
) -> None:
    done = quant(recipe(*steps, saver=saver), source=fixtures.t_gemma2(tmp_path / "gemma2"))
    assert done.code == 1
    assert said in done.err


# --- told early

Prepare = Callable[[Path, Path], list[str]]


def broken(change: Callable[[Path], object]) -> Prepare:
    """A change of the source."""

    def prepare(source: Path, _: Path) -> list[str]:
        change(source)
        return []

    return prepare


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


def cut(source: Path) -> None:
    path = source / shard(3)
    path.write_bytes(path.read_bytes()[:-10])


def two_missing(source: Path) -> None:
    (source / shard(2)).unlink()
    (source / shard(3)).unlink()


def no_up_proj(source: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(name, None) is not None:
            save_file(tensors, file, metadata={"format": "pt"})
    edit_json(source / "model.safetensors.index.json", lambda index: index["weight_map"].pop(name))


def bitsandbytes(source: Path) -> None:
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    edit_json(source / "config.json", lambda config: config.update(quantization_config=how))


def occupied(_: Path, out: Path) -> list[str]:
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    return []


def a_file(_: Path, out: Path) -> list[str]:
    out.write_text("mine")
    return []


GROUP_48 = "{weight: {dtype: int4, scope: per_group, symmetric: true, method: minmax, ext: {group_size: 48}}}"
W4A8 = DYNAMIC.replace("weight: {dtype: int8", "weight: {dtype: int4")
Q_K = ", include: ['*.q_proj', '*.v_proj', '*.k_proj', '*.gate_proj']"
FAULTS: dict[str, tuple[str, Prepare, tuple[str, ...]]] = {
    "two shards missing": (recipe(), broken(two_missing), (shard(2) + ": is missing", shard(3) + ": is missing")),
    "shard cut": (recipe(), broken(cut), (shard(3) + ": 9", "(10 bytes are missing)")),
    "pointer": (
        recipe(),
        broken(lambda s: (s / shard(1)).write_text("version https://git-lfs.github.com/spec/v1\nsize 1234567890\n")),
        (shard(1) + ": is a git-lfs pointer", "1234567890 bytes"),
    ),
    "tensor missing": (recipe(), broken(no_up_proj), ("lacks 1 tensors", "model.layers.1.mlp.up_proj.weight")),
    "quantized source": (recipe(), broken(bitsandbytes), ("already quantized by 'bitsandbytes'",)),
    "no tokenizer": (
        recipe(),
        broken(lambda s: [path.unlink() for path in s.glob("tokenizer*")]),
        ("has no tokenizer", "or give calibration data as input_ids"),
    ),
    "model of no type": (recipe(), lambda *_: ["--model_type", "Quen3-8B"], ("'Quen3-8B' begins like no known",)),
    "absent device": (recipe(), lambda *_: ["--device", "npu:3"], ("npu:3 is not on this machine",)),
    "occupied target": (recipe(), occupied, ("is not empty; it holds notes.txt",)),
    "target is a file": (recipe(), a_file, ("is a file; give a directory",)),
    "one of q, k, v": (recipe(step(STATIC, ", exclude: ['*.k_proj']")), lambda *_: [], ("k_proj is float",)),
    "gate and up differ": (
        recipe(step(DYNAMIC, Q_K), step(STATIC, ", include: ['*.up_proj']")),
        lambda *_: [],
        ("gate_proj and model.layers.0.mlp.up_proj as one linear, so they need one scheme",),
    ),
    "group that does not divide": (recipe(step(GROUP_48)), lambda *_: [], ("48", "model.layers.0.self_attn.q_proj")),
    "scheme without a reader": (
        recipe(step(W4A8), saver="ascendv1_saver"),
        lambda *_: [],
        ("model.layers.0.self_attn.q_proj", "ascendv1_saver", "vllm-ascend-0.27", "W4A4_DYNAMIC"),
    ),
    "dead patterns": (
        recipe(step(STATIC, ", include: ['*.qproj']")),
        lambda *_: [],
        ("no step touches any linear of llama",),
    ),
    "recipe": (
        recipe(step(STATIC, ", inclde: ['*']"), more="  runnr: auto\n"),
        lambda *_: [],
        ("2 mistakes in ", "inclde: unknown key; write 'include'", "runnr: unknown key; write 'runner'"),
    ),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("devices", ["1", "2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_dry_run_finds_what_can_be_known_early_and_says_it_once(
    fault: str, devices: str, t_dense: Path, quant: Quant, tmp_path: Path
) -> None:
    text, prepare, expected = FAULTS[fault]
    source = shutil.copytree(t_dense, tmp_path / "source")
    words = prepare(source, tmp_path / "out")
    before = hashes(tmp_path)
    before.pop("recipe.yaml", None)
    if devices == "2" and "--device" not in words:
        words += ["--device", "cpu:0,1"]
    done = quant(text, "--dry_run", *words, source=source)
    assert done.code == 1
    assert done.err.count("error:") == 1
    assert "Traceback" not in done.err
    for part in expected:
        assert part in done.err
    after = hashes(tmp_path)
    after.pop("recipe.yaml")
    assert after == before


def test_a_pattern_that_matches_nothing_is_told_in_the_summary(quant: Quant) -> None:
    done = quant(recipe(step(DYNAMIC, ", exclude: ['*.no_such_part']")), "--dry_run")
    assert done.code == 0
    assert "exclude pattern '*.no_such_part' of linear_quant matched nothing it works on" in done.out
    assert not done.path.exists()


def test_two_devices_and_a_runner_for_one_warn(quant: Quant) -> None:
    done = quant(recipe(step(DYNAMIC), more="  runner: layer_wise\n"), "--device", "cpu", "--device_id", "0", "1")
    assert done.code == 0
    assert "WARNING spec.runner is layer_wise, which uses one device: 1 of the 2 given stay idle" in done.err
    assert done.report["run"]["ranks"] == 1


def test_an_error_in_a_layer_names_tensor_layer_step_and_phase(quant: Quant, tmp_path: Path) -> None:
    source = fixtures.t_dense(tmp_path / "source", shards=1)
    change_tensor(source, "model.layers.1.mlp.up_proj.weight", row(3, float("nan")))
    done = quant(recipe(step(DYNAMIC)), source=source)
    assert done.code == 1
    assert re.search(r"error: model\.layers\.1\.mlp\.up_proj.*64.*\n  at model\.layers\.1, linear_quant, \w+", done.err)
    assert not done.path.exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
    ],
)
def test_too_little_memory_is_told_with_the_length_of_the_samples(
    error: RuntimeError, quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", fail)
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"input_ids": [5] * n}) + "\n" for n in (3, 37, 20)))
    done = quant(recipe(), dataset=tmp_path / "ids.jsonl")
    assert done.code == 1
    first_line = str(error).splitlines()[0].rstrip(".")
    assert f"error: out of memory with samples of up to 37 tokens: {first_line}; lower max_length in" in done.err
    assert "\n  at model.layers.0, linear_quant, " in done.err
    assert not done.path.exists()


def test_nothing_is_written_where_nothing_may_be_written(quant: Quant, tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to("/proc")
    done = quant(recipe(), out="nowhere/result")
    assert done.code == 1
    assert re.search(r"nowhere/result cannot be made: /proc takes no files \(.+\); choose a writable place", done.err)
