"""Collectives that a processor's author calls: reduce one tensor, gather one tensor or a list of them, over all ranks.

Facts are agreed on first (call, name, op, shape, dtype), so a disagreement raises the same error on every rank before
any data moves. Then the data travels as bytes or in a wider type that holds every value exactly, so that empty,
0-dim, uneven, bool, integer, bfloat16 and float8 tensors work on every backend. No tensor is pickled. Without a
process group, and in a group of one rank, every function answers for that one rank.

A float sum depends on how many ranks share it. Where the same bytes are wanted on any number of ranks, use `StatStore`.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed import watchdog, wire
from msmodelslim.errors import UnsupportedError

if TYPE_CHECKING:
    from msmodelslim.distributed.dist_helper import DistHelper


class ReduceOperation(StrEnum):
    """How `sync_base_operation` combines ranks."""

    MIN = "min"
    MAX = "max"
    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"


_REDUCE = {
    ReduceOperation.MIN: dist.ReduceOp.MIN,
    ReduceOperation.MAX: dist.ReduceOp.MAX,
    ReduceOperation.SUM: dist.ReduceOp.SUM,
    ReduceOperation.MEAN: dist.ReduceOp.SUM,  # hccl has no mean, so sum and divide
    ReduceOperation.PROD: dist.ReduceOp.PRODUCT,
}
_EXTREMA = (ReduceOperation.MIN, ReduceOperation.MAX)
#: bits of a float read as an integer of the same width, for `to_ordered`
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_NO_SUM = "count with an integer tensor, or use min (all) or max (any)"


def sync_base_operation(
    tensor: Tensor,
    op: str | ReduceOperation,
    group: dist.ProcessGroup | None = None,
    *,
    name: str = "",
    helper: "DistHelper | None" = None,
) -> Tensor:
    """Combine equally shaped tensors of all ranks and write the result into `tensor`, the same on every rank.

    Extrema are exact and do not depend on order: NaN wins over every number, -0.0 is below 0.0. Integers are summed in
    int64. Floats narrower than float32 are combined in float32 and rounded once. For bool, min is "all", max is "any".

    Args:
        tensor: any shape and layout, on any device; updated in place.
        op: min, max, sum, mean or prod, in any case.
        group: the ranks that take part; all by default.
        name: of the module or statistic, for messages; must agree over the ranks.
        helper: with it, `name` must be a module that every rank holds.

    Returns:
        `tensor` itself.

    Raises:
        UnsupportedError: unknown op, mean of integers, sum of bools, complex, uint64 or overlapping memory, on any
            rank.
        RankMismatchError: op, name, shape or dtype differ, or ranks are in different calls.
        OverflowError: an integer sum or product does not fit the tensor's type; the tensor keeps its values.
        ValueError: `name` is not shared, no process group for `group`, or this rank is not in it.
    """
    call = "sync_base_operation"
    if helper is not None:
        helper.require_shared(name)
    where = wire.members(group, call)
    word = str(op).lower()
    problem = _reduce_problem(tensor, word)
    if where is None:
        if problem:
            raise UnsupportedError(f"{call} (at {wire.call_site()}): {problem}")
        return tensor
    with watchdog.waiting(f"{call}({name or word}) at {wire.call_site()}"):
        facts = {"op": word, "name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        found = wire.exchange(where, call, facts, problem=problem)
        for key in ("name", "op", "dtype", "shape"):
            wire.agree_on(where, call, key, [one[key] for one in found], name="" if key == "name" else name)
        if tensor.numel():
            _reduce(tensor, ReduceOperation(word), where)
    return tensor


def sync_gather_tensors(
    tensor: Tensor,
    variable_shapes: bool = False,
    on_cpu: bool = False,
    group: dist.ProcessGroup | None = None,
    *,
    name: str = "",
    helper: "DistHelper | None" = None,
) -> list[Tensor]:
    """Every rank's tensor, in rank order.

    Args:
        tensor: any shape, also empty or 0-dim; the dtype must agree.
        variable_shapes: shapes may differ, in number of dimensions too; otherwise they must agree.
        on_cpu: put the result into host memory rather than on the device of `tensor`.
        group, name, helper: as in `sync_base_operation`.

    Returns:
        As many new tensors as ranks, each with its own rank's shape.

    Raises:
        RankMismatchError: dtypes differ, or shapes although `variable_shapes` is off, or ranks are in different calls.
        UnsupportedError: a tensor is sparse or quantized.
        ValueError: as in `sync_base_operation`.
    """
    call = "sync_gather_tensors"
    if helper is not None:
        helper.require_shared(name)
    where = wire.members(group, call)
    problem = _dense_problem([tensor])
    facts = {"name": name, "variable_shapes": variable_shapes, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    with watchdog.waiting(f"{call}({name}) at {wire.call_site()}"):
        found = _exchange(where, call, facts, problem)
        if where is not None:
            for key in ("name", "variable_shapes", "dtype"):
                wire.agree_on(where, call, key, [one[key] for one in found], name="" if key == "name" else name)
            if not variable_shapes:
                shapes = [one["shape"] for one in found]
                wire.agree_on(where, call, "shape (variable_shapes=True allows it)", shapes, name=name)
        rows = [[(tensor.dtype, one["shape"])] for one in found]
        return [row[0] for row in _gather(where, [tensor], rows, torch.device("cpu") if on_cpu else tensor.device)]


def sync_gather_tensor_lists(
    tensor_list: Sequence[Tensor],
    on_cpu: bool = False,
    group: dist.ProcessGroup | None = None,
    *,
    order: Sequence[int] | None = None,
    name: str = "",
    helper: "DistHelper | None" = None,
) -> list[Tensor]:
    """The tensors of all ranks in one list: rank after rank, or in the order of the global sample numbers.

    Args:
        tensor_list: any number of tensors, none included, of any shapes and dtypes.
        on_cpu: put the result into host memory rather than on the device of the first tensor.
        order: the global sample number of each tensor; then the result is what one device with all samples would hold.
            Several tensors of one sample keep their order. Give it on every rank or on none.
        group, name, helper: as in `sync_base_operation`.

    Raises:
        RankMismatchError: some ranks give `order` and some do not, two ranks hold the same sample, or calls differ.
        UnsupportedError: a tensor is sparse or quantized, or `order` has another length than the list.
        ValueError: as in `sync_base_operation`.
    """
    call = "sync_gather_tensor_lists"
    if helper is not None:
        helper.require_shared(name)
    where = wire.members(group, call)
    problem = _dense_problem(tensor_list)
    if order is not None and len(order) != len(tensor_list):
        problem = f"order names {len(order)} samples for {len(tensor_list)} tensors; give one number a tensor"
    facts = {
        "name": name,
        "order": None if order is None else [int(one) for one in order],
        "tensors": [(str(one.dtype), list(one.shape)) for one in tensor_list],
    }
    with watchdog.waiting(f"{call}({name}) at {wire.call_site()}"):
        found = _exchange(where, call, facts, problem)
        if where is not None:
            wire.agree_on(where, call, "name", [one["name"] for one in found])
            given = ["given" if one["order"] is not None else "not given" for one in found]
            wire.agree_on(where, call, "order", given, name=name)
        order_of_all = _order_of_all(call, [one["order"] for one in found], (0,) if where is None else where.ranks)
        rows = [[(wire.dtype_named(dtype), shape) for dtype, shape in one["tensors"]] for one in found]
        home = torch.device("cpu") if where is None or on_cpu else where.device
        if tensor_list and not on_cpu:
            home = tensor_list[0].device
        flat = [tensor for row in _gather(where, tensor_list, rows, home) for tensor in row]
        return flat if order_of_all is None else [flat[at] for at in order_of_all]


def to_ordered(values: Tensor) -> Tensor:
    """float32 → int32 or float64 → int64, so that integers compare as the floats do: -inf < -0.0 < 0.0 < inf < NaN.

    An integer minimum or maximum is exact in any order, which a float one is not where NaN or signed zeros occur.
    """
    bits = values.contiguous().view(_BITS[values.dtype])
    info = torch.iinfo(bits.dtype)
    ordered = torch.where(bits < 0, bits ^ info.max, bits)
    return torch.where(values.isnan(), info.max, ordered)


def from_ordered(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_ordered`; the largest and the smallest integer are NaN."""
    info = torch.iinfo(ordered.dtype)
    values = torch.where(ordered < 0, ordered ^ info.max, ordered).view(dtype)
    return torch.where(values.isnan(), torch.nan, values)


