"""Which modules a step touches: include and exclude patterns on full module names, one matcher for every processor.

A pattern is a full name, or a shell pattern with `*` (crosses dots), `?`, `[..]` and `{a,b}`. A module is selected when
some include pattern matches it and no exclude pattern does.
"""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import StringConstraints
from wcmatch import fnmatch

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=200)]


def matches(pattern: str, name: str) -> bool:
    """True when `pattern` is `name` itself or a shell pattern that fits it."""
    return pattern == name or fnmatch.fnmatch(name, pattern, flags=fnmatch.BRACE | fnmatch.CASE)


class Selection:
    """The include and exclude lists of one step, and how many modules each pattern has matched.

    Every pattern that fits counts, also one that another pattern overrides, so a count of 0 means a dead pattern.
    """

    def __init__(self, include: Iterable[str], exclude: Iterable[str] = ()) -> None:
        self._counts = {"include": dict.fromkeys(include, 0), "exclude": dict.fromkeys(exclude, 0)}

    def selects(self, name: str) -> bool:
        """Whether the step touches the module `name`; counts nothing."""
        return self._fits("include", name) and not self._fits("exclude", name)

    def count(self, name: str) -> None:
        """Count `name` for every pattern that fits it."""
        for counts in self._counts.values():
            for pattern in counts:
                counts[pattern] += matches(pattern, name)

    def as_records(self, processor: str) -> list[dict[str, Any]]:
        """One report entry a pattern."""
        return [
            {"processor": processor, "list": kind, "pattern": pattern, "matches": matched}
            for kind, counts in self._counts.items()
            for pattern, matched in counts.items()
        ]

    def _fits(self, kind: str, name: str) -> bool:
        return any(matches(pattern, name) for pattern in self._counts[kind])
