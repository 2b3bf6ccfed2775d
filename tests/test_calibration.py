"""Data sets: every spelling of the same samples reads the same, and bad ones are refused with place and reason."""

import codecs
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msmodelslim import calibration
from msmodelslim.calibration import KEYS, SHIPPED, load_samples, rank_share
from msmodelslim.errors import InvalidDatasetError

TEXTS = ["The sun rises.", "Zürich, 中文 and 🙂", "a line\nand another", "separator \u2028 inside"]
TOPICS_DATE = "Mon Dec  4 17:55:07 2023"  # of CPython 3.11.7, which made the committed text


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def write_lines(path: Path, *records: object) -> str:
    return write(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


@pytest.fixture
def lines() -> str:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "bom"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("last", [True, False], ids=["newline", "no_newline"])
def test_byte_order_mark_line_ends_and_last_newline_change_nothing(tmp_path, lines, mark, end, last):
    content = lines.replace("\n", end)
    found = load_samples(write(tmp_path / "a.jsonl", mark + (content if last else content.rstrip()).encode()))
    assert [sample.text for sample in found.samples] == TEXTS
    assert [sample.place for sample in found.samples] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    assert found.notes == []


def test_fingerprint_is_of_the_samples_not_of_the_bytes(tmp_path, lines):
    as_lines = load_samples(write(tmp_path / "a.jsonl", lines))
    as_list = load_samples(write(tmp_path / "b.json", json.dumps(TEXTS)))
    fewer = load_samples(write(tmp_path / "c.json", json.dumps(TEXTS[:3])))
    assert as_lines.fingerprint == as_list.fingerprint != fewer.fingerprint
    assert len(as_lines.fingerprint) == 64


def test_a_line_separator_inside_a_string_does_not_end_a_line(tmp_path):
    content = '{"text": "one\u2028two\u0085three"}\n'
    assert load_samples(write(tmp_path / "a.jsonl", content)).samples[0].text == "one\u2028two\u0085three"


@pytest.mark.parametrize("key", ["text", "prompt", "inputs_pretokenized"])
def test_each_text_key_is_read(tmp_path, key):
    assert load_samples(write_lines(tmp_path / "a.jsonl", {key: "hello", "source": 3})).samples[0].text == "hello"


def test_messages_and_token_numbers_are_read_as_they_are(tmp_path):
    chat = [{"role": "user", "content": "hi", "name": "x"}, {"role": "assistant", "content": ""}]
    found = load_samples(write_lines(tmp_path / "a.jsonl", {"messages": chat}, {"input_ids": [5, 0, 7]})).samples
    assert (found[0].messages, found[0].text, found[0].input_ids) == (chat, None, None)
    assert (found[1].messages, found[1].text, found[1].input_ids) == (None, None, [5, 0, 7])


def test_a_file_may_mix_keys_and_strings(tmp_path):
    records = ["plain", {"text": "t"}, {"prompt": "p"}, {"input_ids": [1]}]
    found = load_samples(write_lines(tmp_path / "a.jsonl", *records))
    assert [sample.text for sample in found.samples] == ["plain", "t", "p", None]
    assert [sample.index for sample in found.samples] == [0, 1, 2, 3]


def test_of_several_keys_the_first_of_the_documented_order_is_read_and_noted(tmp_path):
    assert KEYS == ("input_ids", "messages", "inputs_pretokenized", "text", "prompt")
    found = load_samples(write_lines(tmp_path / "a.jsonl", {"prompt": "p", "text": "t"}))
    assert found.samples[0].text == "t"
    assert "1 records hold several of input_ids, messages, inputs_pretokenized, text, prompt" in found.notes[0]


def test_an_unknown_key_is_refused_with_the_keys_found(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "x"}, {"content": "x", "b": 1}, {})
    with pytest.raises(InvalidDatasetError) as error:
        load_samples(path)
    assert "a.jsonl:2 (sample 1) has none of the keys" in str(error.value)
    assert "keys found: b, content" in str(error.value)
    assert "keys found: none" in str(error.value)


