"""One analysis, from words to scores: everything checked first, then the layers; on several devices as on one.

No file of the model is written. Parents and ranks call the same functions with the same plain `AnalysisJob`; each
builds its own live objects from it. Rank 0 leaves the result in a file for the process that started it.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from msmodelslim import device as devices
from msmodelslim.analysis.inputs import InputAnalysis
from msmodelslim.analysis.metrics import METRICS
from msmodelslim.analysis.model_wise import CopiesForward, ModelErrors
from msmodelslim.analysis.outputs import BlockErrors, FloatForward, FloatLinears, LinearErrors, OutputAnalysis
from msmodelslim.analysis.result import AnalysisResult, LayerScore
from msmodelslim.calibration import load_samples
from msmodelslim.distributed.outer_launcher import joins_outer_launcher
from msmodelslim.distributed.same_inputs import refuse_differences
from msmodelslim.errors import EnvError, UnsupportedError
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.model.families import open_model
from msmodelslim.plugins import load_plugins
from msmodelslim.processor.base import BaseSessionProcessor, RunContext, RunRecord
from msmodelslim.processor.patterns import Selection
from msmodelslim.quant_service import build_steps, inputs_of_run, own_threads
from msmodelslim.recipe import Recipe, Step, parse_recipe
from msmodelslim.registry import lookup
from msmodelslim.runner.dp_layer_wise_runner import DPLayerWiseRunner, refuse_unsupported
from msmodelslim.runner.layer_wise_runner import LayerWiseRunner
from msmodelslim.runner.shares import runner_on_share

log = logging.getLogger(__name__)

_MX = {"scope": "per_block", "symmetric": True, "method": "minmax"}
#: what is tried out when nobody says otherwise: weights and inputs in blocks of 32 that share an exponent
DEFAULT_SCHEME = "mxfp4"
_DEFAULT_QCONFIG = {"act": {"dtype": DEFAULT_SCHEME, **_MX}, "weight": {"dtype": DEFAULT_SCHEME, **_MX}}
_MAX_LENGTH = 2048
_RESULT = "result.json"


@dataclass(frozen=True)
class AnalysisJob:
    """What an analysis is asked to do, as plain data.

    Args:
        model_path: checkpoint to look at.
        scope, metric: keys of `METRICS`.
        patterns: which linears are scored; for blocks, which are quantized where no recipe is given.
        recipe_text: the YAML of a recipe whose steps are tried out; None takes `DEFAULT_SCHEME`.
        recipe_source: where it came from, for messages.
        model_type: name of the model or family; None takes what config.json says.
        device: "cpu", "cuda" or "npu".
        device_ids: one index a rank.
        trust_remote_code: let Python files of the checkpoint run.
        dataset: calibration data.
        max_samples: samples used, the first ones; None takes the recipe's, or all.
        max_length: tokens kept of a sample; None takes the recipe's, or 2048.
        threads: CPU threads a rank; None shares the cores out evenly.
        plugins: modules and .py files to import first.
        folder: where rank 0 leaves the result; set by `analyze`.
    """

    model_path: Path
    scope: str
    metric: str
    patterns: tuple[str, ...] = ("*",)
    recipe_text: str | None = None
    recipe_source: str = ""
    model_type: str | None = None
    device: str = "cpu"
    device_ids: tuple[int, ...] = (0,)
    trust_remote_code: bool = False
    dataset: str = "mix_calib.jsonl"
    max_samples: int | None = None
    max_length: int | None = None
    threads: int | None = None
    plugins: tuple[str, ...] = ()
    folder: str = ""

    def plain(self) -> dict[str, Any]:
        """As values that JSON can hold, for other processes."""
        return asdict(self) | {"model_path": str(self.model_path)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "AnalysisJob":
        """The job again, from `plain`."""
        tuples = {name: tuple(values[name]) for name in ("patterns", "device_ids", "plugins")}
        return cls(**values | tuples | {"model_path": Path(values["model_path"])})


@dataclass
class OpenAnalysis:
    """The live objects of one process's part in an analysis."""

    job: AnalysisJob
    context: RunContext
    steps: list[BaseSessionProcessor]
    found: InputAnalysis | OutputAnalysis
    scheme: str
    rank: int = 0
    world_size: int = 1
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(sample["input_ids"].shape[-1] for sample in self.samples)


