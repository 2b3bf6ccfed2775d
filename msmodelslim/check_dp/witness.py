"""The eye on one rank while it is checked: every collective with the line that asked for it, topology, state, errors.

It stands around the functions that processors call, in this process only: torch's collectives, those of
`msmodelslim.distributed`, and the queries of `DistHelper`. It sends nothing, so it changes neither the sequence of
collectives nor the result. What ranks have to know of each other they read in each other's files.
"""

import functools
import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import msmodelslim
from msmodelslim import distributed
from msmodelslim.check_dp.events import Event, EventWriter, read_note
from msmodelslim.check_dp.state import attribute_digests, digest, module_digests
from msmodelslim.distributed import DistHelper, StaleTopologyError, StatStore, watchdog
from msmodelslim.distributed.failure import failure_of
from msmodelslim.processor.base import BaseSessionProcessor

#: collective → arguments in which all ranks must agree, and which its description therefore holds
TORCH_CALLS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("tensor", "op"),
    "all_gather": ("tensor",),
    "all_gather_into_tensor": ("input_tensor",),
    "all_gather_object": (),
    "all_to_all": (),
    "all_to_all_single": ("input",),
    "barrier": (),
    "broadcast": ("tensor", "src"),
    "broadcast_object_list": ("src",),
    "gather": ("tensor", "dst"),
    "gather_object": ("dst",),
    "monitored_barrier": (),
    "reduce": ("tensor", "dst", "op"),
    "reduce_scatter": ("op",),
    "reduce_scatter_tensor": ("input", "op"),
    "scatter": ("tensor", "src"),
    "scatter_object_list": ("src",),
}
OUR_CALLS: dict[str, tuple[str, ...]] = {
    "sync_base_operation": ("op", "tensor", "name"),
    "sync_gather_tensors": ("name",),
    "sync_gather_tensor_lists": ("name",),
    "run_tasks": (),
}
_FRAMES = 16  # looked through for the module that asked for a collective
_PEER_S = 5.0  # waited for the other ranks' topology
_LOOK_S = 0.2
_HANG_EXIT = 70
_OURS = (str(Path(distributed.__file__).parent), str(Path(__file__).parent))
_TORCH = str(Path(dist.__file__).parents[1])


class LocalSyncError(RuntimeError):
    """A module that some rank does not hold asked all ranks to communicate."""