def test_all_bad_lines_are_named_at_once_and_blank_ones_are_not_bad(tmp_path):
    content = '{"text": "ok"}\n\n   \n[1,2]\n"abc"\nnull\n{broken\n'
    with pytest.raises(InvalidDatasetError) as error:
        load_samples(write(tmp_path / "a.jsonl", content))
    assert "3 of 5 records cannot be used" in str(error.value)
    assert "a.jsonl:4 (sample 1) is a list; write a string or an object with one of input_ids" in str(error.value)
    assert "a.jsonl:6 (sample 3) is null" in str(error.value)
    assert "a.jsonl:7 (sample 4) is not JSON" in str(error.value)
    assert "{broken" in str(error.value)


def test_only_the_first_twenty_bad_lines_are_shown(tmp_path):
    with pytest.raises(InvalidDatasetError) as error:
        load_samples(write(tmp_path / "a.jsonl", "no json\n" * 25))
    assert str(error.value).count("is not JSON") == 20
    assert "and 5 more" in str(error.value)


def test_blank_lines_are_skipped_and_counted(tmp_path, lines):
    found = load_samples(write(tmp_path / "a.jsonl", "\n" + lines + "  \n\n"))
    assert len(found.samples) == 4
    assert found.samples[0].place == "a.jsonl:2"
    assert "3 blank lines skipped" in found.notes[0]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": 5}, "text is a number, not a string"),
        ({"prompt": None}, "prompt is null, not a string"),
        ({"text": True}, "text is a boolean, not a string"),
        ({"text": "\ud800x"}, "text holds an unpaired surrogate at character 0"),
        ({"messages": "hi"}, "messages is a string, not a list"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user"}]},
            "messages[1] has no content; keys found: role",
        ),
        ({"messages": [{"content": "a"}]}, "messages[0] has no role; keys found: content"),
        ({"messages": ["hi"]}, "messages[0] is a string, not an object with role and content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content is a list, not a string",
        ),
        ({"input_ids": "1 2"}, "input_ids is a string, not a list of token numbers"),
        ({"input_ids": [1, -2]}, "input_ids[1] is -2, not a token number"),
        ({"input_ids": [1, True]}, "input_ids[1] is true, not a token number"),
        ({"input_ids": [[1, 2]]}, "input_ids[0] is [1, 2], not a token number"),
        (7, "is a number; write a string or an object"),
    ],
)
def test_a_wrong_value_is_refused_with_file_sample_and_field(tmp_path, record, message):
    good = {"text": "x"}
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(entry) + "\n" for entry in (good, good, record)))
    with pytest.raises(InvalidDatasetError) as error:
        load_samples(path)
    assert "a.jsonl:3 (sample 2) " in str(error.value)
    assert message in str(error.value)


def test_wrong_values_of_a_list_are_named_by_position(tmp_path):
    records = [{"text": "x"}, {"messages": [{"role": "user"}]}, "y", 5]
    with pytest.raises(InvalidDatasetError) as error:
        load_samples(write(tmp_path / "a.json", json.dumps(records)))
    assert "a.json[1] (sample 1) messages[0] has no content" in str(error.value)
    assert "a.json[3] (sample 3) is a number" in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_empty_file_is_refused(tmp_path, name):
    with pytest.raises(InvalidDatasetError, match="0 records read, 0 too short, 0 kept; give at least one record"):
        load_samples(write(tmp_path / name, ""))


def test_a_set_of_empty_records_is_refused_with_counts(tmp_path):
    records = [
        "",
        {"text": " \n"},
        {"messages": []},
        {"input_ids": []},
        {"messages": [{"role": "user", "content": ""}]},
    ]
    with pytest.raises(InvalidDatasetError, match="5 records read, 5 too short, 0 kept"):
        load_samples(write_lines(tmp_path / "a.jsonl", *records))


def test_empty_records_among_others_are_skipped_and_counted(tmp_path):
    found = load_samples(write_lines(tmp_path / "a.jsonl", "", "x", {"input_ids": []}, "y"))
    assert [(sample.index, sample.text) for sample in found.samples] == [(0, "x"), (1, "y")]
    assert "4 records read, 2 too short, 2 kept" in found.notes[0]


def test_a_very_long_text_is_noted_with_its_length(tmp_path):
    found = load_samples(write_lines(tmp_path / "a.jsonl", "short", "word " * 60_000, "short"))
    assert found.notes == ["a.jsonl:2 is 300000 characters long; only its first max_length tokens are used"]


