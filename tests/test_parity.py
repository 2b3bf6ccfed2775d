"""N ranks give the same bytes as one: every registered processor, every shipped recipe, uneven and empty shares.

The cases come from the registry and the package's practices, so a new processor or recipe joins by existing.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from msmodelslim.errors import UnsupportedError
from msmodelslim.processor.linear_quant import LinearQConfig
from msmodelslim.processor.smooth import SmoothProcessor
from msmodelslim.quant_service import QuantJob, open_session, run_rank
from msmodelslim.registry import lookup, names
from tests import fixtures
from tests.run_ranks import RankRunner

PRACTICES = sorted((Path(__file__).parents[1] / "msmodelslim" / "practices").rglob("*.yaml"))
INT8_GPTQ = {"dtype": "int8", "scope": "per_channel", "method": "gptq"}
W8A8: dict[str, Any] = {
    "type": "linear_quant",
    "qconfig": {
        "act": {"dtype": "int8", "scope": "per_tensor", "method": "minmax"},
        "weight": {"dtype": "int8", "scope": "per_channel"},
    },
}
W8A8_GPTQ = {"type": "linear_quant", "qconfig": {**W8A8["qconfig"], "weight": INT8_GPTQ}}
#: the one scheme that runs but that no engine reads, so every format refuses it by name
NO_READER = {"dtype": "int4", "scope": "per_channel", "symmetric": False}
SAVERS = ({"type": "compressed_tensors"}, {"type": "ascendv1_saver", "target": "unchecked"})


def cases() -> list[Any]:
    """Each example of each processor as the process list of a recipe; those that round nothing come before W8A8."""
    found = []
    for name in names("processor"):
        cls = lookup("processor", name)
        for index, options in enumerate(cls.examples()):
            step = {"type": name, **options}
            rounds = name in ("linear_quant", "group")
            found.append(pytest.param([step] if rounds else [step, W8A8], id=f"{name}-{index}"))
            if issubclass(cls, SmoothProcessor) and index == 0:  # sums that are rescaled
                found.append(pytest.param([step, W8A8_GPTQ], id=f"{name}-gptq"))
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, so that they do not divide evenly; widths that every scheme divides."""
    return fixtures.t_dense(
        tmp_path_factory.mktemp("parity"), num_hidden_layers=3, hidden_size=128, intermediate_size=256
    )


def write_samples(folder: Path, count: int) -> Path:
    path = folder / f"samples{count}.jsonl"
    rows = [[(7 * index + 3 * place) % 300 + 3 for place in range(5 + 3 * index % 11)] for index in range(count)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def rank_job(rank: int, values: dict[str, Any]) -> None:
    run_rank(values, rank, dist.get_world_size())


def make_job(model: Path, out: Path, recipe: dict[str, Any] | str, dataset: Path) -> QuantJob:
    text = recipe if isinstance(recipe, str) else yaml.safe_dump(recipe, sort_keys=False)
    return QuantJob(model, out, text, "parity.yaml", dataset=str(dataset), threads=1)


def hashes_on(run: RankRunner, ranks: int, job: QuantJob) -> tuple[dict[str, str], dict[str, Any]]:
    """sha256 of every file of the result, and the parts of the report that may not depend on the number of ranks."""
    values = job.plain() | {"device_ids": list(range(ranks)), "leader": os.getpid()}
    run(ranks, rank_job, values, timeout_s=240)
    files = sorted(path for path in job.save_path.rglob("*") if path.is_file() and path.name != "quant_report.json")
    report = json.loads((job.save_path / "quant_report.json").read_text())
    same = {
        key: report[key]
        for key in ("model", "data", "patterns", "schemes", "modules", "left_float", "rewritten", "smoothing")
    }
    same["errors"] = [(e["name"], e.get("weight_error"), e.get("output_error")) for e in report["layers"]]
    return {str(f.relative_to(job.save_path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}, same


def saver_for(model: Path, tmp_path: Path, process: list[dict[str, Any]], dataset: Path) -> dict[str, Any] | None:
    """A recipe with the first format that can hold what these steps make; None when all refuse, each by name."""
    for saver in SAVERS:
        recipe = recipe_of(process, saver)
        try:
            open_session(make_job(model, tmp_path / "none", recipe, dataset))
        except UnsupportedError as error:
            assert "model.layers.0.self_attn.q_proj" in error.message, error
            assert str(LinearQConfig.model_validate(process[-1]["qconfig"]).scheme()) in error.message, error
            continue
        return recipe
    return None


def recipe_of(process: list[dict[str, Any]], saver: dict[str, Any]) -> dict[str, Any]:
    spec = {"process": process, "save": [saver]}
    return {"apiversion": "modelslim_v1", "metadata": {"config_id": "parity"}, "spec": spec}


@pytest.mark.parametrize("process", cases())
def test_every_processor_gives_one_ranks_bytes_on_2_3_and_4(
    process: list[dict[str, Any]], model: Path, tmp_path: Path, run_ranks: RankRunner
) -> None:
    dataset = write_samples(tmp_path, 7)
    recipe = saver_for(model, tmp_path, process, dataset)
    if recipe is None:
        assert process[-1]["qconfig"]["weight"] | {"ext": 0} == NO_READER | {"ext": 0}
        return
    found = [
        hashes_on(run_ranks, ranks, make_job(model, tmp_path / f"on{ranks}", recipe, dataset)) for ranks in (1, 2, 3, 4)
    ]
    for other in found[1:]:
        assert other == found[0]


@pytest.mark.parametrize("samples", [1, 5, 16])
@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver["type"])
def test_uneven_and_empty_shares_give_the_same_bytes(
    samples: int, saver: dict[str, Any], model: Path, tmp_path: Path, run_ranks: RankRunner
) -> None:
    dataset = write_samples(tmp_path, samples)
    recipe = recipe_of([W8A8], saver)
    found = [
        hashes_on(run_ranks, ranks, make_job(model, tmp_path / f"on{ranks}", recipe, dataset)) for ranks in (1, 2, 3, 4)
    ]
    for other in found[1:]:
        assert other == found[0]


def test_a_rank_without_samples_propagates_nothing_and_the_bytes_are_the_same(
    model: Path, tmp_path: Path, run_ranks: RankRunner
) -> None:
    dataset = write_samples(tmp_path, 2)
    recipe = recipe_of([W8A8 | {"propagate_error": True}], SAVERS[0])
    found = [hashes_on(run_ranks, ranks, make_job(model, tmp_path / f"on{ranks}", recipe, dataset)) for ranks in (1, 3)]
    assert found[0] == found[1]


@pytest.mark.parametrize("practice", PRACTICES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_recipe_gives_one_ranks_bytes_on_2_and_3(
    practice: Path, model: Path, tmp_path: Path, run_ranks: RankRunner
) -> None:
    dataset = write_samples(tmp_path, 5)
    text = practice.read_text()
    found = [
        hashes_on(run_ranks, ranks, make_job(model, tmp_path / f"on{ranks}", text, dataset)) for ranks in (1, 2, 3)
    ]
    for other in found[1:]:
        assert other == found[0]
