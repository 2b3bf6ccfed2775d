import json
import shutil
import socket
from pathlib import Path

import pytest
import tokenizers
import torch

from msmodelslim.calibration import Sample
from msmodelslim.errors import InvalidDatasetError, InvalidModelError, SecurityError
from msmodelslim.model.families import open_model
from tests import fixtures

CPU = torch.device("cpu")


def tokens(path: Path, *samples: Sample, max_length: int = 2048) -> list[list[int]]:
    found = open_model(path, None).handle_dataset(list(samples), CPU, max_length)
    for entry in found:
        assert entry.keys() == {"input_ids"}
        assert entry["input_ids"].dtype == torch.long
        assert entry["input_ids"].shape[0] == 1
    return [entry["input_ids"][0].tolist() for entry in found]


def plain(path: Path, text: str) -> list[int]:
    """Ids without special tokens, from the tokenizers library alone."""
    return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).ids


@pytest.fixture
def copied(t_dense, tmp_path):
    return Path(shutil.copytree(t_dense, tmp_path / "copied"))


def test_text_gets_the_special_tokens_of_the_tokenizer(t_dense):
    text = "the other hen, é"
    assert tokens(t_dense, Sample(0, "a:1", text=text)) == [[0, *plain(t_dense, text)]]


def test_messages_go_through_the_chat_template(t_dense):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]
    written = "<|user|>hi</s><|assistant|>there</s>"  # fixtures.CHAT_TEMPLATE by hand
    assert tokens(t_dense, Sample(0, "a:1", messages=messages)) == [plain(t_dense, written)]


def test_token_ids_stay_what_they_are_and_need_no_tokenizer(copied):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (copied / file).unlink()
    assert tokens(copied, Sample(0, "a:1", input_ids=[5, 319, 0])) == [[5, 319, 0]]


def test_every_form_is_cut_to_the_limit(t_dense, caplog):
    samples = [
        Sample(0, "a:1", input_ids=[7] * 5000),
        Sample(1, "a:2", text="x" * 300),
        Sample(2, "a:3", messages=[{"role": "user", "content": "x" * 400}]),
        Sample(3, "a:4", text="short"),
    ]
    found = tokens(t_dense, *samples, max_length=128)
    assert [len(ids) for ids in found] == [128, 128, 128, 1 + len(plain(t_dense, "short"))]
    assert found[1][:2] == [0, *plain(t_dense, "x")]
    assert "3 of 4 samples are cut to 128 tokens; the longest, a:1, has 5000" in caplog.text


def test_samples_within_the_limit_do_not_warn(t_dense, caplog):
    tokens(t_dense, Sample(0, "a:1", input_ids=[7] * 128), max_length=128)
    assert not caplog.records


@pytest.mark.parametrize("number", [-1, fixtures.VOCABULARY, 10**12])
def test_an_id_that_the_model_does_not_have_names_its_sample(t_dense, number):
    with pytest.raises(InvalidDatasetError) as error:
        tokens(t_dense, Sample(0, "a:1", input_ids=[1]), Sample(1, "a:2", input_ids=[3, number]))
    assert f"a:2: token id {number} is not one of the model's 320 (0 to 319)" in str(error.value)


def test_a_sample_without_tokens_is_named(t_dense):
    with pytest.raises(InvalidDatasetError, match="a:9: the sample has no token; take it out"):
        tokens(t_dense, Sample(0, "a:9", input_ids=[]))


def edit(path: Path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_messages_without_a_chat_template_are_refused(copied):
    edit(copied / "tokenizer_config.json", chat_template=None)
    with pytest.raises(InvalidDatasetError, match="a:1: has messages, but the model's tokenizer has no chat template"):
        tokens(copied, Sample(0, "a:1", messages=[{"role": "user", "content": "hi"}]))


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ 1 + 'roles' }}"])
def test_messages_that_the_template_refuses_are_named(copied, template):
    edit(copied / "tokenizer_config.json", chat_template=template)
    with pytest.raises(InvalidDatasetError, match=r"a:1: the model's chat template refuses .*(role|type)"):
        tokens(copied, Sample(0, "a:1", messages=[{"role": "user", "content": "hi"}]))


def test_a_model_without_a_tokenizer_is_told_when_text_comes(copied):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (copied / file).unlink()
    with pytest.raises(InvalidModelError, match=r"has no tokenizer \(tokenizer.json or the like\)"):
        tokens(copied, Sample(0, "a:1", text="hi"))


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json: is not JSON"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "tokenizer.json: is not JSON"),
        ("tokenizer.json", "{}", "transformers cannot load its tokenizer: KeyError"),
    ],
)
def test_a_damaged_tokenizer_is_named(copied, file, content, sentence):
    (copied / file).write_text(content)
    with pytest.raises(InvalidModelError, match=sentence):
        tokens(copied, Sample(0, "a:1", text="hi"))


def test_a_tokenizer_that_wants_to_run_code_is_refused(copied):
    edit(copied / "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.Tokenizer", None]})
    with pytest.raises(SecurityError, match=r"mine\.Tokenizer.*--trust_remote_code True"):
        tokens(copied, Sample(0, "a:1", text="hi"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_tokenizing_needs_no_network_and_leaves_the_directory_alone(tmp_path, monkeypatch, family):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    path = fixtures.t_dense(tmp_path, family)
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.iterdir()}
    assert tokens(path, Sample(0, "a:1", text="the"))
    assert {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.iterdir()} == before
