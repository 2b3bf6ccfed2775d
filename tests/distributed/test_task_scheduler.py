import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msmodelslim.distributed import RankMismatchError, assign, run_tasks, sync_base_operation
from msmodelslim.distributed.failure import RankFailedError
from msmodelslim.errors import InvalidModelError


def test_the_longest_goes_first_to_the_least_loaded_and_ties_go_by_name():
    # 7→0, 6→1, 5→1? no: loads 7, 6 → 5 to rank 1 (11), 4 to rank 0 (11), b=3 to rank 0 (14), c=3 to rank 1 (14)
    costs = {"c": 3, "b": 3, "d4": 4, "e5": 5, "f6": 6, "g7": 7}
    assert assign(costs, 2) == {"g7": 0, "f6": 1, "e5": 1, "d4": 0, "b": 0, "c": 1}


@given(st.dictionaries(st.text("abc", max_size=4), st.floats(0, 1e6), max_size=12), st.integers(1, 5), st.randoms())
def test_every_task_has_one_rank_whatever_the_order_and_no_load_exceeds_the_bound(costs, world_size, random):
    owners = assign(costs, world_size)
    shuffled = list(costs.items())
    random.shuffle(shuffled)
    assert assign(dict(shuffled), world_size) == owners
    loads = [sum(cost for name, cost in costs.items() if owners[name] == rank) for rank in range(world_size)]
    if costs:  # greedy: the last task placed was placed on the least loaded rank
        assert max(loads) <= sum(loads) / world_size + max(costs.values()) + 1e-3


def test_no_rank_and_negative_costs_are_refused():
    with pytest.raises(ValueError, match="world_size is 0; give 1 or more"):
        assign({"a": 1}, 0)
    with pytest.raises(ValueError, match="the cost of 'a' is -1; give 0 or more"):
        assign({"a": -1}, 2)
    with pytest.raises(ValueError, match=r"tasks and costs name different things: \['b'\]"):
        run_tasks({"a": dict}, {"a": 1, "b": 1})


def test_a_unit_is_dealt_as_one_task_that_costs_the_sum():
    costs = {"q": 3, "k": 1, "v": 1, "o": 4, "gate": 3, "up": 3, "down": 4}
    # gate+up 6 to 0, k+q+v 5 to 1, down 4 to 1 (9), o 4 to 0 (10)
    units = [["q", "k", "v"], ["up", "gate"]]
    assert assign(costs, 2, units) == {"down": 1, "gate": 0, "k": 1, "o": 0, "q": 1, "up": 0, "v": 1}
    assert assign(costs, 2, []) == assign(costs, 2, [[name] for name in costs])
    assert set(assign(costs, 9, units).values()) == {0, 1, 2, 3}


def test_units_that_overlap_or_name_no_task_are_refused():
    with pytest.raises(ValueError, match="'b' of a unit is in another one too"):
        assign({"a": 1, "b": 1, "c": 1}, 2, [["a", "b"], ["b", "c"]])
    with pytest.raises(ValueError, match="'d' of a unit has no cost"):
        assign({"a": 1}, 2, [["a", "d"]])


def test_costs_or_owners_are_given_and_owners_are_ranks():
    for options in ({}, {"costs": {"a": 1}, "owners": {"a": 0}}):
        with pytest.raises(ValueError, match="run_tasks: give the costs of the tasks, or their owners"):
            run_tasks({"a": dict}, **options)
    with pytest.raises(ValueError, match=r"tasks and owners name different things: \['b'\]"):
        run_tasks({"a": dict}, owners={"a": 0, "b": 0})
    with pytest.raises(ValueError, match="the owner of task 'a' is 1; give a place among the 1 ranks, from 0 on"):
        run_tasks({"a": dict}, owners={"a": 1})


def where_told(rank: int, owners: list[dict[str, int]]) -> dict:
    return run_tasks({"a": lambda: {"rank": torch.tensor(rank)}, "b": lambda: {"rank": torch.tensor(rank)}},
                     owners=owners[rank])  # fmt: skip


def test_owners_that_are_given_do_the_tasks(run_ranks):
    for found in run_ranks(3, where_told, [{"a": 2, "b": 1}] * 3):
        assert (found["a"]["rank"].item(), found["b"]["rank"].item()) == (2, 1)


def test_owners_that_differ_are_told_on_every_rank(run_ranks):
    for error in run_ranks.errors(2, where_told, [{"a": 0, "b": 0}, {"a": 0, "b": 1}]):
        assert isinstance(error, RankMismatchError) and "run_tasks: which rank does which task differs" in str(error)


def square(i: int) -> dict[str, torch.Tensor]:
    value = torch.arange(float(i + 1)) ** 2
    return {"codes": value.to(torch.int8), "scale": value.to(torch.bfloat16), "none": torch.empty(0)} if i % 4 else {}


def work(rank: int) -> tuple[list[str], dict]:
    done = []

    def task(i: int):
        def run() -> dict[str, torch.Tensor]:
            done.append(f"t{i}")
            return square(i)

        return run

    found = run_tasks({f"t{i}": task(i) for i in range(7)}, {f"t{i}": float(i) for i in range(7)})
    return done, found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_task_runs_once_and_every_rank_has_its_tensors(run_ranks, world_size):
    answers = run_ranks(world_size, work)
    assert sorted(name for done, _ in answers for name in done) == [f"t{i}" for i in range(7)]
    for done, found in answers:
        assert done == sorted(name for name, rank in assign({f"t{i}": i for i in range(7)}, world_size).items()
                              if name in done)  # fmt: skip
        assert list(found) == [f"t{i}" for i in range(7)]
        for i in range(7):
            assert found[f"t{i}"].keys() == square(i).keys()
            for key, value in square(i).items():
                assert found[f"t{i}"][key].dtype == value.dtype and torch.equal(found[f"t{i}"][key], value)


def fail(rank: int, kind: str) -> None:
    def good() -> dict:
        return {}

    def bad() -> dict:
        if kind == "collective":
            sync_base_operation(torch.ones(1), "max")
        if kind == "model":
            raise InvalidModelError("weight w has 3 NaN", "mend it")
        return {"x": 1 / 0}

    run_tasks({"a": good, "b": bad, "c": good}, {"a": 3, "b": 2, "c": 1})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_failing_task_raises_the_same_error_on_every_rank(run_ranks, world_size):
    place = "rank 0" if world_size == 1 else "rank 1"
    for error in run_ranks.errors(world_size, fail, "bug"):
        assert isinstance(error, RankFailedError)
        assert str(error).startswith(
            f"{place} failed at task 'b': ZeroDivisionError: division by zero (raised at test_task"
        )
    for error in run_ranks.errors(world_size, fail, "model"):
        assert type(error) is InvalidModelError
        assert str(error) == f"weight w has 3 NaN ({place}, task 'b'); mend it"


def test_a_collective_inside_a_task_is_named_with_its_line(run_ranks):
    for error in run_ranks.errors(2, fail, "collective", timeout_s=20):
        assert "RuntimeError: sync_base_operation at test_task_scheduler.py:" in str(error)
        assert "inside task 'b', which only this rank runs" in str(error)


def disagree(rank: int) -> None:
    run_tasks({"a": dict, f"b{rank}": dict}, {"a": 1, f"b{rank}": 1})


def test_different_tasks_on_different_ranks_are_a_disagreement(run_ranks):
    for error in run_ranks.errors(2, disagree):
        assert isinstance(error, RankMismatchError) and "run_tasks: which rank does which task differs" in str(error)