class Witness:
    """Notes what this rank does; made once in its process, and never taken away.

    Args:
        folder: where the ranks keep their notes.
        rank, world_size: this rank among all.
        hang_after_s: ranks that wait in different collectives for so long will wait forever.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, hang_after_s: float) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._hang_after_s = hang_after_s
        self._writer = EventWriter(folder, rank)
        self._samples = 0
        self._depth = 0
        self._calls = 0
        self._topologies = 0
        self._modules: dict[str, nn.Module] = {}  # of the current layer, by full name; held, so that ids stay theirs
        self._names: dict[int, str] = {}  # id of each of them → its name
        self._shared: frozenset[str] | None = None  # names that every rank holds, once looked up
        self._asked: dict[str, bool] = {}
        self._helpers: list[tuple[DistHelper, str]] = []

    def install(self) -> None:
        """From now on everything is noted."""
        wrappers: dict[Any, Callable[..., Any]] = {}
        for home, calls in ((dist, TORCH_CALLS), (distributed, OUR_CALLS)):
            for name, agreed in calls.items():
                wrappers[vars(home)[name]] = self._wrapped(vars(home)[name], name, agreed)
        _replace_everywhere(wrappers)
        for cls, method, word in ((StatStore, "agree", "StatStore.agree"), (DistHelper, "__init__", "DistHelper")):
            setattr(cls, method, self._wrapped(vars(cls)[method], word, ()))
        setattr(DistHelper, "__init__", self._noting_helper(DistHelper.__init__))  # noqa: B010 - mypy knows no such assignment
        setattr(DistHelper, "is_shared", self._noting_answer(DistHelper.is_shared))  # noqa: B010
        setattr(DistHelper, "require_shared", self._noting_refusal(DistHelper.require_shared))  # noqa: B010
        setattr(StatStore, "agree", self._noting_streams(StatStore.agree))  # noqa: B010
        if self._world_size > 1:
            threading.Thread(target=self._watch_others, name="check-dp", daemon=True).start()

    def begin(self, samples: int) -> None:
        """A run on so many samples begins."""
        self._samples = samples

    def end(self) -> None:
        """The run has ended well."""
        self._add("end")

    def error(self, error: BaseException) -> None:
        """The run has ended with an error."""
        found = failure_of(error, self._rank, watchdog.place())
        self._add(
            "error",
            site=_raised_at(error) or found.raised_at,
            what=f"{found.kind}: {found.message}" + (f"; {found.action}" if found.action else ""),
            facts={"kind": found.kind, "echo": found.lost_peer},
        )

    def see(self, layer: str, step: BaseSessionProcessor, phase: str, when: str) -> None:
        """Told of every hook of every step, see `msmodelslim.runner.base.witnesses`."""
        if layer not in step.context.adapter.layer_names:
            return
        module = step.context.model.get_submodule(layer)
        if (phase, when) == ("preprocess", "before"):
            self._helpers.clear()
        elif (phase, when) == ("preprocess", "after"):
            self._note_topology(layer, module)
        elif (phase, when) == ("postprocess", "before"):
            self._note_state(layer, step, module, when, {})
        elif (phase, when) == ("postprocess", "after"):
            self._note_state(layer, step, module, when, module_digests(module, layer))

    def _note_state(
        self, layer: str, step: BaseSessionProcessor, module: nn.Module, when: str, tensors: dict[str, str]
    ) -> None:
        attributes = attribute_digests(step, module, layer)
        facts = {"attributes": attributes, "tensors": tensors, "syncs": step.syncs_in_forward()}
        self._add("state", what=when, facts=facts)

    def _note_topology(self, layer: str, module: nn.Module) -> None:
        self._modules = names = dict(module.named_modules(prefix=layer))
        self._names = {id(one): name for name, one in names.items()}
        self._shared = None
        self._asked.clear()
        self._topologies += 1
        path = self._topology_file(self._topologies, self._rank)
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(sorted(names)))
        aside.rename(path)
        self._add("topology", facts={"names": sorted(names)})
        for helper, site in self._helpers:
            try:
                list(helper.local_modules())
            except StaleTopologyError as error:
                self._add("stale", site=site, what=str(error))

    def _wrapped(self, function: Callable[..., Any], name: str, agreed: tuple[str, ...]) -> Callable[..., Any]:
        """`function`, noted when it is called from outside other collectives."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = bound.arguments
            group = values.get("group")
            whole = group is None or dist.get_world_size(group) == self._world_size
            words = [word for key in agreed if (word := _word(values[key]))]
            self._enter(f"{name}({', '.join(words)})", whole)
            self._depth += 1
            try:
                with watchdog.waiting(f"{name} at {_site()}"):
                    return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self._writer.note(self._calls, "", time.monotonic())

        return call

    def _enter(self, call: str, whole: bool) -> None:
        module, words = self._asking()
        self._calls += 1
        site = _site()
        facts = {"number": self._calls, "whole": whole, "module": module, "words": words}
        self._add("call", site=site, what=call, facts=facts)
        if whole and module and not self._is_shared(module):
            self._add("local_sync", site=site, what=call, facts={"module": module})
            raise LocalSyncError(f"{module} is not on every rank and asks for {call} at {site}")
        self._writer.note(self._calls, f"{call} at {site}", time.monotonic())

    def _asking(self) -> tuple[str, list[str]]:
        """The innermost module of the layer whose method asks, and module names among the variables of the line."""
        words: list[str] = []
        names = self._modules.keys()
        for depth, frame in enumerate(_frames_outside()):
            if not depth:
                words = [value for value in frame.f_locals.values() if isinstance(value, str) and value in names]
            found = self._names.get(id(frame.f_locals.get("self")))
            if found is not None:
                return found, words
            if depth == _FRAMES:
                break
        return "", words

    def _is_shared(self, module: str) -> bool:
        """Whether every rank holds the module, as far as the others tell in time."""
        if self._shared is None:
            tables = [self._peer_names(self._topologies, rank) for rank in range(self._world_size)]
            if any(table is None for table in tables):
                return True
            self._shared = frozenset.intersection(*(frozenset(table or ()) for table in tables))
        return module in self._shared

    def _peer_names(self, number: int, rank: int) -> list[str] | None:
        path = self._topology_file(number, rank)
        deadline = time.monotonic() + _PEER_S
        while not path.exists():
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_S / 10)
        return json.loads(path.read_text())

    def _topology_file(self, number: int, rank: int) -> Path:
        return self._folder / f"topology_{number}_{rank}.json"

    def _noting_helper(self, function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def init(helper: DistHelper, *args: Any, **kwargs: Any) -> None:
            function(helper, *args, **kwargs)
            self._helpers.append((helper, _site()))
            self._add("helper", site=_site())

        return init

    def _noting_answer(self, function: Callable[[DistHelper, str], bool]) -> Callable[[DistHelper, str], bool]:
        @functools.wraps(function)
        def is_shared(helper: DistHelper, name: str) -> bool:
            answer = function(helper, name)
            if self._asked.get(name) is not answer:
                self._asked[name] = answer
                self._add("is_shared", site=_site(), what=name, facts={"answer": answer})
            return answer

        return is_shared

    def _noting_refusal(self, function: Callable[[DistHelper, str], None]) -> Callable[[DistHelper, str], None]:
        @functools.wraps(function)
        def require_shared(helper: DistHelper, name: str) -> None:
            try:
                function(helper, name)
            except ValueError:
                if helper.is_all(name):
                    self._add("local_sync", site=_site(), what="a collective", facts={"module": name})
                raise

        return require_shared

    def _noting_streams(self, function: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
        @functools.wraps(function)
        def agree(store: StatStore, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
            found = function(store, *args, **kwargs)
            elsewhere = [name for name, one in found.items() if one.is_elsewhere]
            streams = {
                name: "" if one.value is None else digest(one.value)
                for name, one in found.items()
                if not one.is_elsewhere
            }
            self._add("streams", site=_site(), facts={"streams": streams, "elsewhere": elsewhere})
            return found

        return agree

    def _watch_others(self) -> None:
        """End this process when all ranks wait, and not all for the same: nobody would ever answer."""
        while True:
            time.sleep(_LOOK_S)
            notes = [read_note(self._folder, rank) for rank in range(self._world_size)]
            now = time.monotonic()
            if any(one is None or not one["call"] or now - one["at_s"] < self._hang_after_s for one in notes):
                continue
            asked = [(one["number"], one["call"]) for one in notes if one is not None]
            if len(set(asked)) == 1:
                continue
            told = "; ".join(f"rank {rank} waits in {call}" for rank, (_, call) in enumerate(asked))
            self._add("hang", what=told)
            os._exit(_HANG_EXIT)

    def _add(self, kind: str, site: str = "", what: str = "", facts: dict[str, Any] | None = None) -> None:
        place = watchdog.place()
        event = Event(kind, self._samples, place.layer, place.processor, place.phase, site, what)
        self._writer.add(replace(event, facts=facts or {}))


def _word(value: Any) -> str:
    """An argument in a description of a call; "" for one that says nothing."""
    if value is None:
        return ""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value).removeprefix("RedOpType.").lower() if isinstance(value, dist.ReduceOp.RedOpType) else str(value)


def _frames_outside() -> Iterator[FrameType]:
    """Frames from the line that asked for a collective outwards: outside torch, the checks and `distributed`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_outside(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _site() -> str:
    """ "file.py:12" of the line that asked."""
    frame = next(_frames_outside(), None)
    return "" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _raised_at(error: BaseException) -> str:
    """ "file.py:12" of the innermost line outside torch, the checks and `distributed`; "" when there is none."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if _is_outside(one.filename)]
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _is_outside(file: str) -> bool:
    return not file.startswith(_OURS) and not file.startswith(_TORCH)


def _short(file: str) -> str:
    root = str(Path(msmodelslim.__file__).parents[1])
    return str(Path(file).relative_to(root)) if file.startswith(root + os.sep) else Path(file).name


def _replace_everywhere(wrappers: Mapping[Any, Callable[..., Any]]) -> None:
    """Put a function's wrapper wherever a loaded module has the function, under whatever name."""
    for module in [one for one in sys.modules.values() if isinstance(one, ModuleType)]:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in wrappers:
                setattr(module, name, wrappers[value])
