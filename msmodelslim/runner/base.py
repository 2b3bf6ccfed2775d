"""The schedule that all runners share: every step of the recipe on every layer, in order.

Layers come from the adapter one after the other. Steps that leave alone what the next one observes share one forward,
and so do steps that only rescale it with those that can make up for that.
The inputs of the next layer are the outputs of the layer's last forward, so an earlier step's error propagates while
the rounding of the last observing step does not, unless a step asks for it: then the finished layer is forwarded once
more. A sample is always forwarded alone: results do not depend on who else is in the batch, and thus not on the number
of ranks.
"""

import copy
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim import device as devices
from msmodelslim.distributed import watchdog
from msmodelslim.errors import BadSampleError, EnvError, InvalidModelError, UnsupportedError
from msmodelslim.ir.quant_linear import held_weights
from msmodelslim.model.base import ProcessRequest
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.runner.progress import LayerProgress
from msmodelslim.runner.spare import SpareFlow

log = logging.getLogger(__name__)

_CPU_MEMORY = "can't allocate memory"  # in the message of torch's allocator, which has no error class of its own

Flow = Generator[ProcessRequest, Any, None]
#: told (layer, step, phase, "before" or "after") around every hook of every step, for checks of how steps behave
witnesses: list[Callable[[str, BaseSessionProcessor, str, str], None]] = []


