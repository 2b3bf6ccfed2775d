"""check-dp passes what is right and names what is wrong: condition, layer, step, line, statistic, module."""

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from msmodelslim.check_dp import Condition, Finding, Verdict, check_data_parallel, holds
from msmodelslim.check_dp.diagnosis import diagnose
from msmodelslim.check_dp.events import Event
from msmodelslim.check_dp.result_files import ResultFiles
from msmodelslim.check_dp.trial import Trial
from msmodelslim.cli import main
from msmodelslim.errors import EnvError, SchemaValidateError
from msmodelslim.plugins import load_plugins
from msmodelslim.testing import assert_data_parallel
from tests.registry_copy import own_registry

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TWINS = [
    *(str(EXAMPLES / f"{name}.py") for name in ("form_a_head_balance", "form_b_median_smooth")),
    str(ROOT / "tests" / "broken_twins.py"),
]
W8A8 = {
    "type": "linear_quant",
    "qconfig": {
        "act": {"dtype": "int8", "scope": "per_tensor", "method": "minmax"},
        "weight": {"dtype": "int8", "scope": "per_channel"},
    },
}


@pytest.fixture(scope="module", autouse=True)
def _twins() -> Iterator[None]:
    with own_registry():
        load_plugins(TWINS)
        yield


def recipe_of(*steps: str | dict, **spec: object) -> str:
    process = [{"type": step} if isinstance(step, str) else step for step in steps]
    return yaml.safe_dump(
        {"apiversion": "modelslim_v1", "spec": {"process": process, "save": [{"type": "compressed_tensors"}], **spec}}
    )


def check(
    *steps: str | dict, ranks: int = 2, samples: int = 7, timeout_s: float = 120, **spec: object
) -> list[Finding]:
    found = check_data_parallel(
        recipe_of(*steps, **spec),
        "mine.yaml",
        ranks=[ranks],
        samples=[samples],
        plugins=TWINS,
        timeout_s=timeout_s,
        hang_after_s=2.0,
    )
    assert not multiprocessing.active_children()
    return found


def only_failure(found: list[Finding]) -> Finding:
    (failed,) = [one for one in found if one.verdict is Verdict.FAILS]
    return failed


def test_a_shipped_step_passes_and_every_condition_is_told() -> None:
    found = check(W8A8)
    assert [one.condition for one in found] == list(Condition)
    assert {one.verdict for one in found} == {Verdict.HOLDS}
    assert holds(found)


def test_a_step_without_support_is_named_and_the_other_conditions_are_seen_all_the_same() -> None:
    found = check("twin_unsupported", W8A8)
    failed = only_failure(found)
    assert (failed.condition, failed.where) == (Condition.SUPPORT, "support_distributed() is False: twin_unsupported")
    assert "override support_distributed()" in failed.action
    assert not holds(found)


def test_a_runner_for_one_device_is_named() -> None:
    found = check_data_parallel(recipe_of(W8A8, runner="layer_wise"), "mine.yaml", ranks=[1], samples=[1])
    failed = only_failure(found)
    assert failed.condition is Condition.RUNNER
    assert failed.where == "spec.runner is layer_wise, which uses one device and leaves the others idle"


def test_conditions_that_one_rank_cannot_show_are_not_said_to_hold() -> None:
    found = check_data_parallel(recipe_of(W8A8), "mine.yaml", ranks=[1], samples=[1])
    unseen = [one.condition for one in found if one.verdict is Verdict.OPEN]
    assert Condition.RESULT in unseen and Condition.CALLS in unseen
    assert not holds(found)


def test_an_observer_that_does_not_synchronize_is_named() -> None:
    failed = only_failure_of(check("twin_a_no_sync", W8A8), Condition.STATISTICS)
    assert failed.where.startswith("2 ranks, 7 samples: model.layers.0, twin_a_no_sync: ")
    assert failed.where.endswith(
        "not the same on all ranks after the forward: model.layers.0.self_attn.o_proj.0.absmax_H"
    )


def test_lists_that_are_not_merged_are_named_with_the_tensors_that_follow_from_them() -> None:
    failed = only_failure_of(check("twin_b_no_sync", W8A8), Condition.STATISTICS)
    assert "not the same on all ranks after postprocess: model.layers.0.self_attn.q_proj.weight, " in failed.where
    held = "twin_b_no_sync._collector.act_stats[model.layers.0.self_attn.q_proj][tensor]"
    assert f"; of what the step holds: {held}" in failed.where


