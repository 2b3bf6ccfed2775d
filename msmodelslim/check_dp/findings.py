"""The pass conditions of data-parallel quantization, what was found of each, and the table that says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table


class Condition(StrEnum):
    """What must be true of a recipe's steps, in the order in which to mend it."""

    SUPPORT = "every step supports several ranks"
    RUNNER = "the runner uses every device"
    FRESH = "DistHelper is made after the last change of structure"
    TOPOLOGY = "ranks agree on which modules are shared"
    LOCAL = "no collective about a local_only module"
    CALLS = "every rank makes the same collective calls"
    STATISTICS = "statistics are the same on every rank"
    RESULT = "the result has the bytes of one rank's"
    ENDS = "the run ends without an error"


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "fails"
    NOTE = "holds, but"
    OPEN = "not seen"


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Args:
        condition: what must be true.
        verdict: whether it is.
        where: run, layer, step, line, module or statistic.
        action: what to do about it.
    """

    condition: Condition
    verdict: Verdict
    where: str = ""
    action: str = ""


def holds(findings: Sequence[Finding]) -> bool:
    """True when no condition fails and all were seen."""
    return all(one.verdict in (Verdict.HOLDS, Verdict.NOTE) for one in findings)


def print_findings(findings: Sequence[Finding], title: str) -> None:
    """The table on standard output."""
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("condition", max_width=24, overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("where", overflow="fold")
    table.add_column("what to do", max_width=28, overflow="fold")
    for one in findings:
        table.add_row(one.condition.value, one.verdict.value, one.where, one.action)
    Console(highlight=False, markup=False).print(table)


def as_text(findings: Sequence[Finding]) -> str:
    """The same, a line a condition that does not simply hold; what fails comes first."""
    told = [
        one for verdict in (Verdict.FAILS, Verdict.NOTE, Verdict.OPEN) for one in findings if one.verdict is verdict
    ]
    return "\n".join(f"{one.verdict}: {one.condition}: {one.where}; {one.action}" for one in told)
