"""Edits of a JSON text that leave every other character as it was: order, indent, number spelling, odd white space."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined] # in the module since Python 2.6, not in its stubs
from typing import Any

_SPACE = " \t\n\r"
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Member:
    """One `"key": value` of an object, by its place in the text."""

    key: str
    start: int  # of the key's opening quote
    value_start: int
    value_stop: int


def members(text: str, start: int = 0) -> Iterator[Member]:
    """The members of the object that opens at or after `start`.

    Raises:
        json.JSONDecodeError: the text is not JSON, or holds no object there.
    """
    place = _skip(text, start)
    if text[place : place + 1] != "{":
        raise json.JSONDecodeError("expected an object", text, place)
    place = _skip(text, place + 1)
    while text[place : place + 1] == '"':
        key_start = place
        key, place = scanstring(text, place + 1, True)
        place = _skip(text, place)
        if text[place : place + 1] != ":":
            raise json.JSONDecodeError("expected ':'", text, place)
        value_start = _skip(text, place + 1)
        _, place = _decode(text, value_start)
        yield Member(key, key_start, value_start, place)
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)


def remove_everywhere(text: str, key: str) -> str:
    """The text without any member called `key`, however deep inside objects."""
    while (found := _find(text, 0, lambda member: member.key == key)) is not None:
        text = _cut(text, found)
    return text


def set_member(text: str, key: str, value: Any) -> str:
    """The text with `key` of the outermost object set to `value`: replaced where it is, else added at the end."""
    indent = _indent(text)
    rendered = json.dumps(value, indent=indent, ensure_ascii=False)
    if indent is not None:
        rendered = rendered.replace("\n", "\n" + (indent if isinstance(indent, str) else " " * indent))
    known = list(members(text))
    for member in known:
        if member.key == key:
            return text[: member.value_start] + rendered + text[member.value_stop :]
    if not known:
        return text[: text.index("{") + 1] + f"{json.dumps(key)}: {rendered}" + text[text.index("}") :]
    last = known[-1]
    before = text[: last.start]
    gap = before[len(before.rstrip(_SPACE)) :]
    return f"{text[: last.value_stop]},{gap or ' '}{json.dumps(key)}: {rendered}{text[last.value_stop :]}"


def set_everywhere(text: str, key: str, value: Any) -> str:
    """The text with every member called `key`, however deep, set to `value`; where there is none, none is added."""
    rendered = json.dumps(value)

    def differs(member: Member) -> bool:
        return member.key == key and text[member.value_start : member.value_stop] != rendered

    while (found := _find(text, 0, differs)) is not None:
        text = text[: found.value_start] + rendered + text[found.value_stop :]
    return text


def _find(text: str, start: int, wanted: Callable[[Member], bool]) -> Member | None:
    for member in members(text, start):
        if wanted(member):
            return member
        if text[member.value_start] == "{" and (inner := _find(text, member.value_start, wanted)) is not None:
            return inner
    return None


def _cut(text: str, member: Member) -> str:
    """Without the member and one of the commas beside it."""
    after = _skip(text, member.value_stop)
    if text[after] == ",":
        return text[: member.start] + text[_skip(text, after + 1) :]
    before = text[: member.start].rstrip(_SPACE)
    if before.endswith(","):
        return before[:-1] + text[member.value_stop :]
    return text[: member.start] + text[member.value_stop :]


def _indent(text: str) -> str | None:
    """White space before the first key of the outermost object; None when it is not on a line of its own."""
    first = next(members(text), None)
    if first is None:
        return None
    line_start = text.rfind("\n", 0, first.start)
    space = text[line_start + 1 : first.start]
    return space if line_start >= 0 and not space.strip(_SPACE) else None


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place