def test_a_helper_made_before_the_last_change_of_structure_is_named_with_its_line() -> None:
    failed = only_failure_of(check("twin_stale", W8A8), Condition.FRESH)
    line = line_of("helper = DistHelper(request.module")
    assert f"model.layers.0, twin_stale: made at tests/broken_twins.py:{line};" in failed.where
    assert "added 'model.layers.0.self_attn.o_proj.0'" in failed.where


def test_a_module_of_one_rank_that_synchronizes_is_named_at_once() -> None:
    found = check("twin_a_local", W8A8)
    failed = only_failure_of(found, Condition.LOCAL)
    line = line_of('sync_base_operation(torch.ones(2), op="max")')
    assert failed.where == (
        "2 ranks, 7 samples: model.layers.0, twin_a_local, postprocess: rank 1 asks for "
        f"sync_base_operation(max, float32[2]) at tests/broken_twins.py:{line} about model.layers.0.expert, "
        "which only rank 1 holds"
    )


def test_a_list_of_one_ranks_module_that_is_gathered_is_named() -> None:
    found = check("twin_b_local", W8A8)
    failed = only_failure_of(found, Condition.LOCAL)
    assert "rank 0 asks for sync_gather_tensor_lists() at tests/broken_twins.py:" in failed.where
    assert failed.where.endswith("about model.layers.0.expert, which only rank 0 holds")
    (calls,) = [one for one in found if one.condition is Condition.CALLS]
    assert calls.verdict is Verdict.FAILS


def test_a_step_that_does_not_declare_its_synchronizing_forward_is_told_to() -> None:
    failed = only_failure_of(check("twin_undeclared", W8A8), Condition.CALLS)
    assert re.search(
        r"rank 0: sync_base_operation\(max, float32\[4\], \S+o_proj\.0\) at examples/form_a\S+:\d+", failed.where
    )
    assert "rank 1: DistHelper() at msmodelslim/processor/linear_quant.py:" in failed.where
    assert failed.action.startswith("return True from syncs_in_forward()")


def test_a_collective_only_where_there_is_data_is_named_with_what_the_other_rank_does() -> None:
    assert holds(check("twin_if_data", W8A8))
    failed = only_failure_of(check("twin_if_data", W8A8, samples=1), Condition.CALLS)
    assert "2 ranks, 1 sample: call" in failed.where
    assert "rank 0: sync_gather_tensor_lists(model.layers.0.self_attn.q_proj) at examples/form_b_median" in failed.where
    assert "rank 1: DistHelper() at msmodelslim/processor/linear_quant.py:" in failed.where


def test_ranks_that_would_wait_for_ever_are_ended_and_their_calls_named() -> None:
    failed = only_failure_of(check("twin_raw", W8A8), Condition.CALLS)
    assert f"rank 0: all_reduce(float32[3], sum) at tests/broken_twins.py:{line_of('dist.all_reduce(')}" in failed.where
    assert "rank 1: sync_gather_tensor_lists(" in failed.where


def test_a_mean_of_means_is_found_by_the_result_and_traced_to_its_step() -> None:
    found = check("twin_means", W8A8)
    failed = only_failure(found)
    assert failed.condition is Condition.RESULT
    assert "has other values than on one rank; model.layers.0 differs first after twin_means" in failed.where
    assert "StatStore for float sums" in failed.action


def test_an_error_on_a_rank_without_samples_is_told_with_its_place() -> None:
    failed = only_failure(check("twin_fails", W8A8, samples=1))
    assert failed.condition is Condition.ENDS
    assert "2 ranks, 1 sample: model.layers.0, twin_fails, postprocess: ValueError: no sample here (at" in failed.where


def test_a_rank_that_never_returns_ends_the_run_in_time() -> None:
    failed = only_failure_of(check("twin_loops", W8A8, timeout_s=4), Condition.ENDS)
    assert "no progress: rank 1 is at model.layers.0, twin_loops, postprocess" in failed.where
    assert "rank 0: sync_gather_tensor_lists(" in failed.where


def test_a_rank_that_is_killed_is_named() -> None:
    failed = only_failure_of(check("twin_killed", W8A8), Condition.ENDS)
    assert "rank 1 was killed by signal 9, usually out of memory, at model.layers.0, twin_killed, post" in failed.where


