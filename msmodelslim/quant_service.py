"""One run, from a recipe to files: everything checked first, then the layers, then the report.

Parents and ranks call the same functions with the same plain `QuantJob`; each builds its own live objects from it.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from msmodelslim import __version__
from msmodelslim import device as devices
from msmodelslim.artifact import verify_directory
from msmodelslim.calibration import SampleSet, load_samples
from msmodelslim.distributed.outer_launcher import joins_outer_launcher, outer_world_size
from msmodelslim.distributed.same_inputs import leader_of_job, refuse_differences
from msmodelslim.errors import EnvError, ModelslimError, UnsupportedError
from msmodelslim.model.base import ModelSlimPipelineInterfaceV1
from msmodelslim.model.families import open_model
from msmodelslim.paths import refuse_unsafe_paths
from msmodelslim.plugins import load_plugins
from msmodelslim.processor.base import BaseSessionProcessor, RunContext, RunRecord
from msmodelslim.recipe import Recipe, Step, parse_recipe
from msmodelslim.registry import lookup, names
from msmodelslim.report import PLOT_FILE, REPORT_FILE, RunFacts, build_report, plot_report, print_summary
from msmodelslim.runner.base import BaseRunner, needs_forward, share_forwards
from msmodelslim.runner.dp_layer_wise_runner import DPLayerWiseRunner, refuse_unsupported
from msmodelslim.runner.layer_wise_runner import LayerWiseRunner
from msmodelslim.runner.model_wise_runner import ModelWiseRunner
from msmodelslim.runner.shares import runner_on_share
from msmodelslim.saver.base import BaseSaver

log = logging.getLogger(__name__)
_MODEL_WISE = (ModelWiseRunner, "Model-wise runner detected, using model-wise pipeline.")
_LAYER_WISE = (LayerWiseRunner, "Layer-wise runner detected, using layer-wise pipeline.")
_DP = (DPLayerWiseRunner, "Distributed layer-wise runner detected, using distributed layer-wise pipeline.")
#: (spec.runner, several devices) → runner and what the log says
_RUNNERS: dict[tuple[str, bool], tuple[type[BaseRunner] | type[DPLayerWiseRunner], str]] = {
    ("model_wise", False): _MODEL_WISE,
    ("model_wise", True): _MODEL_WISE,
    ("layer_wise", False): _LAYER_WISE,
    ("layer_wise", True): _LAYER_WISE,
    ("dp_layer_wise", False): _DP,
    ("dp_layer_wise", True): _DP,
    ("auto", True): (
        DPLayerWiseRunner,
        "multi device configuration detected, using distributed layer-wise pipeline.",
    ),
    ("auto", False): (LayerWiseRunner, "Runner type not detected, using layer-wise pipeline."),
}
_SHOWN_DIGITS = 12  # of a sha256
_PROCESS_MIB = 600  # an idle process with torch and transformers imported, measured


@dataclass(frozen=True)
class QuantJob:
    """What a run is asked to do, as plain data.

    Args:
        model_path: source checkpoint.
        save_path: directory to write; must not exist or be empty, unless `overwrite`.
        recipe_text: the recipe's YAML.
        recipe_source: where it came from, for messages.
        model_type: name of the model or family; None takes what config.json says.
        device: "cpu", "cuda" or "npu".
        device_ids: one index a rank.
        trust_remote_code: let Python files of the checkpoint run.
        dataset: overrides the recipe's.
        debug: show tracebacks.
        overwrite: replace what is at `save_path`.
        threads: CPU threads a rank; None shares the cores out evenly.
        leader: process that leads the run; the output's hidden directory is named after it.
        plugins: modules and .py files of other people's processors, to import first.
    """

    model_path: Path
    save_path: Path
    recipe_text: str
    recipe_source: str
    model_type: str | None = None
    device: str = "cpu"
    device_ids: tuple[int, ...] = (0,)
    trust_remote_code: bool = False
    dataset: str | None = None
    debug: bool = False
    overwrite: bool = False
    threads: int | None = None
    leader: int | None = None
    plugins: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As values that JSON can hold, for other processes."""
        return asdict(self) | {"model_path": str(self.model_path), "save_path": str(self.save_path)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "QuantJob":
        """The job again, from `plain`."""
        paths = {name: Path(values[name]) for name in ("model_path", "save_path")}
        tuples = {name: tuple(values[name]) for name in ("device_ids", "plugins")}
        return cls(**values | paths | tuples)


@dataclass
class Session:
    """The live objects of one process's part in a run."""

    job: QuantJob
    recipe: Recipe
    adapter: ModelSlimPipelineInterfaceV1
    context: RunContext
    processors: list[BaseSessionProcessor]
    saver: BaseSaver | None
    samples: list[dict[str, Any]] = field(default_factory=list)
    facts: RunFacts = field(default_factory=RunFacts)
    weights: dict[str, int] = field(default_factory=dict)
    layer_bytes: int = 0
    rank: int = 0
    world_size: int = 1

    @property
    def steps(self) -> list[BaseSessionProcessor]:
        """Processors in recipe order, then the saver."""
        return self.processors + ([self.saver] if self.saver else [])

    def renew_model(self) -> None:
        """A fresh module tree on meta: a rehearsal leaves quantized modules behind."""
        self.context.model = self.adapter.init_model(self.context.device)


def quantize(job: QuantJob) -> None:
    """Run the job, print its closing table, leave the result at `job.save_path`.

    Raises:
        ModelslimError: a user's mistake or a limit; nothing is left behind at `save_path`.
    """
    start = time.perf_counter()
    load_plugins(job.plugins)
    recipe = parse_recipe(job.recipe_text, job.recipe_source)
    joins = joins_outer_launcher()
    devices_of_job = tuple(range(outer_world_size())) if joins else job.device_ids
    chosen = _choose_runner_type(recipe.runner, devices_of_job)
    several = chosen is DPLayerWiseRunner and (len(job.device_ids) > 1 or joins)
    with own_threads(1 if several else job.threads):
        if not several and chosen is not DPLayerWiseRunner:
            if joins and len(devices_of_job) > 1:
                raise UnsupportedError(
                    f"spec.runner is {recipe.runner}, which uses one device, and the launcher started "
                    f"{len(devices_of_job)} processes",
                    "write runner: auto, or start one process",
                )
            run_session(open_session(job), start)
            return
        job = replace(job, leader=None if joins else os.getpid())
        session = None if joins else open_session(job)  # a rank that was started already opens its own
        runner = DPLayerWiseRunner(
            f"{__name__}:{run_rank.__name__}",
            job.plain(),
            job.device,
            job.device_ids,
            _all_steps(session) if session else [],
            alone=lambda: run_session(session or open_session(job), start),
            threads=job.threads,
            joins=joins,
        )
        try:
            runner.run()
        except BaseException:
            if session is not None and session.saver is not None:
                session.saver.abort()  # a rank that was killed could not
            raise


def run_rank(values: dict[str, Any], rank: int, world_size: int) -> None:
    """One rank's part of a run on several devices; called in a process group that is ready."""
    start = time.perf_counter()
    job = QuantJob.from_plain(values)
    if job.leader is None:
        job = replace(job, leader=leader_of_job())
    session = open_session(job, rank, world_size)
    if world_size > 1:
        refuse_unsupported(_all_steps(session))
    run_session(session, start)


def rehearse(job: QuantJob) -> None:
    """Everything that can be known before a weight is read, and what the run will need (`--dry_run`)."""
    with own_threads(job.threads):
        session = open_session(job)
        if _choose_runner_type(session.recipe.runner, job.device_ids) is DPLayerWiseRunner and len(job.device_ids) > 1:
            refuse_unsupported(_all_steps(session))
        _print_rehearsal(session)


def _choose_runner_type(runner: str, device_ids: Sequence[int]) -> type[BaseRunner] | type[DPLayerWiseRunner]:
    """`spec.runner` and the device list decide the pipeline; the table is part of the published interface."""
    several = len(device_ids) > 1
    chosen, sentence = _RUNNERS[runner, several]
    log.info("%s", sentence)
    if several and chosen is not DPLayerWiseRunner:
        log.warning(
            "spec.runner is %s, which uses one device: %d of the %d given stay idle; write runner: auto to use all",
            runner,
            len(device_ids) - 1,
            len(device_ids),
        )
    return chosen


def open_session(job: QuantJob, rank: int = 0, world_size: int = 1) -> Session:
    """Build and check everything that needs no weight: recipe, model, data, patterns, format, space."""
    load_plugins(job.plugins)
    refuse_unsafe_paths(job.model_path, job.save_path, job.overwrite)
    recipe = parse_recipe(job.recipe_text, job.recipe_source)
    adapter = open_model(job.model_path, job.model_type, job.trust_remote_code)
    place = int(os.environ.get("LOCAL_RANK", rank)) % len(job.device_ids)
    context = RunContext(adapter, nn.Module(), devices.torch_device(job.device, job.device_ids[place]), RunRecord())
    several = world_size > 1 or (len(job.device_ids) > 1 and recipe.runner in ("auto", "dp_layer_wise"))
    saver = _build_saver(recipe.save, context, job, several)
    session = Session(job, recipe, adapter, context, build_steps(recipe.process, context), saver)
    session.rank, session.world_size = rank, world_size
    session.renew_model()
    _load_data(session)
    if world_size > 1:
        refuse_differences(inputs_of_run(adapter, job.recipe_text, session.facts.data.get("fingerprint", "")))
    _describe(session)
    LayerWiseRunner(context, session.steps).rehearse()
    if not any(name for name in _quantized(context.model)):
        raise UnsupportedError(
            f"{job.recipe_source}: no step touches any linear of {adapter.model_type}",
            "compare include and exclude with the names in `msmodelslim inspect`",
        )
    if saver is not None:
        plan = saver.finish_rehearsal()
        session.facts.output |= {"files": len(plan.files), "bytes": plan.total_bytes}
        _refuse_small_disk(job.save_path, plan.total_bytes)
    return session


def run_session(session: Session, start: float) -> None:
    """Prior stages, the main stage, the report; the result is checked, then put in place."""
    job, recipe, context, saver = session.job, session.recipe, session.context, session.saver
    session.facts.seconds["prepare"] = time.perf_counter() - start
    for number, stage in enumerate(recipe.prior, 1):
        log.info("prior stage %d of %d", number, len(recipe.prior))
        with _timed(session, f"prior stage {number}"):
            session.renew_model()
            samples, _ = _tokenize(session, job.dataset or stage.dataset)
            _runner(session, LayerWiseRunner, build_steps(stage.steps, context), samples).run()
    session.renew_model()
    whole = recipe.runner == "model_wise" and session.world_size == 1
    try:
        with _timed(session, "layers"):
            _runner(session, ModelWiseRunner if whole else LayerWiseRunner, session.steps, session.samples).run()
        if saver is not None:
            _finish(session, saver)
    except BaseException:
        if saver is not None:
            saver.abort()
        raise


def _runner(
    session: Session, cls: type[BaseRunner], steps: Sequence[BaseSessionProcessor], samples: list[dict[str, Any]]
) -> BaseRunner:
    return runner_on_share(cls, session.context, steps, samples, session.rank, session.world_size)


def _finish(session: Session, saver: BaseSaver) -> None:
    """Check what was written, add the report, put the directory in place: once, by the rank that speaks for the job."""
    job, context, facts = session.job, session.context, session.facts
    if session.rank:
        return
    log.info("checking the written files")
    with _timed(session, "verify"):
        _verify(saver, job.model_path, context.record)
    facts.peak_memory_mib = devices.peak_memory_mib(context.device.type)
    report = build_report(facts, context.record, session.weights)
    (saver.directory / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n")
    try:
        (saver.directory / PLOT_FILE).write_bytes(plot_report(report))
    except OSError as error:  # a full disk, or no place for matplotlib's cache: no reason to throw the result away
        (saver.directory / PLOT_FILE).unlink(missing_ok=True)
        log.warning("%s is left out: %s", PLOT_FILE, error)
    saver.commit()
    print_summary(report)


def _print_rehearsal(session: Session) -> None:
    """What `--dry_run` found."""
    context, facts = session.context, session.facts
    for processor in session.processors:
        processor.pre_run()
    for name, module in _quantized(context.model):
        context.record.modules[name] = {"scheme": str(module.scheme)}
    facts.peak_memory_mib = _memory_estimate_mib(session)
    print_summary(build_report(facts, context.record, session.weights), planned=True)


def _all_steps(session: Session) -> list[BaseSessionProcessor]:
    """Everything the run will do: the steps of the prior stages, then its own."""
    prior = [step for stage in session.recipe.prior for step in build_steps(stage.steps, session.context)]
    return prior + session.steps


def build_steps(steps: Sequence[Step], context: RunContext) -> list[BaseSessionProcessor]:
    """The processors that a recipe's steps name."""
    return [lookup("processor", step.type)(step.config, context) for step in steps]


def _build_saver(save: Sequence[Step], context: RunContext, job: QuantJob, several: bool) -> BaseSaver | None:
    """The recipe's saver; on several devices its distributed form, where there is one."""
    if not save:
        return None
    name = save[0].type
    if several and f"{name}_distributed" in names("saver"):
        name += "_distributed"
        log.debug("%s became %s", save[0].type, name)
    return lookup("saver", name)(save[0].config, context, job.save_path, job.leader)


def _quantized(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from msmodelslim.ir.quant_linear import QuantLinear

    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear))


def _load_data(session: Session) -> None:
    if not needs_forward(session.processors):
        return
    session.samples, found = _tokenize(session, session.job.dataset or session.recipe.dataset)
    tokens = sum(sample["input_ids"].shape[-1] for sample in session.samples)
    session.facts.data = {
        "source": found.source,
        "fingerprint": found.fingerprint,
        "samples": len(session.samples),
        "tokens": tokens,
    }
    session.context.record.warnings += found.notes


def _tokenize(session: Session, dataset: str) -> tuple[list[dict[str, Any]], SampleSet]:
    found = load_samples(dataset)
    kept = found.samples[: session.recipe.max_samples]
    return session.adapter.handle_dataset(kept, session.context.device, session.recipe.max_length), found


def inputs_of_run(adapter: ModelSlimPipelineInterfaceV1, recipe_text: str, data: str) -> dict[str, str]:
    """What this process has read for the run, as fingerprints: ranks on other machines may see other files.

    Args:
        recipe_text: what was asked for, in whatever form.
        data: fingerprint of the calibration data; empty where none is needed.
    """
    checkpoint = adapter.checkpoint
    headers = sorted((t.name, str(t.dtype), t.shape) for t in checkpoint.tensors.values())
    return {
        "config.json of the model": _fingerprint((checkpoint.path / "config.json").read_bytes()),
        "the list of its tensors": _fingerprint(repr(headers).encode()),
        "the recipe": _fingerprint(recipe_text.encode()),
        "the calibration data": data[:_SHOWN_DIGITS],
        "msmodelslim": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_SHOWN_DIGITS]


def _describe(session: Session) -> None:
    """Facts of the report, and the linears of the decoder layers before any of them is replaced."""
    job, adapter, model = session.job, session.adapter, session.context.model
    for layer_name in adapter.layer_names:
        for name, module in model.get_submodule(layer_name).named_modules(prefix=layer_name):
            if isinstance(module, nn.Linear):
                session.weights[name] = module.weight.numel()
    checkpoint = adapter.checkpoint
    layers = (
        sum(t.nbytes for n, t in checkpoint.tensors.items() if n.startswith(f"{x}.")) for x in adapter.layer_names
    )
    session.layer_bytes = max(layers, default=0)
    session.facts.model = {
        "path": str(job.model_path),
        "family": adapter.registered_name,
        "model_type": adapter.model_type,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "parameters": sum(math.prod(t.shape) for n, t in checkpoint.tensors.items() if not n.endswith("_scale_inv")),
    }
    recipe = session.recipe
    session.facts.recipe = {"source": job.recipe_source, "config_id": recipe.config_id, "text": job.recipe_text}
    session.facts.output = {"path": str(job.save_path), "source_bytes": checkpoint.total_bytes}
    if session.saver is not None:
        format_name = session.recipe.save[0].type  # the same word on any number of ranks
        session.facts.output |= {"format": format_name, "target": session.saver.config.target}
    session.facts.run = {
        "runner": recipe.runner,
        "device": job.device,
        "ranks": session.world_size,
        "threads": torch.get_num_threads(),
    }


def _memory_estimate_mib(session: Session) -> float:
    """An idle process, a layer with its codes and the next one's pages, and the samples' hidden states.

    Those are held once, and twice where a layer is forwarded again with the same inputs.
    """
    width = session.adapter.checkpoint.config.get("hidden_size", 0)
    tokens = session.facts.data.get("tokens", 0)
    forwards = sum(map(needs_forward, share_forwards(session.steps))) + any(p.propagates_error() for p in session.steps)
    states = min(forwards, 2) * tokens * width * session.adapter.dtype.itemsize
    return _PROCESS_MIB + (2.5 * session.layer_bytes + states) / 2**20


def _refuse_small_disk(save_path: Path, needed_bytes: int) -> None:
    place = next(parent for parent in save_path.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise EnvError(
            f"{place}: {free / 1e9:.1f} GB are free and the result takes {needed_bytes / 1e9:.1f} GB",
            "free some space or choose another --save_path",
        )


def _verify(saver: BaseSaver, source: Path, record: RunRecord) -> None:
    searched = [name for name, entry in record.modules.items() if entry.get("method", "minmax") != "minmax"]
    signed = [name for name, entry in record.modules.items() if "negative_scales" in entry]
    findings = verify_directory(saver.directory, source, record.rewritten, searched, signed)
    if findings:
        lines = "\n".join(f"  {finding}" for finding in findings)
        raise ModelslimError(f"the written files break rules of their format:\n{lines}", "report this as a defect")


@contextmanager
def _timed(session: Session, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    session.facts.seconds[phase] = time.perf_counter() - start


@contextmanager
def own_threads(threads: int | None) -> Iterator[None]:
    """This process's thread count for the run, where one is asked for; put back afterwards."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
