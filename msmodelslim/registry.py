"""Names to classes: a processor, a model family or a save format is one new file that registers itself.

The kind of a class is its `kind` attribute, set by the abstract class of its folder. Looking a name up imports every
module of that folder once, so that a new file joins by existing. Packages of other people join through the entry-point
group `msmodelslim.plugins`, whose entries name modules to import.
"""

import difflib
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from msmodelslim.errors import UnsupportedError

_FOLDERS = {
    "processor": "msmodelslim.processor",
    "model": "msmodelslim.model",
    "saver": "msmodelslim.saver",
    "weight": "msmodelslim.weight",
}
_CLASSES: dict[tuple[str, str], type] = {}

C = TypeVar("C", bound=type)


def register(name: str) -> Callable[[C], C]:
    """Class decorator: make the class known under `name`, the word that recipes and commands use.

    Raises:
        ValueError: another class already has this name, or the class has no known `kind`.
    """

    def add(cls: C) -> C:
        kind = getattr(cls, "kind", None)
        if kind not in _FOLDERS:
            raise ValueError(f"{cls.__qualname__} has kind {kind!r}; derive it from the base class of its folder")
        known = _CLASSES.setdefault((kind, name), cls)
        if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{kind} {name!r} is already {known.__module__}.{known.__qualname__}")
        _CLASSES[kind, name] = cls
        cls.registered_name = name  # type: ignore[attr-defined] # the base class of each folder declares it
        return cls

    return add


@cache
def _import_all(kind: str) -> None:
    package = importlib.import_module(_FOLDERS[kind])
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    for entry in importlib.metadata.entry_points(group="msmodelslim.plugins"):
        importlib.import_module(entry.value.partition(":")[0])


def names(kind: str) -> list[str]:
    """Every registered name of a kind ("processor", "model", "saver", "weight"), sorted."""
    _import_all(kind)
    return sorted(name for known_kind, name in _CLASSES if known_kind == kind)


def lookup(kind: str, name: str) -> type:
    """The class registered as `name`.

    Raises:
        UnsupportedError: no such name; the message holds the nearest one and the whole list.
    """
    known = names(kind)
    if name not in known:
        raise UnsupportedError(f"{name!r} is not a {kind}", f"write {nearest(name, known)}")
    return _CLASSES[kind, name]


def nearest(word: str, choices: list[str]) -> str:
    """How an error message offers the right word: the closest choice first, then all of them."""
    close = difflib.get_close_matches(word, choices, n=1)
    every = ", ".join(choices)
    return f"{close[0]!r} (of {every})" if close else f"one of {every}"
