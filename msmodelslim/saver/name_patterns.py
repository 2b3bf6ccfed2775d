"""Many module names as few regular expressions: layers and experts become alternatives of their numbers."""

import re
from collections import defaultdict
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of the name that is nothing but digits


def name_patterns(names: Iterable[str]) -> list[str]:
    """Regular expressions, anchored at both ends, that match exactly these names; sorted.

    model.layers.0.mlp.up_proj and model.layers.7.mlp.up_proj give `^model\\.layers\\.(?:0|7)\\.mlp\\.up_proj$`.
    """
    by_shape: defaultdict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        by_shape[tuple(_NUMBER.split(name))].add(tuple(int(number) for number in _NUMBER.findall(name)))
    return sorted(
        "^" + _filled(shape, numbers) + "$" for shape, indexes in by_shape.items() for numbers in _products(indexes)
    )


def _products(indexes: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """The set as a union of products: one tuple of alternatives a position."""
    if indexes == {()}:
        return [()]
    rests: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
    for first, *rest in indexes:
        rests[first].add(tuple(rest))
    alike: defaultdict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    for first, rest_set in rests.items():
        alike[frozenset(rest_set)].append(first)
    return [
        (tuple(sorted(firsts)), *product) for rest_set, firsts in alike.items() for product in _products(set(rest_set))
    ]


def _filled(shape: tuple[str, ...], numbers: tuple[tuple[int, ...], ...]) -> str:
    alternatives = ["|".join(map(str, choice)) for choice in numbers]
    groups = [f"(?:{choice})" if "|" in choice else choice for choice in alternatives] + [""]
    return "".join(re.escape(text) + group for text, group in zip(shape, groups, strict=True))