def analyze(job: AnalysisJob) -> AnalysisResult | None:
    """Run the job; the scores, or None in a process that an outer launcher made another rank than the first.

    Raises:
        ModelslimError: a user's mistake or a limit.
    """
    load_plugins(job.plugins)
    joins = joins_outer_launcher()
    several = len(job.device_ids) > 1 or joins
    with TemporaryDirectory(prefix="msmodelslim_analyze_") as folder, own_threads(1 if several else job.threads):
        job = replace(job, folder=folder)
        opened = None if joins else open_analysis(job)  # a rank that was started already opens its own
        if opened is not None and not several:
            return run_analysis(opened)
        DPLayerWiseRunner(
            f"{__name__}:{run_rank.__name__}",
            job.plain(),
            job.device,
            job.device_ids,
            opened.steps if opened else [],
            alone=lambda: None,
            threads=job.threads,
            joins=joins,
        ).run()
        file = Path(folder) / _RESULT
        return AnalysisResult.from_plain(json.loads(file.read_text())) if file.exists() else None


def run_rank(values: dict[str, Any], rank: int, world_size: int) -> None:
    """One rank's part of an analysis on several devices; called in a process group that is ready."""
    opened = open_analysis(AnalysisJob.from_plain(values), rank, world_size)
    if world_size > 1:
        refuse_unsupported(opened.steps)
    result = run_analysis(opened)
    if rank == 0:
        (Path(opened.job.folder) / _RESULT).write_text(json.dumps(result.plain()))


def open_analysis(job: AnalysisJob, rank: int = 0, world_size: int = 1) -> OpenAnalysis:
    """Build and check everything that needs no weight: recipe, model, patterns, data, memory."""
    load_plugins(job.plugins)
    recipe = None if job.recipe_text is None else parse_recipe(job.recipe_text, job.recipe_source)
    if recipe is not None and recipe.prior:
        raise UnsupportedError(
            f"{job.recipe_source}: spec.prior has {len(recipe.prior)} stage(s), and an analysis tries one stage out",
            "give a recipe without prior",
        )
    adapter = open_model(job.model_path, job.model_type, job.trust_remote_code)
    place = int(os.environ.get("LOCAL_RANK", rank)) % len(job.device_ids)
    context = RunContext(adapter, nn.Module(), devices.torch_device(job.device, job.device_ids[place]), RunRecord())
    context.model = adapter.init_model(context.device)
    steps, found = _steps(job, recipe, context)
    opened = OpenAnalysis(job, context, steps, found, _scheme(job, recipe), rank, world_size)
    data = load_samples(job.dataset)
    kept = data.samples[: job.max_samples or (recipe.max_samples if recipe else None)]
    length = job.max_length or (recipe.max_length if recipe else _MAX_LENGTH)
    opened.samples = adapter.handle_dataset(kept, context.device, length)
    opened.notes += data.notes
    if world_size > 1:
        asked = json.dumps([job.scope, job.metric, job.patterns, job.recipe_text])
        refuse_differences(inputs_of_run(adapter, asked, data.fingerprint))
    LayerWiseRunner(context, steps).rehearse()
    _refuse_nothing(opened)
    _refuse_small_memory(opened)
    context.model = adapter.init_model(context.device)  # the rehearsal left quantized modules behind
    return opened


def run_analysis(opened: OpenAnalysis) -> AnalysisResult:
    """The layers, then the scores, the same on every rank."""
    start = time.perf_counter()
    needed = _copies_bytes(opened)
    if needed and opened.rank == 0:
        count = len(opened.context.adapter.layer_names)
        log.info("%s keeps %d copies of all hidden states, about %.1f GB", opened.job.metric, count, needed / 1e9)
    runner_on_share(
        LayerWiseRunner,
        opened.context,
        opened.steps,
        opened.samples,
        opened.rank,
        opened.world_size,
        title="analyze",
        propagates=False,
    ).run()
    job, names, scores = opened.job, opened.context.adapter.layer_names, opened.found.scores
    order = {name: place for place, (name, _) in enumerate(opened.context.model.named_modules())}
    ranked = sorted(scores, key=lambda name: (-scores[name], order[name]))
    return AnalysisResult(
        layer_scores=tuple(LayerScore(name, scores[name]) for name in ranked),
        method=job.metric,
        patterns=job.patterns,
        scope=job.scope,
        model_type=opened.context.adapter.model_type,
        scheme=opened.scheme,
        layer_names=tuple(names),
        samples=len(opened.samples),
        tokens=opened.tokens,
        notes=tuple(_notes(opened)),
        seconds=time.perf_counter() - start,
    )