def test_modules_of_one_rank_that_are_left_alone_are_a_note() -> None:
    found = check("twin_experts", W8A8)
    (note,) = [one for one in found if one.verdict is Verdict.NOTE]
    assert note.condition is Condition.TOPOLOGY
    assert "local_only are model.layers.0.expert0 (rank 0), model.layers.0.expert1 (rank 1), " in note.where
    assert holds(found)


def test_answers_of_is_shared_that_differ_are_told_by_rank() -> None:
    def noted(answer: bool) -> list[Event]:
        return [Event("is_shared", 7, "layer", "step", what="layer.linear", facts={"answer": answer}), Event("end", 7)]

    result = ResultFiles({}, {})
    trials = [Trial(1, 7, [noted(True)], result), Trial(2, 7, [noted(True), noted(False)], result)]
    failed = only_failure(diagnose(trials))
    assert failed.condition is Condition.TOPOLOGY
    assert (
        failed.where == "2 ranks, 7 samples: layer, step: is_shared('layer.linear') is True on rank 0, False on rank 1"
    )


def test_sums_that_one_rank_owns_pass() -> None:
    weight = {"dtype": "int4", "scope": "per_channel", "method": "gptq"}
    found = check({"type": "linear_quant", "qconfig": {"weight": weight}}, ranks=3)
    assert {one.verdict for one in found} == {Verdict.HOLDS}


@pytest.mark.parametrize(
    ("digest", "told"), [("same", ""), ("other", "; the first statistic that differs is a of step")]
)
def test_a_sum_that_another_rank_owns_is_compared_as_that_rank_holds_it(digest: str, told: str) -> None:
    def noted(streams: dict[str, str], elsewhere: list[str], tensor: str) -> list[Event]:
        state = {"attributes": {}, "tensors": {"w": tensor}, "syncs": False}
        facts = {"streams": streams, "elsewhere": elsewhere}
        return [
            Event("streams", 7, "layer", "step", facts=facts),
            Event("state", 7, "layer", "step", what="after", facts=state),
            Event("end", 7),
        ]

    alone = Trial(1, 7, [noted({"a": "same"}, [], "1")], ResultFiles({"w": ("F32", "[1]", "1")}, {}))
    ranks = [noted({}, ["a"], "2"), noted({"a": digest, "expert1": "own"}, [], "2")]
    failed = only_failure(diagnose([alone, Trial(2, 7, ranks, ResultFiles({"w": ("F32", "[1]", "2")}, {}))]))
    assert failed.condition is Condition.RESULT
    assert failed.where.endswith(f"w has other values than on one rank; layer differs first after step{told}")


def test_a_number_that_differs_and_changes_nothing_is_a_note() -> None:
    found = check("twin_keeps", W8A8)
    (note,) = [one for one in found if one.verdict is Verdict.NOTE]
    assert note.condition is Condition.STATISTICS
    assert note.where.endswith(
        "not the same on all ranks after postprocess: twin_keeps.largest; every tensor of the layer is"
    )
    assert holds(found)


def test_the_command_prints_the_table_and_ends_with_1_where_a_condition_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "bad.yaml").write_text(recipe_of("twin_a_no_sync", W8A8))
    words = [str(tmp_path / "bad.yaml"), "--ranks", "2", "--samples", "7", "--plugin", *TWINS]
    assert main(["check-dp", *words]) == 1
    out = capsys.readouterr().out
    assert "what to do" in out
    assert "self_attn.o_proj.0.absmax_H" in out
    with pytest.raises(AssertionError, match=r"bad\.yaml is not data-parallel:\nfails: statistics are the same on"):
        assert_data_parallel(words[0], ranks=[2], samples=[7], plugins=TWINS)


def test_a_model_of_ones_own_is_checked(t_dense: Path, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(recipe_of(W8A8))
    assert_data_parallel(tmp_path / "good.yaml", t_dense, ranks=[2], samples=[3])


def test_a_wrong_recipe_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(recipe_of("no_such_step"))
    with pytest.raises(SchemaValidateError, match="'no_such_step' is not a processor"):
        assert_data_parallel(tmp_path / "wrong.yaml")


def test_the_check_is_not_a_rank_of_somebody_elses_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(EnvError, match="check-dp starts ranks of its own, and a launcher has started this process"):
        check(W8A8)


def only_failure_of(found: list[Finding], condition: Condition) -> Finding:
    (failed,) = [one for one in found if one.verdict is Verdict.FAILS and one.condition is condition]
    return failed


def line_of(text: str) -> int:
    lines = (ROOT / "tests" / "broken_twins.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