class BaseRunner(ABC):
    """Drives processors over the layers of one model.

    Args:
        context: the model family, the device, the record.
        processors: steps in recipe order, savers last.
        samples: keyword arguments of the model, one dict a calibration sample of this rank.
        sample_ids: global index of each of them.
        sample_count: samples of all ranks together; as many as `samples` when left out.
        shown: False on ranks that do not speak for the job.
        rounds: most samples that any rank has; as many as `samples` when left out.
        spare: global sample 0 where some rank has no sample, for steps with `syncs_in_forward`.
        title: what the progress says is being done.
        holders: the rank that forwards each sample, by global number; none in a run of one rank.
        propagates: False where the last step says what the next layer gets, whatever a step asks for.
    """

    def __init__(
        self,
        context: RunContext,
        processors: Sequence[BaseSessionProcessor],
        samples: Sequence[dict[str, Any]] = (),
        sample_ids: Sequence[int] = (),
        sample_count: int | None = None,
        shown: bool = True,
        rounds: int | None = None,
        spare: dict[str, Any] | None = None,
        title: str = "quantize",
        propagates: bool = True,
        holders: Sequence[int] = (),
    ) -> None:
        self._context = context
        self._holders = holders
        self._processors = list(processors)
        self._samples = list(samples)
        self._sample_ids = list(sample_ids)
        self._sample_count = len(self._samples) if sample_count is None else sample_count
        self._shown = shown
        self._title = title
        self._propagates = propagates
        self._entry: dict[str, Any] = {}
        self._rounds = len(self._samples) if rounds is None else rounds
        self._spare: SpareFlow | None = None
        if spare is not None and any(p.syncs_in_forward() for p in self._processors):
            self._spare = SpareFlow(context, spare, used=not self._samples)

    @abstractmethod
    def _before_layers(self, model: nn.Module) -> None:
        """Prepare the model before the first layer."""

    @abstractmethod
    def _after_layer(self, request: BatchProcessRequest) -> None:
        """A layer is finished."""

    def rehearse(self) -> None:
        """Every step's change of structure, on meta tensors: what cannot work is refused before a weight is read."""
        self._refuse_idle_propagation()
        model = self._context.model
        for name in self._context.adapter.layer_names:
            request = BatchProcessRequest(name, model.get_submodule(name))
            for processor in self._processors:
                with _place(name, processor, "rehearse"):
                    processor.rehearse(request)

    def _refuse_idle_propagation(self) -> None:
        """Raise where rounding errors shall reach the calibration of later layers and nothing is calibrated."""
        asking = list(dict.fromkeys(p.registered_name for p in self._processors if p.propagates_error()))
        if asking and not needs_forward(self._processors):
            raise UnsupportedError(
                f"propagate_error of {', '.join(asking)} has no effect: no step of this recipe uses calibration data",
                "take it away, or choose a step or method that calibrates, such as weight.method gptq",
            )

    def run(self) -> None:
        """All layers, then `post_run` of every step; on failure `abort` of every step, and the error goes on."""
        try:
            with torch.no_grad(), _memory_told(self._samples):
                self._run()
        except BaseException as error:
            for processor in self._processors:
                processor.abort()
            if isinstance(error, BadSampleError) and self._holders:
                error.rank = self._holders[error.sample]
            raise

    def _run(self) -> None:
        model, adapter, device = self._context.model, self._context.adapter, self._context.device
        adapter.enable_kv_cache(model, any(p.need_kv_cache() for p in self._processors))
        for processor in self._processors:
            with _place("the whole model", processor, "pre_run"):
                processor.pre_run()
        self._before_layers(model)
        segments = share_forwards(self._processors)
        needs_data = any(needs_forward(segment) for segment in segments)
        flows: list[Flow] = []
        if needs_data:
            flows = [adapter.generate_model_forward(model, sample, device) for sample in self._samples]
            if self._spare is not None:
                self._spare.start(model)
        outputs: list[Any] | None = None
        visit = adapter.generate_model_visit(model, device)
        try:
            with LayerProgress(self._title, len(adapter.layer_names), self._shown) as progress:
                for name in adapter.layer_names:
                    self._entry = {"name": name, "seconds": {}, "memory_mib": {}, "forwards": 0}
                    before = watchdog.traffic()
                    with self._phase(progress, name, "load"):
                        target = next(visit)
                    with self._phase(progress, name, "inputs"):
                        request = self._gather(target, flows if needs_data else None, outputs)
                    outputs = None
                    self._layer(request, segments, progress)
                    outputs = request.outputs
                    with self._phase(progress, name, "free"):
                        self._after_layer(request)
                    self._entry["collectives"] = asdict(watchdog.traffic().since(before))
                    self._context.record.layers.append(self._entry)
                    progress.layer_done()
                for processor in self._processors:
                    progress.phase("the whole model", f"{processor.registered_name}, post_run")
                    with _place("the whole model", processor, "post_run"):
                        processor.post_run()
        finally:
            visit.close()
            for flow in flows:
                flow.close()
            if self._spare is not None:
                self._spare.close()

    def _gather(
        self, target: ProcessRequest, flows: list[Flow] | None, outputs: list[Any] | None
    ) -> BatchProcessRequest:
        """The layer with every sample's arguments: each flow moves on to it, fed with the layer before's output."""
        if flows is None:
            return BatchProcessRequest(target.name, target.module)
        if self._spare is not None and outputs is not None:
            self._spare.go_on(outputs)
        datas = []
        for index, flow in enumerate(flows):
            if outputs is None:
                step = next(flow)
            else:
                step = flow.send(outputs[index])
                outputs[index] = None  # the flow holds it now
            if step.name != target.name:
                raise InvalidModelError(
                    f"sample {self._sample_ids[index]} is at {step.name} while the run is at {target.name}",
                    "make generate_model_forward yield the same layers in the same order as generate_model_visit",
                )
            datas.append((step.args, step.kwargs))
        return BatchProcessRequest(
            target.name, target.module, datas, sample_ids=self._sample_ids, sample_count=self._sample_count
        )

    def _layer(
        self, request: BatchProcessRequest, segments: list[list[BaseSessionProcessor]], progress: LayerProgress
    ) -> None:
        saved = [p for p in self._processors if p.kind == "saver"]
        last = next((segment for segment in reversed(segments) if needs_forward(segment)), None)
        asking = next((p for p in self._processors if p.propagates_error()), None)
        if request.datas is None or request.name == self._context.adapter.layer_names[-1] or not self._propagates:
            asking = None  # nothing is calibrated after it, or not on what it makes
        for segment in segments:
            request.input_factors = None
            for processor in segment:
                step = processor.registered_name
                with self._phase(progress, request.name, step), _place(request.name, processor, "preprocess"):
                    processor.preprocess(request)
            if needs_forward(segment) and request.datas is not None:
                with self._phase(progress, request.name, "forward"), _place(request.name, segment[-1], "forward"):
                    request.last_forward = segment is last and asking is None
                    request.on_sample = lambda done, total: _goes_on(progress, done, total)
                    self._forward(request, segment)
                self._entry["forwards"] += 1
            if segment[-1] in saved:
                self._finish(request, asking, progress)
            for processor in segment:
                step = processor.registered_name
                with self._phase(progress, request.name, step), _place(request.name, processor, "postprocess"):
                    processor.postprocess(request)
        if not saved:
            self._finish(request, asking, progress)

    def _forward(self, request: BatchProcessRequest, segment: list[BaseSessionProcessor]) -> None:
        """Every sample of this rank; where a step communicates meanwhile, as many calls as on any other rank."""
        own, ids = request.datas, request.sample_ids
        assert own is not None, "a run that needs data has some"
        lacking = self._rounds - len(own) if any(p.syncs_in_forward() for p in segment) else 0
        if lacking > 0:
            last, sample_id = (own[-1], ids[-1]) if own else self._spare_call()
            # Copied before anything is called: a layer may write into its arguments, as into a key-value cache.
            request.datas = own + [copy.deepcopy(last) for _ in range(lacking)]
            request.sample_ids = [*ids, *[sample_id] * lacking]
        segment[-1].process(request)
        request.datas, request.sample_ids = own, ids
        request.outputs = None if request.outputs is None else request.outputs[: len(own)]

    def _spare_call(self) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], int]:
        """Arguments of global sample 0, and its number."""
        assert self._spare is not None, "there is a spare sample where a rank has none"
        return self._spare.call, 0

    def _finish(
        self, request: BatchProcessRequest, asking: BaseSessionProcessor | None, progress: LayerProgress
    ) -> None:
        """All steps but the saver are done: forward the samples once more for the step that asks for it, and measure.

        What rounding did is told of the weights, and of the output for global sample 0 where this rank holds it.
        """
        expected = _of_sample_0(request, request.outputs)
        if asking is not None:
            with self._phase(progress, request.name, "propagate"), _place(request.name, asking, "propagate"):
                request.last_forward = True
                request.outputs = None  # before it is filled anew, so that both are not held at a time
                with held_weights(request.module):
                    request.forward()
            self._entry["forwards"] += 1
        errors = [
            record["weight_error"] ** 2
            for name, record in self._context.record.modules.items()
            if name.startswith(request.name + ".")
        ]
        if not errors:
            return
        self._entry["weight_error"] = (sum(errors) / len(errors)) ** 0.5
        if expected is not None:
            with self._phase(progress, request.name, "measure"):
                found = _of_sample_0(request, request.outputs) if asking else self._forward_sample_0(request)
                self._entry["output_error"] = relative_error(found, expected)

    def _forward_sample_0(self, request: BatchProcessRequest) -> Any:
        args, kwargs = _of_sample_0(request, request.datas)
        with held_weights(request.module):
            return request.module(*args, **kwargs)

    @contextmanager
    def _phase(self, progress: LayerProgress, layer: str, phase: str) -> Iterator[None]:
        progress.phase(layer, phase)
        watchdog.note(layer, phase=phase)
        start = time.perf_counter()
        yield
        seconds = self._entry["seconds"]
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
        self._entry["memory_mib"][phase] = devices.peak_memory_mib(self._context.device.type)


