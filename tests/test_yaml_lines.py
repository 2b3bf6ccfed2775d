"""YAML read with line numbers; what PyYAML itself says is the expectation wherever the two should agree."""

import textwrap

import pytest
import yaml

from msmodelslim.yaml_lines import Mistake, read_yaml, spell


def mistakes(text: str) -> list[tuple[int, str]]:
    return [(mistake.line, mistake.text) for mistake in read_yaml(text).mistakes]


def test_plain_values_are_those_of_the_safe_loader() -> None:
    text = textwrap.dedent("""
        text: per_tensor
        quoted: "8"
        numbers: [0, 8, -3, 1_000, 0x1f, 1.5, .5, 1.0e-5, -.inf]
        booleans: [yes, No, TRUE, off, on]
        empty:
        tilde: ~
        long: |
          two
          lines
        base: &base {a: 1, b: [x]}
        again: *base
        merged: {<<: *base, b: 2}
        several: {<<: [{a: 3}, *base]}
    """)
    found = read_yaml(text)
    assert found.value == yaml.safe_load(text)
    assert not found.mistakes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("9" * 30, "9" * 30),
    ],
)
def test_scalars_that_yaml_1_1_reads_by_surprise_are_what_they_look_like(text: str, value: object) -> None:
    assert read_yaml(f"key: {text}").value == {"key": value}


def test_lines_are_those_of_keys_and_list_items() -> None:
    document = read_yaml("a: 1\nb:\n  - x\n  - c:\n      d: 2\n")
    assert [document.line(path) for path in [("a",), ("b",), ("b", 0), ("b", 1, "c"), ("b", 1, "c", "d")]] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_the_line_of_what_is_missing_is_that_of_the_thing_that_lacks_it() -> None:
    assert read_yaml("a: 1\nb:\n  c: 2\n").line(("b", "nothing", "here")) == 2


def test_a_value_behind_an_alias_is_found_where_the_anchor_stands() -> None:
    document = read_yaml("home: &a\n  x: 1\nuse: *a\n")
    assert (document.line(("use",)), document.line(("use", "x"))) == (3, 2)


def test_paths_are_spelt_as_people_write_them() -> None:
    assert spell(("spec", "process", 0, "qconfig")) == "spec.process[0].qconfig"


def test_duplicate_keys_are_told_with_both_lines_and_the_first_one_is_kept() -> None:
    document = read_yaml("a: 1\nb: 2\na: 3\n")
    assert document.mistakes == [Mistake(3, ("a",), "'a' is already on line 1; keep one of them")]
    assert document.value == {"a": 1, "b": 2}


def test_a_key_of_its_own_beside_a_merged_one_is_no_duplicate() -> None:
    assert not read_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2}\n").mistakes


def test_every_line_indented_with_a_tab_is_told() -> None:
    said = "a tab indents this line; indent with spaces only"
    assert mistakes("a:\n\tb: 1\n  \tc: 2\n") == [(2, said), (3, said)]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: b: c", 1, "is not YAML: mapping values are not allowed here; check the indentation"),
        ("a: 1\nb: *nothing\n", 2, "found undefined alias 'nothing'"),
        ("a: 1\n---\nb: 2\n", 2, "expected a single document in the stream, but found another document"),
        ("a: 1\nb: \x07\n", 2, "holds the control character U+0007; take it out"),
        ("a: !!python/object:os.system x", 1, "the tag !!python/object:os.system is not allowed; write a plain value"),
        ("a: !!set {x}", 1, "the tag !!set is not allowed"),
        ("a: !!int eight", 1, "'eight' cannot be read as int; take the tag away"),
        ("a: 1\n8: b\n", 2, "'8' is no key; keys are text, so put it in quotes"),
        ("on: 1\n", 1, "'on' is no key"),
        ("? [a]\n: 1\n", 1, "a list or mapping is no key"),
        ("a: 1\nb: {<<: 3}\n", 2, "<< takes a mapping; name the anchor of one"),
        ("a: &a [*a]", 1, "holds itself through an alias; name another anchor"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(text: str, line: int, words: str) -> None:
    [(found_line, found)] = mistakes(text)
    assert found_line == line
    assert words in found


@pytest.mark.parametrize("depth", [150, 100_000])
def test_bottomless_nesting_is_refused(depth: int) -> None:
    assert "is nested deeper than 100 levels; flatten it" in mistakes("[" * depth + "]" * depth)[0][1]


def test_aliases_that_multiply_are_refused_before_they_fill_the_memory() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "spells out more than 20000 values; use fewer aliases" in mistakes("\n".join(rows))[0][1]


def test_an_empty_text_is_nothing_and_no_mistake() -> None:
    assert (read_yaml("# nothing\n").value, read_yaml("").mistakes) == (None, [])
