"""What a model calls its decoder layers with, without running one.

The model's own forward runs once with each layer replaced by a recorder that hands its input on, and stops at the last
layer. So each layer gets the masks, positions and rotary tables that the model itself chooses for it.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.errors import UnsupportedError

Call = tuple[tuple[Any, ...], dict[str, Any]]


class _AllRecorded(Exception):  # noqa: N818 - it says that the work is done, not that something failed
    """The last layer was reached."""


def record_calls(model: nn.Module, layers: Sequence[nn.Module], inputs: dict[str, Any]) -> list[Call]:
    """(args, kwargs) of each layer's call, in order; the hidden states come first in args.

    Only what the model does before its layers is computed; the hidden states are right for the first layer only.

    Raises:
        UnsupportedError: the model does not call its layers once each in order.
    """
    calls: list[Call] = []

    def recorder(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if index != len(calls):
                raise UnsupportedError(
                    f"{type(model).__name__} calls decoder layer {index} as number {len(calls)}",
                    "use a model that calls its layers once each, in order",
                )
            hidden = args[0] if args else kwargs.pop("hidden_states")
            calls.append(((hidden, *args[1:]), kwargs))
            if len(calls) == len(layers):
                raise _AllRecorded
            return hidden

        return forward

    replaced = [vars(layer).get("forward") for layer in layers]
    try:
        for index, layer in enumerate(layers):
            vars(layer)["forward"] = recorder(index)
        with torch.no_grad():
            model(**inputs)
    except _AllRecorded:
        return calls
    finally:
        for layer, before in zip(layers, replaced, strict=True):
            if before is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = before
    raise UnsupportedError(
        f"{type(model).__name__} calls {len(calls)} of its {len(layers)} decoder layers",
        "use a model that calls its layers once each, in order",
    )


class TensorPool:
    """Equal tensors become one, as long as somebody holds it: samples of one length share masks and rotary tables."""

    def __init__(self) -> None:
        self._known: defaultdict[tuple[Any, ...], list[weakref.ref[Tensor]]] = defaultdict(list)

    def shared(self, value: Any) -> Any:
        """`value`, its tensors (also in tuples, lists and dicts) replaced by equal ones seen before."""
        match value:
            case Tensor():
                return self._tensor(value)
            case tuple() | list() if type(value) in (tuple, list):
                return type(value)(self.shared(part) for part in value)
            case dict():
                return {key: self.shared(part) for key, part in value.items()}
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        key = (tensor.shape, tensor.dtype, tensor.device)
        alive = [(reference, known) for reference in self._known[key] if (known := reference()) is not None]
        self._known[key] = [reference for reference, _ in alive]
        for _, known in alive:
            if known is tensor or torch.equal(known, tensor):
                return known
        self._known[key].append(weakref.ref(tensor))
        return tensor
