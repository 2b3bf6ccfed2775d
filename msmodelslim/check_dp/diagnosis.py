"""From what ranks have noted to what is wrong: one function a pass condition, each looks at one run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from msmodelslim.check_dp.events import Event
from msmodelslim.check_dp.findings import Condition, Finding, Verdict
from msmodelslim.check_dp.trial import Trial

_SHOWN = 3  # names of one kind in a cell
_MISMATCH = "RankMismatchError"
#: errors of ranks that have come to different calls
_PARTED = (_MISMATCH, "LocalSyncError")

Diagnosis = Callable[[Trial, Trial], Finding | None]


def diagnose(trials: Sequence[Trial]) -> list[Finding]:
    """One finding for each condition that only a run can tell about.

    Args:
        trials: runs on one rank first; those on several are compared with them.
    """
    alone = {trial.samples: trial for trial in trials if trial.ranks == 1}
    # One rank is in a process group too, so some mistakes show there already.
    looked = [(trial, alone[trial.samples]) for trial in trials if trial.ranks > 1 or trial.result is None]
    found = [_first(condition, look, looked) for condition, look in _CONDITIONS]
    explained = any(one.verdict is Verdict.FAILS for one in found)
    failed = [trial for trial in trials if trial.result is None]
    if failed and not explained:
        return [*found, _ends(failed[0])]
    verdict = Verdict.OPEN if failed else Verdict.HOLDS
    return [*found, Finding(Condition.ENDS, verdict, "see above" if failed else _titles(trials))]


def _first(condition: Condition, look: Diagnosis, looked: Sequence[tuple[Trial, Trial]]) -> Finding:
    found = [one for trial, alone in looked if (one := look(trial, alone)) is not None]
    for one in found:
        if one.verdict is Verdict.FAILS:
            return one
    failed = [trial.title for trial, _ in looked if trial.result is None]
    if failed:
        return Finding(condition, Verdict.OPEN, f"{failed[0]}: did not come to its end")
    if not looked:
        return Finding(condition, Verdict.OPEN, "nothing ran on several ranks", "give --ranks of 2 and more")
    return found[0] if found else Finding(condition, Verdict.HOLDS, _titles([trial for trial, _ in looked]))


def _fresh(trial: Trial, _: Trial) -> Finding | None:
    for event in _all(trial, "stale"):
        where = f"{trial.title}: {event.layer}, {event.processor}: made at {event.site}; {event.what.partition(';')[0]}"
        return Finding(Condition.FRESH, Verdict.FAILS, where, _FRESH_ACTION)
    for event in _all(trial, "error"):
        if event.facts["kind"] == "StaleTopologyError":
            made = [
                one.site
                for one in _all(trial, "helper")
                if (one.layer, one.processor) == (event.layer, event.processor)
            ]
            where = f"{trial.title}: {event.place}: used at {event.site}, made at {', '.join(sorted(set(made)))}"
            return Finding(Condition.FRESH, Verdict.FAILS, f"{where}: {event.what}", _FRESH_ACTION)
    return None


def _topology(trial: Trial, _: Trial) -> Finding | None:
    answers: dict[tuple[str, str, str], dict[int, bool]] = {}
    for rank, events in enumerate(trial.events):
        for event in events:
            if event.kind == "is_shared":
                answers.setdefault((event.layer, event.processor, event.what), {})[rank] = event.facts["answer"]
    for (layer, processor, name), by_rank in answers.items():
        if len(set(by_rank.values())) > 1:
            told = ", ".join(f"{answer} on rank {rank}" for rank, answer in sorted(by_rank.items()))
            where = f"{trial.title}: {layer}, {processor}: is_shared({name!r}) is {told}"
            return Finding(
                Condition.TOPOLOGY, Verdict.FAILS, where, "make the DistHelper at the same point on every rank"
            )
    local = _local_names(trial)
    if local:
        names = _some([f"{name} ({_ranks(holders)})" for name, holders in local.items()])
        where = f"{trial.title}: local_only are {names}"
        action = "right for experts of one's own; else make the same change of structure on every rank"
        return Finding(Condition.TOPOLOGY, Verdict.NOTE, where, action)
    return None


def _local(trial: Trial, _: Trial) -> Finding | None:
    local = _local_names(trial)
    for rank, events in enumerate(trial.events):
        for event in events:
            if event.kind == "local_sync":
                holders = local.get(event.facts["module"], [rank])
                return _local_finding(trial, rank, event, event.facts["module"], holders)
    for rank, call in enumerate(_split(trial) or []):
        if call is not None:
            for name in (call.facts["module"], *call.facts["words"]):
                if name in local:
                    return _local_finding(trial, rank, call, name, local[name])
    return None


def _local_finding(trial: Trial, rank: int, event: Event, name: str, holders: list[int]) -> Finding:
    where = f"{trial.title}: {event.place}: rank {rank} asks for {event.what} at {event.site} about {name}, "
    where += f"which only {_ranks(holders)} holds" if len(holders) == 1 else f"which only {_ranks(holders)} hold"
    return Finding(Condition.LOCAL, Verdict.FAILS, where, "synchronize only where is_shared(name)")


def _calls(trial: Trial, _: Trial) -> Finding | None:
    split = _split(trial)
    if split is not None:
        number = next(event.facts["number"] for event in split if event is not None)
        told = [f"rank {rank}: {_told(trial, rank, event)}" for rank, event in enumerate(split)]
        in_forward = any(event is not None and event.phase == "forward" for event in split)
        action = _FORWARD_ACTION if in_forward else _CALLS_ACTION
        return Finding(Condition.CALLS, Verdict.FAILS, f"{trial.title}: call {number}: {'; '.join(told)}", action)
    for event in _all(trial, "error"):
        if event.facts["kind"] == _MISMATCH:
            where = f"{trial.title}: {event.place}: {event.what} (at {event.site})"
            return Finding(Condition.CALLS, Verdict.FAILS, where, _CALLS_ACTION)
    return None


def _split(trial: Trial) -> list[Event | None] | None:
    """The first call that is not the same on every rank; None for a rank that makes no further one.

    Where a rank was stopped by something else, the others' further calls say nothing.
    """
    rows = [[event for event in events if event.kind == "call" and event.facts["whole"]] for events in trial.events]
    waits = any(_all(trial, "hang")) or any(event.facts["kind"] in _PARTED for event in _all(trial, "error"))
    for calls in zip_longest(*rows):
        missing = [rank for rank, call in enumerate(calls) if call is None]
        if missing:
            ended = any(event.kind == "end" for rank in missing for event in trial.events[rank])
            return list(calls) if waits or ended else None
        if len({(call.what, call.layer, call.processor, call.phase) for call in calls}) > 1:
            return list(calls)
    return None


def _told(trial: Trial, rank: int, event: Event | None) -> str:
    """What a rank does at the place where ranks part."""
    if event is not None and not any(one.kind == "end" for one in _before(trial.events[rank], event)):
        return f"{event.what} at {event.site} ({event.place})"
    if event is not None or any(one.kind == "end" for one in trial.events[rank]):
        return "is at the end of the run"
    calls = [one for one in trial.events[rank] if one.kind == "call"]
    return f"no further call; the last was {calls[-1].what} at {calls[-1].site}" if calls else "no call at all"


def _before(events: list[Event], event: Event) -> list[Event]:
    return events[: next(index for index, one in enumerate(events) if one is event)]


def _statistics(trial: Trial, _: Trial) -> Finding | None:
    note = None
    before: tuple[Event, ...] = ()
    for states in zip(*(_states(events) for events in trial.events), strict=False):
        first = states[0]
        tensors = _unequal([one.facts["tensors"] for one in states])
        attributes = _unequal([one.facts["attributes"] for one in states])
        where = f"{trial.title}: {first.layer}, {first.processor}: "
        if first.what == "before":
            before = states
            if attributes and first.facts["syncs"]:
                where += f"not the same on all ranks after the forward: {_some(attributes)}"
                return Finding(Condition.STATISTICS, Verdict.FAILS, where, _STATISTICS_ACTION)
        elif tensors:
            told = attributes or _unequal([one.facts["attributes"] for one in before])
            cause = f"; of what the step holds: {_some(told)}" if told else ""
            where += f"not the same on all ranks after postprocess: {_some(tensors)}{cause}"
            return Finding(Condition.STATISTICS, Verdict.FAILS, where, _STATISTICS_ACTION)
        elif attributes and note is None:
            where += f"not the same on all ranks after postprocess: {_some(attributes)}; every tensor of the layer is"
            action = "synchronize it if a result can depend on it"
            note = Finding(Condition.STATISTICS, Verdict.NOTE, where, action)
    return note


def _result(trial: Trial, alone: Trial) -> Finding | None:
    if trial.result is None or alone.result is None:
        return None
    name = alone.result.first_difference(trial.result)
    if not name:
        return None
    where = f"{trial.title}: {name} {alone.result.how(name, trial.result)} than on one rank{_cause(trial, alone)}"
    return Finding(Condition.RESULT, Verdict.FAILS, where, _RESULT_ACTION)


def _cause(trial: Trial, alone: Trial) -> str:
    """The step after which a layer is not what it is on one rank, and the first statistic that differs."""
    told = ""
    ours, theirs = (_noted(one) for one in (trial, alone))
    for own, other in zip(ours, theirs, strict=False):
        if (own.kind, own.layer, own.processor) != (other.kind, other.layer, other.processor):
            break
        if own.kind == "streams":
            names = _unequal([own.facts["streams"], other.facts["streams"]])
        else:
            names = _unequal([own.facts["attributes"], other.facts["attributes"]])
            if own.what == "before" and not own.facts["syncs"]:
                names = []  # what a rank holds before it communicates is its own
        if names and not told:
            told = f"; the first statistic that differs is {names[0]} of {own.processor}"
        if own.kind == "state" and _unequal([own.facts["tensors"], other.facts["tensors"]]):
            return f"; {own.layer} differs first after {own.processor}{told}"
    return told


def _noted(trial: Trial) -> list[Event]:
    """States and streams as rank 0 noted them; sums that another rank owns as that rank did."""
    rows = [[event for event in events if event.kind in ("state", "streams")] for events in trial.events]
    found = []
    for first, *others in zip(*rows, strict=False):
        if first.kind == "streams":
            known = [one.facts["streams"] for one in others if one.kind == "streams"]
            owned = {name: table[name] for name in first.facts["elsewhere"] for table in known if name in table}
            first = replace(first, facts={"streams": first.facts["streams"] | owned})
        found.append(first)
    return found


def _ends(trial: Trial) -> Finding:
    errors = [event for event in _all(trial, "error") if not event.facts["echo"]]
    if errors:
        where = f"{trial.title}: {errors[0].place}: {errors[0].what} (at {errors[0].site})"
        return Finding(Condition.ENDS, Verdict.FAILS, where, "mend this first; note that a rank may hold no sample")
    calls = "; ".join(f"rank {rank}: {_last_call(events)}" for rank, events in enumerate(trial.events))
    where = f"{trial.title}: {trial.verdict}; last calls: {calls}"
    return Finding(Condition.ENDS, Verdict.FAILS, where, "look at the rank that is named first")


def _last_call(events: list[Event]) -> str:
    calls = [event for event in events if event.kind == "call"]
    return f"{calls[-1].what} at {calls[-1].site}" if calls else "none"


def _local_names(trial: Trial) -> dict[str, list[int]]:
    """Module name → ranks that hold it, of modules that some rank lacks after the same preprocess."""
    rows = [[event for event in events if event.kind == "topology"] for events in trial.events]
    found: dict[str, list[int]] = {}
    for topologies in zip(*rows, strict=False):
        tables = [set(event.facts["names"]) for event in topologies]
        for name in sorted(set.union(*tables) - set.intersection(*tables)):
            found.setdefault(name, [rank for rank, table in enumerate(tables) if name in table])
    return found


def _states(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind == "state"]


def _unequal(tables: Sequence[dict[str, str]]) -> list[str]:
    """Names that all tables have, with values that are not all the same."""
    if not tables:
        return []
    return [name for name in tables[0] if len({table.get(name, tables[0][name]) for table in tables}) > 1]


def _all(trial: Trial, kind: str) -> Iterator[Event]:
    return (event for events in trial.events for event in events if event.kind == kind)


def _titles(trials: Sequence[Trial]) -> str:
    ranks, samples = ({getattr(trial, key) for trial in trials} for key in ("ranks", "samples"))
    return f"seen on {_and(sorted(ranks))} ranks with {_and(sorted(samples, reverse=True))} samples"


def _and(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" and " if len(numbers) > 1 else "") + str(numbers[-1])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


_FRESH_ACTION = "in preprocess, put observers in and replace modules first, then make the DistHelper"
_FORWARD_ACTION = (
    "return True from syncs_in_forward(), so that every rank calls equally often; or only accumulate in the forward "
    "and agree in postprocess"
)
_CALLS_ACTION = "call it on every rank with the same arguments, also on one that has no sample or no data"
_STATISTICS_ACTION = "agree on it over the ranks before it is used: StatStore, sync_base_operation or a gathered list"
_RESULT_ACTION = (
    "use what does not depend on the number of ranks: extrema, integer counts, StatStore for float sums, order= for "
    "gathered lists, no random numbers from global state"
)
_CONDITIONS: tuple[tuple[Condition, Diagnosis], ...] = (
    (Condition.FRESH, _fresh),
    (Condition.TOPOLOGY, _topology),
    (Condition.LOCAL, _local),
    (Condition.CALLS, _calls),
    (Condition.STATISTICS, _statistics),
    (Condition.RESULT, _result),
)
