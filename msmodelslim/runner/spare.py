"""Sample 0 on a rank that has no sample of its own, for steps that communicate while samples flow.

The rank forwards it only where such a step asks for it. What the layer before made of it comes from rank 0, because no
other step of this rank may see the sample a second time.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.distributed import wire
from msmodelslim.model.base import ProcessRequest
from msmodelslim.processor.base import RunContext

_CALL = "spare sample"


class SpareFlow:
    """The arguments of each layer for sample 0; made on every rank, used on those without samples.

    Args:
        context: of the run.
        inputs: the model's arguments for sample 0.
        used: True on a rank without samples.
    """

    def __init__(self, context: RunContext, inputs: dict[str, Any], used: bool) -> None:
        self._context = context
        self._inputs = inputs
        self._used = used
        self._flow: Generator[ProcessRequest, Any, None] | None = None
        self._step: ProcessRequest | None = None

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the layer that was reached."""
        assert self._step is not None, "start comes first, on a rank that uses the sample"
        return self._step.args, self._step.kwargs

    def start(self, model: nn.Module) -> None:
        """To the first layer."""
        if self._used:
            self._flow = self._context.adapter.generate_model_forward(model, self._inputs, self._context.device)
            self._step = next(self._flow)

    def go_on(self, outputs: list[Any]) -> None:
        """To the next layer; every rank calls it with its own samples' outputs of the layer before."""
        output = from_rank_zero(None if self._used else outputs[0], self._context.device)
        if self._flow is not None:
            self._step = self._flow.send(output)

    def close(self) -> None:
        if self._flow is not None:
            self._flow.close()


def from_rank_zero(output: Any, device: torch.device) -> Any:
    """What rank 0 gives: a tensor, or a tuple whose other parts become None. Every rank calls it."""
    where = wire.members(None, _CALL)
    if where is None:
        return output
    own = output if isinstance(output, tuple) else (output,)
    facts = {
        "is_tuple": isinstance(output, tuple),
        "parts": [[str(one.dtype), list(one.shape)] if isinstance(one, Tensor) else None for one in own],
    }
    found = wire.exchange(where, _CALL, facts)[0]
    forms = [None if one is None else (wire.dtype_named(one[0]), torch.Size(one[1])) for one in found["parts"]]
    if where.rank == 0:
        pieces = [wire.as_bytes(one) for one in own if isinstance(one, Tensor)]
    else:
        sizes = [form[0].itemsize * form[1].numel() for form in forms if form is not None]
        pieces = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    wire.broadcast_bytes(where, pieces, owner=0)
    left = iter(pieces)
    parts = tuple(None if form is None else wire.from_bytes(next(left), *form) for form in forms)
    return parts if found["is_tuple"] else parts[0]
