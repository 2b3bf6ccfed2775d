"""For the tests of other people's processors.

from msmodelslim.testing import assert_data_parallel

def test_my_recipe_is_data_parallel():
    assert_data_parallel("my_recipe.yaml", plugins=["my_processor.py"])
"""

from collections.abc import Sequence
from pathlib import Path

from msmodelslim.check_dp import RANKS, SAMPLES, TIMEOUT_S, as_text, check_data_parallel, holds
from msmodelslim.recipe import read_text


def assert_data_parallel(
    recipe: Path | str,
    model_path: Path | str | None = None,
    ranks: Sequence[int] = RANKS,
    *,
    samples: Sequence[int] = SAMPLES,
    plugins: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> None:
    """What `msmodelslim check-dp` does, as an assertion.

    Args:
        recipe: path of the recipe.
        model_path: a checkpoint; None makes a tiny random Llama.
        ranks: numbers of ranks.
        samples: numbers of calibration samples.
        plugins: modules or .py files that register steps of the recipe; none for those that the test has imported.
        timeout_s: a rank that makes no progress for so long ends its run.

    Raises:
        AssertionError: a pass condition does not hold; tells which, where, and what to do.
        ModelslimError: the recipe cannot be run at all.
    """
    path = Path(recipe)
    findings = check_data_parallel(
        read_text(path),
        str(path),
        None if model_path is None else Path(model_path),
        ranks=ranks,
        samples=samples,
        plugins=plugins,
        timeout_s=timeout_s,
    )
    if not holds(findings):
        raise AssertionError(f"{path} is not data-parallel:\n{as_text(findings)}")
