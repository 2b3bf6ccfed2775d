"""What must be the same on every rank before work begins: who leads, and what each rank read for itself."""

import os

from msmodelslim.distributed import wire
from msmodelslim.errors import EnvError

_CALL = "inputs of the run"


def leader_of_job() -> int:
    """The process number of rank 0, on every rank; one collective."""
    where = wire.members(None, _CALL)
    return os.getpid() if where is None else wire.exchange(where, _CALL, {"pid": os.getpid()})[0]["pid"]


def refuse_differences(facts: dict[str, str]) -> None:
    """Compare what the ranks have read, in one collective.

    Args:
        facts: what it is, in words ("config.json") → its value or fingerprint, of any length.

    Raises:
        EnvError: on every rank, when something differs; names all of it and the ranks.
    """
    where = wire.members(None, _CALL)
    if where is None:
        return
    found = wire.exchange(where, _CALL, facts)
    names = sorted({name for one in found for name in one})
    values = {name: [one.get(name, "nothing") for one in found] for name in names}
    told = [f"{name} is {wire.by_rank(where, these)}" for name, these in values.items() if len(set(these)) > 1]
    if told:
        raise EnvError(
            f"the ranks do not work on the same inputs: {', and '.join(told)}",
            "give every machine the same files and versions",
        )
