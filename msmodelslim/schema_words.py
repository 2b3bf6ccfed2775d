"""What pydantic finds wrong, said as a user needs it: the value, what is wrong with it, what to write instead."""

import difflib
import re
import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from msmodelslim.registry import nearest
from msmodelslim.yaml_lines import KeyPath

_BOOLEAN, _WHOLE, _NUMBER, _TEXT = "true or false", "a whole number", "a number", "text"
_LIST, _MAPPING = "a list", "a mapping"
_EXPECTED = {
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "string_type": _TEXT,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "frozen_set_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
}
#: error type → (words before the limit, name of the limit in the error's context)
_LIMITS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
    "multiple_of": ("that is a multiple of", "multiple_of"),
}
_LENGTHS = {
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
}
_MAX_SHOWN = 80  # characters of a value


def show(value: Any) -> str:
    """A value as it is named in a message; lists and mappings are not spelt out."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "a mapping"
        case str() if len(value) > _MAX_SHOWN:
            return repr(value[: _MAX_SHOWN - 3] + "...")
        case _:
            return repr(value)


def sentence(errors: list[ErrorDetails], place: KeyPath, model: type[BaseModel]) -> str:
    """What is wrong at one place, in our words.

    Args:
        errors: pydantic's findings there, of a value read from JSON; several when a union fits in none of its members.
        place: where it is, in the value that was validated.
        model: the schema it was validated with.
    """
    error = errors[0]
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "missing":
        return f"is missing; add the key {str(place[-1])!r}"
    if kind == "extra_forbidden":
        return _unknown_key(str(place[-1]), _models(model, place[:-1]))
    if kind in ("enum", "literal_error"):
        return _no_choice(value, re.findall(r"'([^']*)'", context["expected"]))
    if kind in _EXPECTED:
        return _wrong_kind(value, list(dict.fromkeys(_EXPECTED[e["type"]] for e in errors if e["type"] in _EXPECTED)))
    if kind in _LIMITS:
        words, limit = _LIMITS[kind]
        return f"{show(value)} is out of range; write a number {words} {context[limit]:g}"
    if kind in _LENGTHS:
        words, limit, unit = _LENGTHS[kind]
        count = context[limit]
        return f"has {len(value)} {unit}{_s(len(value))}; give {words} {count} {unit}{_s(count)}"
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    return f"{show(value)}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def meant(place: KeyPath, model: type[BaseModel]) -> KeyPath | None:
    """Where the key would be that an unknown key at `place` is most like; None when it is like none beside it."""
    here = [name for one in _models(model, place[:-1]) for name in one.model_fields]
    close = difflib.get_close_matches(str(place[-1]), here, n=1)
    return (*place[:-1], close[0]) if close else None


def _unknown_key(key: str, models: list[type[BaseModel]]) -> str:
    """The nearest key beside it; else one that belongs deeper, as when a line lost its indentation."""
    here = [name for model in models for name in model.model_fields]
    if not here:
        return "unknown key; there are no options here"
    deeper = [path for model in models for path in _key_paths(model) if "." in path]
    if not difflib.get_close_matches(key, here, n=1):
        close = difflib.get_close_matches(key, [path.rpartition(".")[2] for path in deeper], n=1)
        homes = [path for path in deeper if close and path.endswith("." + close[0])]
        if homes:
            return f"unknown key; write {' or '.join(homes)}, or one of {', '.join(here)}"
    return f"unknown key; write {nearest(key, here)}"


def _key_paths(model: type[BaseModel]) -> list[str]:
    """Every key below a mapping of this schema, dotted: qconfig, qconfig.act, qconfig.act.dtype ..."""
    paths = []
    for name, field in model.model_fields.items():
        paths.append(name)
        for inner in _members(field.annotation):
            if _is_model(inner):
                paths += [f"{name}.{path}" for path in _key_paths(inner)]
    return paths


def _models(model: type[BaseModel], place: KeyPath) -> list[type[BaseModel]]:
    """The schemas of the mapping that `place` leads to inside `model`."""
    found: list[Any] = [model]
    for part in place:
        found = [inner for annotation in found for inner in _inside(annotation, part)]
    return [annotation for annotation in found if _is_model(annotation)]


def _inside(annotation: Any, part: str | int) -> list[Any]:
    """What the schema says of the value at key or index `part` of a value that is described by `annotation`."""
    if _is_model(annotation):
        field = annotation.model_fields.get(part)
        return _members(field.annotation) if field else []
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is dict:
        return _members(arguments[1])
    return [member for argument in arguments if argument is not ... for member in _members(argument)]


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union, without the notes of `Annotated`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(annotation) for member in _members(argument)]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _no_choice(value: Any, choices: list[str]) -> str:
    if isinstance(value, str):
        return f"{show(value)} is not known here; write {nearest(value, choices)}"
    return f"{_kind(value)}; write {nearest('', choices)}"


def _wrong_kind(value: Any, expected: list[str]) -> str:
    wanted = " or ".join(expected)
    if value is None and expected[0] in (_LIST, _MAPPING):
        return f"is empty; indent {wanted} below it, or take the key away"
    if expected == [_TEXT] and isinstance(value, bool | int | float):
        return f"{_kind(value)}; put it in quotes"
    if expected == [_LIST] and isinstance(value, str):
        return f"{_kind(value)}; write a list, [{show(value)}]"
    if expected[0] in (_WHOLE, _NUMBER) and isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d+)?", value):
        return f"{_kind(value)}; write it without quotes"
    return f"{_kind(value)}; write {wanted}"


def _kind(value: Any) -> str:
    match value:
        case None:
            return "is empty"
        case bool():
            return f"{show(value)} is a boolean"
        case int():
            return f"{value} is a whole number"
        case float():
            return f"{value} is a number"
        case str():
            return f"{show(value)} is text"
        case _:
            return f"is {show(value)}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
