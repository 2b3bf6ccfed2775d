"""What stands outside the decoder layers, and the logits that the model makes of the last layer's hidden states.

Letters: T tokens, C channels of the residual stream, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.model.base import ModelSlimPipelineInterfaceV1

LOGITS_AT_ONCE = 1 << 24  # elements; 64 MiB in float32


@contextmanager
def without_layers(adapter: ModelSlimPipelineInterfaceV1, model: nn.Module) -> Iterator[None]:
    """While it lasts the model has no decoder layers, so that what is loaded is all the rest."""
    parent_name, _, key = adapter.layer_names[0].rpartition(".")[0].rpartition(".")
    parent = model.get_submodule(parent_name)
    layers = getattr(parent, key)
    setattr(parent, key, nn.ModuleList())
    try:
        yield
    finally:
        setattr(parent, key, layers)


def load_outside_layers(adapter: ModelSlimPipelineInterfaceV1, model: nn.Module, device: torch.device) -> None:
    """Load final norm, head, and the embedding if it is not there yet."""
    with without_layers(adapter, model):
        adapter.load_module("", model, device)


def logits(
    adapter: ModelSlimPipelineInterfaceV1, model: Any, hidden_1TC: Tensor, others: tuple[Any, ...] = ()
) -> Tensor:
    """The logits of a sample whose last layer gave `hidden_1TC`, float32 [T, V].

    The model's own forward runs with layers that hand on these states: so norm, head and whatever a family does there
    (scaling, capping) are the model's.

    Args:
        adapter: of the model.
        model: with everything outside its layers loaded.
        hidden_1TC: a slice of tokens will do: each token's logits depend on its own states alone.
        others: what else the last layer returned.
    """
    layers = [model.get_submodule(name) for name in adapter.layer_names]
    given = (hidden_1TC, *others) if others else hidden_1TC
    tokens_1T = torch.zeros(hidden_1TC.shape[:2], dtype=torch.int64, device=hidden_1TC.device)  # nobody looks at them
    try:
        for layer in layers:
            vars(layer)["forward"] = lambda *_, **__: given
        return model(input_ids=tokens_1T, use_cache=False).logits[0].float()
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