def _reduce(tensor: Tensor, op: ReduceOperation, where: wire.Members) -> None:
    """All-reduce with a carrier type that every backend has; in place, and not before the whole result is known."""
    values = tensor.detach().to(where.device)
    if not tensor.is_floating_point():
        carrier = values.to(torch.int64)
    else:
        carrier = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32, copy=True)
    float_type = carrier.dtype
    if op in _EXTREMA and tensor.is_floating_point():
        carrier = to_ordered(carrier)
        if op is ReduceOperation.MIN:  # NaN wins over every number, so it must be the smallest here
            carrier = torch.where(values.isnan(), torch.iinfo(carrier.dtype).min, carrier)
    carrier = carrier.contiguous()
    watchdog.count_sent(carrier.nbytes)
    dist.all_reduce(carrier, _REDUCE[op], group=where.group)
    if op in _EXTREMA and tensor.is_floating_point():
        carrier = from_ordered(carrier, float_type)
    if op is ReduceOperation.MEAN:
        carrier = carrier / where.size
    if not tensor.is_floating_point() and tensor.dtype != torch.bool:
        info = torch.iinfo(tensor.dtype)
        low, high = int(carrier.min()), int(carrier.max())
        if low < info.min or high > info.max:
            raise OverflowError(
                f"{op} over {where.size} ranks reaches {low if low < info.min else high}, beyond {tensor.dtype}; "
                f"use a wider tensor"
            )
    with torch.no_grad():
        tensor.copy_(carrier)