def _of_sample_0(request: BatchProcessRequest, values: Sequence[Any] | None) -> Any:
    """Of `values`, one a sample of this rank, that of global sample 0; None where this rank does not hold it."""
    return values[list(request.sample_ids).index(0)] if values and 0 in request.sample_ids else None


def _goes_on(progress: LayerProgress, done: int, total: int) -> None:
    watchdog.beat()
    progress.sample(done, total)


def needs_forward(segment: Sequence[BaseSessionProcessor]) -> bool:
    """True when some step of the segment needs calibration data."""
    return any(not processor.is_data_free() for processor in segment)


def share_forwards(processors: Sequence[BaseSessionProcessor]) -> list[list[BaseSessionProcessor]]:
    """Consecutive steps that may use one forward together; each other step stands alone. Order is kept."""
    segments: list[list[BaseSessionProcessor]] = []
    for processor in processors:
        if segments and _may_join(processor, segments[-1]):
            segments[-1].append(processor)
        else:
            segments.append([processor])
    return segments


def _may_join(processor: BaseSessionProcessor, segment: Sequence[BaseSessionProcessor]) -> bool:
    """Whether a step may use the forward of the steps before it."""
    if segment[-1].syncs_in_forward() != processor.syncs_in_forward():
        return False
    rescaled = [p for p in segment if p.rescales_inputs()]
    if not all(p.shares_forward() or p in rescaled for p in segment):
        return False
    if rescaled and not (processor.follows_rescaling() or processor.is_data_free()):
        return False
    # A step that rescales after one that rounds shall see what rounding did, so it joins other such steps only.
    return processor.shares_forward() or (processor.rescales_inputs() and len(rescaled) == len(segment))


def relative_error(found: Any, expected: Any) -> float:
    """‖found − expected‖ / ‖expected‖ of a layer's output (element 0 of a tuple), summed in float64."""
    found_, expected_ = (x[0] if isinstance(x, tuple) else x for x in (found, expected))
    lost = _norm(found_.float() - expected_.float())
    total = _norm(expected_.float())
    return lost / total if total else lost


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


@contextmanager
def _memory_told(samples: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Too little memory is a user's error that says how long the longest sample is: length is what costs most."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _CPU_MEMORY not in str(error):
            raise
        longest = max((sample["input_ids"].shape[-1] for sample in samples), default=0)
        told = EnvError(
            f"out of memory with samples of up to {longest} tokens: {str(error).splitlines()[0].rstrip('.')}",
            "lower max_length in the recipe, or take a larger device",
        )
        for note in vars(error).get("__notes__", ()):
            told.add_note(note)
        raise told from error


@contextmanager
def _place(layer: str, processor: BaseSessionProcessor, phase: str) -> Iterator[None]:
    """An error from here on says where it happened, and so does the watch over the ranks."""
    watchdog.note(layer, processor.registered_name, phase)
    try:
        for witness in witnesses:
            witness(layer, processor, phase, "before")
        yield
        for witness in witnesses:
            witness(layer, processor, phase, "after")
    except BaseException as error:
        error.add_note(f"at {layer}, {processor.registered_name}, {phase}")
        raise
