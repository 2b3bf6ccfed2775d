from pathlib import Path

import pytest

from msmodelslim.saver import side_files as module
from msmodelslim.saver.side_files import copy_side_files, side_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    content = {
        "config.json": "{}",
        "generation_config.json": '{"do_sample": false, "temperature": 0.9}',
        "model-00001-of-00001.safetensors": "weights",
        "model.safetensors.index.json": "{}",
        "stray.safetensors": "weights",
        "pytorch_model.bin": "weights",
        "consolidated.00.pth": "weights",
        "consolidated.json": "weights",
        "original/params.json": "{}",
        ".git/HEAD": "ref",
        ".gitattributes": "x",
        "chat_template.jinja": "{{ x }}",
        "additional_chat_templates/tool.jinja": "{{ y }}",
        "modeling_x.py": "x = 1",
        "tokenizer.model": "\x00",
        "vocab.tiktoken": "x",
        "LICENSE": "free",
        "picture.png": "png",
        "large.dat": "d" * 200,
        "large.json": "j" * 200,
        "2_Dense/model.safetensors": "weights",
    }
    for name, text in content.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    return source


def test_everything_but_weights_indexes_and_hidden_files_is_copied_byte_for_byte(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 100)
    found = side_files(source, {"model-00001-of-00001.safetensors"})
    copy_side_files(found, source, tmp_path / "target")
    copied = {str(path.relative_to(tmp_path / "target")) for path in (tmp_path / "target").rglob("*") if path.is_file()}
    assert copied == {
        "LICENSE",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "large.json",
        "modeling_x.py",
        "picture.png",
        "tokenizer.model",
        "vocab.tiktoken",
    }
    assert all((tmp_path / "target" / name).read_bytes() == (source / name).read_bytes() for name in copied)
    assert found.nbytes == sum((source / name).stat().st_size for name in copied)


def test_what_stays_behind_is_listed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 100)
    (source / "linked").symlink_to(source / "additional_chat_templates")
    assert side_files(source, {"model-00001-of-00001.safetensors"}).left_out == [
        "2_Dense/model.safetensors",
        "consolidated.00.pth",
        "consolidated.json",
        "large.dat",
        "linked/",
        "pytorch_model.bin",
        "stray.safetensors",
    ]


def test_files_behind_links_of_a_hub_cache_are_copied(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text("{}")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "tokenizer.json").symlink_to(tmp_path / "blobs" / "abc")
    copy_side_files(side_files(tmp_path / "snapshot", set()), tmp_path / "snapshot", tmp_path / "target")
    assert not (tmp_path / "target" / "tokenizer.json").is_symlink()
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
