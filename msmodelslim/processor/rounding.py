"""Weights of a layer to codes: dear methods are dealt out over the ranks, and every rank gets all results.

A task is one linear. Which rank does which follows from names and costs, results travel as tensors, and a task's inputs
are the same bits on every rank, so the codes are those of one rank.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from msmodelslim.distributed.task_scheduler import run_tasks
from msmodelslim.ir.quantize import WeightCodes, weight_error
from msmodelslim.ir.scheme import QScheme
from msmodelslim.weight.base import Gram, WeightMethod

_PARTS = ("codes_OI", "scale", "offset", "scale_second", "offset_second")
_RECORD = "record"


def round_weights(
    method: WeightMethod,
    weights: Mapping[str, Tensor],
    scheme: QScheme,
    grams: Mapping[str, Gram | None],
    scale_dtype: torch.dtype,
    is_shared: Callable[[str], bool],
    device: torch.device,
) -> dict[str, tuple[WeightCodes, dict[str, Any]]]:
    """Linear → its codes and what the method has to say about them ("weight_error" included), on every rank.

    Args:
        method: how scales and codes are chosen.
        weights: linear → weight, [O, I].
        scheme: of all of them.
        grams: linear → what is known of its inputs.
        scale_dtype: type that scales are stored in.
        is_shared: whether all ranks hold this linear; the others are rounded where they are.
        device: where the codes are put.
    """

    def task(name: str) -> Callable[[], dict[str, Tensor]]:
        def work() -> dict[str, Tensor]:
            found = method.quantize(weights[name], scheme, scale_dtype=scale_dtype, name=name, gram=grams.get(name))
            record = found.record | {"weight_error": weight_error(weights[name], found.codes, scheme)}
            return _packed(found.codes, record)

        return work

    tasks = {name: task(name) for name in weights}
    # Plain rounding takes less time than sending its result would.
    split = {name for name in weights if is_shared(name) and method.registered_name != "minmax"}
    done = {name: tasks[name]() for name in weights if name not in split}
    if split:
        costs = {name: method.cost(*weights[name].shape) for name in split}
        done |= run_tasks({name: tasks[name] for name in split}, costs, device=device)
    return {name: _unpacked(done[name]) for name in weights}


def _packed(codes: WeightCodes, record: dict[str, Any]) -> dict[str, Tensor]:
    parts = {part: value for part in _PARTS if (value := vars(codes)[part]) is not None}
    text = bytearray(json.dumps(record).encode())
    return parts | {_RECORD: torch.frombuffer(text, dtype=torch.uint8)}


def _unpacked(parts: Mapping[str, Tensor]) -> tuple[WeightCodes, dict[str, Any]]:
    record = json.loads(bytes(parts[_RECORD].cpu().numpy()))
    return WeightCodes(**{part: parts.get(part) for part in _PARTS}), record  # type: ignore[arg-type] # codes are there
