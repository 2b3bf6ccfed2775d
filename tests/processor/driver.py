"""Runs steps over a tiny checkpoint, as a recipe would, without writing files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from msmodelslim.model.families import open_model
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext, RunRecord
from msmodelslim.registry import lookup
from msmodelslim.runner.layer_wise_runner import LayerWiseRunner

CPU = torch.device("cpu")


def token_samples(count: int = 4, length: int = 12, vocabulary: int = 320) -> list[dict[str, torch.Tensor]]:
    """Random token ids, a few tokens more each sample so that lengths differ."""
    generator = torch.Generator().manual_seed(7)
    return [
        {"input_ids": torch.randint(0, vocabulary, (1, length + index), generator=generator)} for index in range(count)
    ]


def context_for(model_path: Path, model_type: str | None = None) -> RunContext:
    adapter = open_model(model_path, model_type)
    return RunContext(adapter, adapter.init_model(CPU), CPU, RunRecord())


def step(context: RunContext, name: str, **config: Any) -> BaseSessionProcessor:
    cls = lookup("processor", name)
    return cls(cls.Config.model_validate(config), context)


class Keep(BaseSessionProcessor):
    """Stands where a saver stands: keeps each finished layer's quantized modules and the layer's outputs."""

    registered_name = "keep"
    kind = "saver"

    def __init__(self, context: RunContext) -> None:
        super().__init__(None, context)
        self.modules: dict[str, nn.Module] = {}
        self.outputs: dict[str, list[torch.Tensor]] = {}

    def is_data_free(self) -> bool:
        return True

    def postprocess(self, request: BatchProcessRequest) -> None:
        self.modules |= dict(request.module.named_modules(prefix=request.name))
        self.outputs[request.name] = list(request.outputs or [])
        request.module = nn.Module()  # so that the runner does not forget the layer's tensors


def run(
    context: RunContext, *steps: BaseSessionProcessor, samples: list[dict[str, torch.Tensor]] | None = None
) -> Keep:
    keep = Keep(context)
    data = token_samples() if samples is None else samples
    LayerWiseRunner(context, [*steps, keep], data, range(len(data))).run()
    return keep


def linear_inputs(model_path: Path, samples: list[dict[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """What transformers' own model hands to each linear of its layers, a sample at a time: the independent witness."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[0]))
    with torch.no_grad():
        for sample in samples:
            model(**sample, use_cache=False)
    return seen
