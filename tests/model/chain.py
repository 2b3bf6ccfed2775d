"""A whole forward, layer by layer, as a runner does it."""

import torch
from torch import Tensor

CPU = torch.device("cpu")


def layer_outputs(adapter, model, ids: Tensor) -> list[Tensor]:
    """Hidden states after each decoder layer of one sample."""
    outputs = []
    flow = adapter.generate_model_forward(model, {"input_ids": ids}, CPU)
    with torch.no_grad():
        request = next(flow)
        while True:
            outputs.append(request.module(*request.args, **request.kwargs))
            try:
                request = flow.send(outputs[-1])
            except StopIteration:
                return outputs


def logits(adapter, ids: Tensor) -> Tensor:
    """Head of the norm of the last layer's output."""
    model = adapter.init_model(CPU)
    hidden = layer_outputs(adapter, model, ids)[-1]
    for name in ("model.norm", "lm_head"):
        module = model.get_submodule(name)
        adapter.load_module(name, module, CPU)
        with torch.no_grad():
            hidden = module(hidden)
    return hidden
