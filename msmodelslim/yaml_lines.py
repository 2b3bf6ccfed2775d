"""YAML text to plain values and the line each of them stands on, so that a mistake can name its place.

Values are text, whole numbers, numbers, booleans (YAML 1.1 words: yes, no, on, off too), null, lists and mappings with
text keys; nothing else can be written. Anchors, aliases and merge keys (`<<`) work.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]

_MAX_VALUES = 20_000  # aliases of aliases multiply; a recipe has a few hundred values
_MAX_DEPTH = 100
_PREFIX = "tag:yaml.org,2002:"
_WORDS = {"yes": True, "no": False, "true": True, "false": False, "on": True, "off": False}


@dataclass(frozen=True)
class Mistake:
    """One thing wrong in a file: its line (from 1), the path of the value ("spec", "process", 0), and what to do."""

    line: int
    path: KeyPath
    text: str


@dataclass
class Document:
    """What a YAML text says.

    Args:
        value: mappings, lists and scalars; None for an empty text.
        lines: path of a value → the line of its key, or of its list item.
        mistakes: what kept parts of the text from being read.
    """

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def line(self, path: KeyPath) -> int:
        """The line of the value at `path`, or of the nearest thing above it that the text has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def spell(path: KeyPath) -> str:
    """A path as people write it: spec.process[0].include."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def read_yaml(text: str) -> Document:
    """The values of one YAML document. Never raises for what the text holds: see `Document.mistakes`."""
    document = Document()
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}"
        document.mistakes.append(Mistake(line, (), f"holds the control character {character}; take it out"))
        return document
    except yaml.MarkedYAMLError as error:
        document.mistakes += _syntax_mistakes(text, error)
        return document
    except RecursionError:
        document.mistakes.append(Mistake(1, (), f"is nested deeper than {_MAX_DEPTH} levels; flatten it"))
        return document
    if root is not None:
        _Reader(document).read(root)
    return document


def _syntax_mistakes(text: str, error: yaml.MarkedYAMLError) -> Iterator[Mistake]:
    tabbed = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r" *\t", line)]
    for number in tabbed:
        yield Mistake(number, (), "a tab indents this line; indent with spaces only")
    if not tabbed:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark else 1
        yield Mistake(line, (), f"is not YAML: {said}; check the indentation, colons and quotes here")


class _Loader(yaml.SafeLoader):
    """The safe loader with fewer surprises: no dates, no base-60 or octal numbers, and 1e-5 is a number."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", "|".join(f"{w}|{w.title()}|{w.upper()}" for w in _WORDS), "yYnNtTfFoO"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]{0,17}|0x[0-9a-fA-F]{1,16})", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(_PREFIX + _tag, re.compile(f"(?:{_pattern})$"), list(_first))


class _Reader:
    """Walks the nodes of one document and fills its values, lines and mistakes."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._count = 0
        self._above: list[yaml.Node] = []

    def read(self, root: yaml.Node) -> None:
        try:
            self._document.value = self._value(root, ())
        except _TooLargeError as error:
            self._document.value = None
            self._document.mistakes.append(Mistake(error.line, (), str(error)))

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count += 1
        line = node.start_mark.line + 1
        if self._count > _MAX_VALUES:
            raise _TooLargeError(line, f"spells out more than {_MAX_VALUES} values; use fewer aliases")
        if len(self._above) > _MAX_DEPTH:
            raise _TooLargeError(line, f"is nested deeper than {_MAX_DEPTH} levels; flatten it")
        if any(above is node for above in self._above):
            raise _TooLargeError(line, "holds itself through an alias; name another anchor")
        self._document.lines.setdefault(path, line)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._above.append(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
            value: Any = [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
            value = self._mapping(node, path)
        else:
            value = None
            self._refuse_tag(node, path)
        self._above.pop()
        return value

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind, text = node.tag.removeprefix(_PREFIX), node.value
        try:
            match kind:
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return _WORDS[text.lower()]
                case "int":
                    return int(text, 0)
                case "float":
                    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (KeyError, ValueError):
            self._mistake(node, path, f"{text!r} cannot be read as {kind}; take the tag away")
            return None
        self._refuse_tag(node, path)
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == _PREFIX + "merge":
                merged = self._merged(value, path) | merged
        for key, value in node.value:
            if key.tag == _PREFIX + "merge":
                continue
            if key.tag != _PREFIX + "str":
                self._mistake(key, path, f"{_source(key)} is no key; keys are text, so put it in quotes")
                continue
            line = key.start_mark.line + 1
            child = (*path, key.value)
            if key.value in own:
                first = self._document.lines[child]
                self._mistake(key, child, f"{key.value!r} is already on line {first}; keep one of them")
                continue
            self._document.lines[child] = line
            own[key.value] = self._value(value, child)
        return merged | own

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found: dict[str, Any] = {}
        for part in parts:
            value = self._value(part, path)
            if isinstance(value, dict):
                found = value | found  # the first mapping that has a key wins
            else:
                self._mistake(part, path, "<< takes a mapping; name the anchor of one")
        return found

    def _refuse_tag(self, node: yaml.Node, path: KeyPath) -> None:
        self._mistake(node, path, f"the tag {node.tag.replace(_PREFIX, '!!')} is not allowed; write a plain value")

    def _mistake(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        self._document.mistakes.append(Mistake(node.start_mark.line + 1, path, text))


class _TooLargeError(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def _source(node: yaml.Node) -> str:
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
