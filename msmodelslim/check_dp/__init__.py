"""`msmodelslim check-dp`: does a recipe give the same result on any number of ranks, and if not, why not."""

from msmodelslim.check_dp.check import RANKS, SAMPLES, TIMEOUT_S, check_data_parallel
from msmodelslim.check_dp.findings import Condition, Finding, Verdict, as_text, holds, print_findings

__all__ = [
    "RANKS",
    "SAMPLES",
    "TIMEOUT_S",
    "Condition",
    "Finding",
    "Verdict",
    "as_text",
    "check_data_parallel",
    "holds",
    "print_findings",
]
