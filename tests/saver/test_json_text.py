import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msmodelslim.saver.json_text import remove_everywhere, set_everywhere, set_member

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "q", "é"]), inner, max_size=3),
    max_leaves=8,
)
# The machine that runs this may be busy with other tests.
settings.register_profile("slow", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
slow = settings.get_profile("slow")
OBJECT = st.dictionaries(st.sampled_from(["a", "q", "é", "z"]), JSON, max_size=4)


def without(value: object, key: str) -> object:
    """Objects directly inside objects lose the key; what lies in a list is no part of the config's tree."""
    if isinstance(value, dict):
        return {k: without(v, key) for k, v in value.items() if k != key}
    return value


@slow
@given(OBJECT, st.sampled_from([None, 0, 2, "\t"]))
def test_removing_a_key_equals_removing_it_from_the_parsed_object(content: dict, indent: int | str | None) -> None:
    assert json.loads(remove_everywhere(json.dumps(content, indent=indent), "q")) == without(content, "q")


@slow
@given(OBJECT, JSON, st.sampled_from([None, 0, 2, "\t"]))
def test_setting_a_key_equals_setting_it_in_the_parsed_object(
    content: dict, value: object, indent: int | str | None
) -> None:
    found = json.loads(set_member(json.dumps(content, indent=indent), "q", value))
    assert found == {**content, "q": value}
    assert list(found) == list({**content, "q": value})


@slow
@given(OBJECT)
def test_a_text_without_the_key_stays_as_it_is(content: dict) -> None:
    text = json.dumps({key: value for key, value in content.items() if key != "x"}, indent=3)
    assert remove_everywhere(text, "x") == text
    assert set_everywhere(text, "x", False) == text


def test_odd_spelling_survives_an_edit() -> None:
    text = '{ "b" :1E-06,\r\n\t"quantization_config": {"x": [1, {"y": "}"}]},\r\n\t"a":\t"\\u00e9",  "c": [ ] }\r\n'
    assert remove_everywhere(text, "quantization_config") == '{ "b" :1E-06,\r\n\t"a":\t"\\u00e9",  "c": [ ] }\r\n'


def test_a_key_is_removed_at_every_depth_first_and_last() -> None:
    text = '{\n  "q": 1,\n  "text_config": {"a": 2, "q": {"q": 3}},\n  "vision": {"q": 4},\n  "q2": 5\n}\n'
    assert remove_everywhere(text, "q") == '{\n  "text_config": {"a": 2},\n  "vision": {},\n  "q2": 5\n}\n'


def test_a_new_member_is_added_in_the_indent_of_the_others() -> None:
    assert set_member('{\n    "a": 1\n}\n', "b", {"c": [2]}) == (
        '{\n    "a": 1,\n    "b": {\n        "c": [\n            2\n        ]\n    }\n}\n'
    )


def test_a_member_is_replaced_where_it_stands() -> None:
    assert set_member('{"a": 1, "q": {"old": true}, "z": 2}', "q", None) == '{"a": 1, "q": null, "z": 2}'
    assert set_everywhere('{"t": true, "s": {"t": true}}', "t", False) == '{"t": false, "s": {"t": false}}'


@pytest.mark.parametrize("text", ["", "[1]", '{"a" 1}', '{"a": }'])
def test_what_is_no_object_is_an_error(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        remove_everywhere(text, "a")
