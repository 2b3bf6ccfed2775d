"""Weights of a layer to codes: dear methods are dealt out over the ranks, and every rank gets all results.

A task is one linear; linears with the same input are a unit, which goes to one rank, and that rank alone receives their
Gram matrix. Which rank does which follows from names and costs, results travel as tensors, and a task's inputs are the
bits that a run on one rank would have, so the codes are too.

A dense layer has four units (q, k and v; o; gate and up; down), so the fifth rank and those after it round nothing.
Cutting a unit into rows, which do not depend on each other, would balance better there, for a matrix sent to each rank.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msmodelslim.distributed.task_scheduler import assign, run_tasks
from msmodelslim.ir.quantize import WeightCodes, weight_error
from msmodelslim.ir.scheme import QScheme
from msmodelslim.weight.base import Gram, WeightMethod

_PARTS = ("codes_OI", "scale", "offset", "scale_second", "offset_second")
_RECORD = "record"


def deal_linears(
    method: WeightMethod, shapes: Mapping[str, torch.Size], units: Sequence[Sequence[str]], world_size: int
) -> dict[str, int]:
    """Linear → the rank that rounds it; empty for a method that every rank carries out by itself.

    Args:
        method: how scales and codes are chosen.
        shapes: linear that all ranks hold → shape of its weight, (O, I).
        units: linears that one rank rounds together, as they share an input.
        world_size: number of ranks.
    """
    if method.registered_name == "minmax":
        return {}  # plain rounding takes less time than sending its result would
    return assign({name: method.cost(*shape) for name, shape in shapes.items()}, world_size, units)


def round_weights(
    method: WeightMethod,
    weights: Mapping[str, Tensor],
    scheme: QScheme,
    grams: Mapping[str, Gram | None],
    scale_dtype: torch.dtype,
    owners: Mapping[str, int],
    device: torch.device,
) -> dict[str, tuple[WeightCodes, dict[str, Any]]]:
    """Linear → its codes and what the method has to say about them, with "weight_error" and "negative_scales", if
    any, on every rank.

    Args:
        method: how scales and codes are chosen.
        weights: linear → weight, [O, I].
        scheme: of all of them.
        grams: linear → what is known of its inputs, None when no token reached it; for a method that needs it, of all
            linears that this rank rounds.
        scale_dtype: type that scales are stored in.
        owners: linear → the rank that rounds it, see `deal_linears`; others are rounded on every rank that has them.
        device: where the codes are put.
    """

    def task(name: str) -> Callable[[], dict[str, Tensor]]:
        def work() -> dict[str, Tensor]:
            # An owner lacks no Gram: a missing one must not pass for a linear that no token reached.
            gram = grams[name] if method.needs_gram else None
            found = method.quantize(weights[name], scheme, scale_dtype=scale_dtype, name=name, gram=gram)
            record = found.record | {"weight_error": weight_error(weights[name], found.codes, scheme)}
            below_zero = int((found.codes.scale < 0).sum())
            return _packed(found.codes, record | ({"negative_scales": below_zero} if below_zero else {}))

        return work

    tasks = {name: task(name) for name in weights}
    done = {name: tasks[name]() for name in weights if name not in owners}
    if owners:
        done |= run_tasks({name: tasks[name] for name in owners}, device=device, owners=owners)
    return {name: _unpacked(done[name]) for name in weights}


def _packed(codes: WeightCodes, record: dict[str, Any]) -> dict[str, Tensor]:
    parts = {part: value for part in _PARTS if (value := vars(codes)[part]) is not None}
    text = bytearray(json.dumps(record).encode())
    return parts | {_RECORD: torch.frombuffer(text, dtype=torch.uint8)}


def _unpacked(parts: Mapping[str, Tensor]) -> tuple[WeightCodes, dict[str, Any]]:
    record = json.loads(bytes(parts[_RECORD].cpu().numpy()))
    return WeightCodes(**{part: parts.get(part) for part in _PARTS}), record  # type: ignore[arg-type] # codes are there
