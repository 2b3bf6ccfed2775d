"""The check as a whole: what the recipe says, then runs on one and on several ranks, then one finding a condition."""

from collections.abc import Sequence
from pathlib import Path

from msmodelslim.check_dp.diagnosis import diagnose
from msmodelslim.check_dp.findings import Condition, Finding, Verdict
from msmodelslim.check_dp.trial import Trials
from msmodelslim.plugins import load_plugins
from msmodelslim.quant_service import QuantJob, Session

RANKS = (1, 2, 3)
SAMPLES = (7, 1)  # not divided evenly by 2 or 3; and fewer than ranks, so that some rank has none
HANG_AFTER_S = 10.0  # one rank may receive much later than another has sent
TIMEOUT_S = 300.0


def check_data_parallel(
    recipe_text: str,
    recipe_source: str,
    model_path: Path | None = None,
    *,
    ranks: Sequence[int] = RANKS,
    samples: Sequence[int] = SAMPLES,
    plugins: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    hang_after_s: float = HANG_AFTER_S,
) -> list[Finding]:
    """Run a recipe's steps on several numbers of ranks and say which pass conditions hold.

    Args:
        recipe_text, recipe_source: the recipe's YAML, and where it came from.
        model_path: a checkpoint; None makes a tiny random Llama.
        ranks: numbers of ranks; one is always among them, as what the others are compared with.
        samples: numbers of calibration samples, each run on every number of ranks.
        plugins: modules or .py files that register steps of the recipe.
        timeout_s: a rank that makes no progress for so long ends its run.
        hang_after_s: ranks that wait in different collectives for so long end their run.

    Returns:
        One finding a condition, in the order in which to mend them.

    Raises:
        ModelslimError: the recipe, the model or a plugin cannot be used at all.
    """
    load_plugins(plugins)
    job = QuantJob(model_path or Path(), Path(), recipe_text, recipe_source, plugins=tuple(plugins))
    with Trials(job, tuple(samples), timeout_s, hang_after_s) as trials:
        findings = [_support(trials.session), _runner(trials.session)]
        return findings + diagnose(trials.run(ranks))


def _support(session: Session) -> Finding:
    names = [step.registered_name for step in session.processors if not step.support_distributed()]
    if not names:
        return Finding(Condition.SUPPORT, Verdict.HOLDS, ", ".join(s.registered_name for s in session.processors))
    action = "override support_distributed() to return True, once the conditions below hold"
    return Finding(Condition.SUPPORT, Verdict.FAILS, f"support_distributed() is False: {', '.join(names)}", action)


def _runner(session: Session) -> Finding:
    runner = session.recipe.runner
    if runner in ("auto", "dp_layer_wise"):
        where = f"spec.runner is {runner}; several devices are given as --device_id 0 1 ..."
        return Finding(Condition.RUNNER, Verdict.HOLDS, where)
    where = f"spec.runner is {runner}, which uses one device and leaves the others idle"
    return Finding(Condition.RUNNER, Verdict.FAILS, where, "write runner: auto or dp_layer_wise")