def _reduce_problem(tensor: Tensor, word: str) -> str:
    """Why `tensor` cannot be reduced by `word`; "" when it can."""
    if word not in list(ReduceOperation):
        return f"op {word!r} is not one of {', '.join(ReduceOperation)}"
    if not_dense := _dense_problem([tensor]):
        return not_dense
    if tensor.is_complex() or tensor.dtype == torch.uint64:
        return f"{word} of {tensor.dtype} has no exact carrier; reduce real and imaginary part, or int64"
    if word == ReduceOperation.MEAN and not tensor.is_floating_point():
        return f"mean of {tensor.dtype} is not an integer; sum first and divide by the count, or reduce a float"
    if word == ReduceOperation.SUM and tensor.dtype == torch.bool:
        return f"sum of bools does not fit a bool; {_NO_SUM}"
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return (
            f"the tensor of shape {tuple(tensor.shape)} repeats its memory (expand), so it cannot be updated; clone it"
        )
    return ""


def _dense_problem(tensors: Sequence[Tensor]) -> str:
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "a meta tensor" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
            return f"{kind} has no plain memory to send; give a dense tensor"
    return ""


def _exchange(where: wire.Members | None, call: str, facts: dict[str, Any], problem: str) -> list[dict]:
    if where is not None:
        return wire.exchange(where, call, facts, problem=problem)
    if problem:
        raise UnsupportedError(f"{call} (at {wire.call_site()}): {problem}")
    return [facts]


def _gather(
    where: wire.Members | None,
    own: Sequence[Tensor],
    rows: list[list[tuple[torch.dtype, list[int]]]],
    device: torch.device,
) -> list[list[Tensor]]:
    """The tensors of every rank, whose dtypes and shapes are `rows`."""
    sizes = [[torch.Size(shape).numel() * dtype.itemsize for dtype, shape in row] for row in rows]
    flats = wire.gather_bytes(where, [wire.as_bytes(one) for one in own], sizes, device)
    return [
        [wire.from_bytes(flat, dtype, shape) for flat, (dtype, shape) in zip(flat_row, row, strict=True)]
        for flat_row, row in zip(flats, rows, strict=True)
    ]


def _order_of_all(call: str, orders: list[list[int] | None], ranks: Sequence[int]) -> list[int] | None:
    """Places in the rank-major list, sorted by sample; None when no order is asked for."""
    samples: list[int] = []
    holder: dict[int, int] = {}
    for rank, own in zip(ranks, orders, strict=True):
        if own is None:
            return None
        for sample in own:
            if holder.setdefault(sample, rank) != rank:
                raise wire.RankMismatchError(
                    f"{call}: sample {sample} is on ranks {holder[sample]} and {rank}; deal each sample once"
                )
        samples += own
    return sorted(range(len(samples)), key=samples.__getitem__)