def test_a_missing_set_is_refused_with_every_place_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidDatasetError) as error:
        load_samples("nosuch.jsonl")
    assert f"'nosuch.jsonl' was not found; looked at {tmp_path / 'nosuch.jsonl'} and {SHIPPED / 'nosuch.jsonl'}" in str(
        error.value
    )
    assert "a shipped set: mix_calib.jsonl" in str(error.value)


@pytest.mark.parametrize("dataset", ["", "/nosuch/a.jsonl", "../lab_calib/mix_calib.jsonl"])
def test_only_a_bare_name_is_looked_up_among_the_shipped_sets(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidDatasetError, match="was not found"):
        load_samples(dataset)


def test_an_existing_relative_path_wins_over_the_shipped_set_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mix_calib.jsonl", '"mine"\n')
    assert load_samples("mix_calib.jsonl").samples[0].text == "mine"


def test_a_directory_with_one_file_stands_for_the_file(tmp_path):
    write(tmp_path / "notes.txt", "not data")
    write(tmp_path / "a.jsonl", '"x"\n')
    assert load_samples(str(tmp_path)).source == str(tmp_path / "a.jsonl")


def test_a_directory_with_two_files_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", '"x"\n')
    write(tmp_path / "b.json", '["x"]\n')
    with pytest.raises(InvalidDatasetError, match=r"is a directory with 2 .*\(a.jsonl, b.json\); give one file"):
        load_samples(str(tmp_path))


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(InvalidDatasetError, match="is a directory with 0"):
        load_samples(str(tmp_path))


def test_a_json_file_must_hold_a_list(tmp_path):
    with pytest.raises(InvalidDatasetError, match=r"a.json holds an object, not a list; write a JSON list of records"):
        load_samples(write(tmp_path / "a.json", '{"text": "x"}'))
    with pytest.raises(InvalidDatasetError, match=r"is not JSON: .*one record a line is named .jsonl"):
        load_samples(write(tmp_path / "a.json", '{"text": "x"}\n{"text": "y"}\n'))


def test_a_file_in_another_encoding_is_refused_with_its_line(tmp_path):
    content = b'"fine"\n' + '"Zürich"\n'.encode("latin-1")
    with pytest.raises(InvalidDatasetError, match=r"a.jsonl:2 is not UTF-8: byte 0xfc at offset 9; save it as UTF-8"):
        load_samples(write(tmp_path / "a.jsonl", content))


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "a.jsonl", '"x"\n')
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InvalidDatasetError, match=r"a.jsonl cannot be read: Permission denied; give a readable file"):
        load_samples(path)


def test_reading_data_imports_no_torch():
    code = "import sys, msmodelslim.calibration as c; c.load_samples('mix_calib.jsonl'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@given(size=st.integers(0, 17), world_size=st.integers(1, 5))
def test_shares_are_disjoint_and_together_the_whole(size, world_size):
    items = list(range(size))
    shares = [rank_share(items, rank, world_size) for rank in range(world_size)]
    assert sorted(item for share in shares for item in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank is {rank} of 3; it counts from 0 to 2"):
        rank_share([1, 2], rank, 3)


def test_the_default_set_is_128_texts_and_shares_no_paragraph_with_the_evaluation_text():
    found = load_samples("mix_calib.jsonl")
    assert len(found.samples) == 128
    assert found.notes == []
    evaluation = (SHIPPED / "eval.txt").read_text(encoding="utf-8")
    assert len(evaluation) > 80_000
    paragraphs = [paragraph for sample in found.samples for paragraph in sample.text.split("\n\n")]
    assert not set(paragraphs) & set(evaluation.strip().split("\n\n"))
    assert len(set(paragraphs)) == len(paragraphs)
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 700_000


@pytest.mark.skipif(TOPICS_DATE not in Path(topics.__file__).read_text()[:200], reason="another CPython release")
def test_the_committed_text_is_what_the_script_makes(tmp_path):
    script = Path(calibration.__file__).parents[1] / "examples" / "make_calibration_text.py"
    spec = importlib.util.spec_from_file_location("make_calibration_text", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(tmp_path)
    for name in ("eval.txt", "mix_calib.jsonl"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()