def _steps(
    job: AnalysisJob, recipe: Recipe | None, context: RunContext
) -> tuple[list[BaseSessionProcessor], InputAnalysis | OutputAnalysis]:
    """The processors of the run, and the one among them that knows the scores in the end."""
    if not METRICS[job.scope][job.metric].quantizes:
        inputs = InputAnalysis(InputAnalysis.Config(metric=job.metric, patterns=job.patterns), context)
        return [inputs], inputs
    tried = build_steps(recipe.process if recipe else [_default_step(job.patterns)], context)
    if job.metric == "mse":
        linears = FloatLinears(context)
        pairs = [one for step in tried for one in (linears, step)]
        errors: OutputAnalysis = LinearErrors(Selection(job.patterns), linears, context)
        return [*pairs, errors], errors
    if job.metric == "mse_layer_wise":
        floats = FloatForward(context)
        errors = BlockErrors(floats, context)
    else:
        floats = copies = CopiesForward(context)
        errors = ModelErrors(copies, job.metric == "kl_model_wise", context)
    return [floats, *tried, errors], errors


def _default_step(patterns: Sequence[str]) -> Step:
    config: Any = lookup("processor", "linear_quant")
    return Step("linear_quant", config.Config.model_validate({"qconfig": _DEFAULT_QCONFIG, "include": tuple(patterns)}))


def _scheme(job: AnalysisJob, recipe: Recipe | None) -> str:
    if not METRICS[job.scope][job.metric].quantizes:
        return ""
    return f"{DEFAULT_SCHEME} blocks" if recipe is None else f"{recipe.config_id}"


def _refuse_nothing(opened: OpenAnalysis) -> None:
    """Raise where no module would get a score."""
    job, found = opened.job, opened.found
    if isinstance(found, (InputAnalysis, LinearErrors)):
        selected = sum(one["matches"] for one in found.selection.as_records(""))
    else:
        selected = sum(isinstance(module, QuantLinear) for module in opened.context.model.modules())
    if not selected:
        what = job.recipe_source if job.recipe_text else ", ".join(map(repr, job.patterns))
        raise UnsupportedError(
            f"{what}: no linear of the decoder layers of {opened.context.adapter.model_type} is touched",
            "compare the patterns with the names in `msmodelslim inspect`",
        )


def _copies_bytes(opened: OpenAnalysis) -> int:
    """What copies of all hidden states take, one a block; 0 where none are made."""
    if not isinstance(opened.found, ModelErrors):
        return 0
    adapter = opened.context.adapter
    width = adapter.checkpoint.config.get("hidden_size", 0)
    return len(adapter.layer_names) * opened.tokens * width * adapter.dtype.itemsize


def _refuse_small_memory(opened: OpenAnalysis) -> None:
    """Copies of all hidden states, one a block, have to fit."""
    needed = _copies_bytes(opened)
    free = devices.free_memory_bytes() if opened.job.device == "cpu" else None
    if free is not None and needed > free:
        raise EnvError(
            f"{opened.job.metric} keeps {len(opened.context.adapter.layer_names)} copies of the hidden states of "
            f"{opened.tokens:,} tokens, {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            "use fewer samples with --max_samples, or shorter ones with --max_length",
        )


def _notes(opened: OpenAnalysis) -> list[str]:
    """What was left out, a sentence each."""
    found, notes = opened.found, list(opened.notes)
    if any(step.propagates_error() for step in opened.steps):
        notes.append("propagate_error is not followed: each module is measured on the float model's inputs")
    records = list(opened.context.record.patterns)
    if isinstance(found, (InputAnalysis, LinearErrors)):
        records += found.selection.as_records("analyze")
    for one in records:
        if not one["matches"]:
            notes.append(f"{one['list']} pattern {one['pattern']!r} of {one['processor']} matched nothing it works on")
    if found.unreached:
        notes.append(_without_score("linear", "no token reached them", found.unreached))
    if isinstance(found, LinearErrors) and found.left_in_float:
        notes.append(_without_score("linear", "no step quantizes them", found.left_in_float))
    if opened.job.scope == "layer":
        left = [name for name in opened.context.adapter.layer_names if name not in found.scores]
        if left:
            notes.append(_without_score("block", "nothing is quantized in them", left))
    return notes


def _without_score(kind: str, why: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {kind}(s) have no score, {why}: {shown}"
