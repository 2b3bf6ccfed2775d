"""What transformers and numpy make of a tiny float32 model: inputs of linears, and outputs with fp4 blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rounded to blocks of 32 along the last axis: exponent floor(log2(absmax)) − 2, then the nearest of E2M1, ties to
    the even code, saturating. Source: OCP Microscaling Formats, version 1.0."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    absmax = np.abs(blocks).max(-1, keepdims=True)
    scale = np.exp2(np.frexp(np.where(absmax > 0, absmax, 1))[1] - 1.0 - 2)
    sizes, between = np.abs(blocks / scale), (E2M1[1:] + E2M1[:-1]) / 2
    code = np.searchsorted(between, sizes, side="left")
    tie = (code < 7) & (sizes == between[np.minimum(code, 6)]) & (code % 2 == 1)
    return (np.sign(blocks) * E2M1[code + tie] * scale).reshape(x.shape)


class Oracle:
    """A model of transformers in float32.

    Args:
        path: its checkpoint.
        samples: token ids, one list a sample.
    """

    def __init__(self, path: Path, samples: list[list[int]]) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.ids = [torch.tensor([sample]) for sample in samples]
        self.layers = [f"model.layers.{index}" for index in range(len(self.model.model.layers))]
        self.linears = [
            name for name, module in self.model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
        ]

    def inputs(self) -> dict[str, NDArray[np.float64]]:
        """Linear → all values of its input, float64, flat."""
        seen: dict[str, list[Tensor]] = {name: [] for name in self.linears}
        handles = [
            self.model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: seen[name].append(args[0])
            )
            for name in self.linears
        ]
        self.logits()
        for handle in handles:
            handle.remove()
        return {name: torch.cat([x.flatten() for x in parts]).double().numpy() for name, parts in seen.items()}

    def calls(self) -> dict[str, list[tuple[Any, Any]]]:
        """Layer → (args, kwargs) of each sample."""
        seen: dict[str, list[Any]] = {name: [] for name in self.layers}
        handles = [
            self.model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, kwargs, name=name: seen[name].append((args, kwargs)), with_kwargs=True
            )
            for name in self.layers
        ]
        self.logits()
        for handle in handles:
            handle.remove()
        return seen

    def logits(self) -> NDArray[np.float64]:
        """Of all tokens of all samples, [T, V]."""
        with torch.no_grad():
            return torch.cat([self.model(ids, use_cache=False).logits[0] for ids in self.ids]).double().numpy()

    def outputs(self, name: str, calls: list[tuple[Any, Any]]) -> NDArray[np.float64]:
        """What a layer makes of calls, all values."""
        with torch.no_grad():
            found = [self.model.get_submodule(name)(*args, **kwargs) for args, kwargs in calls]
        return torch.cat([(x[0] if isinstance(x, tuple) else x).flatten() for x in found]).double().numpy()

    @contextmanager
    def quantized(self, prefix: str) -> Iterator[None]:
        """While it lasts every linear below `prefix` has weights and inputs in fp4 blocks."""
        chosen = [self.model.get_submodule(name) for name in self.linears if name.startswith(prefix)]
        for linear in chosen:
            weight = mxfp4(linear.weight.detach().double().numpy())
            linear.forward = lambda x, weight=weight: torch.from_numpy(mxfp4(x.double().numpy()) @ weight.T).to(x.dtype)
        try:
            yield
        finally:
            for linear in chosen:
                del linear.forward


def relative(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    return float(((found - expected) ** 2).sum() / (expected**2).sum())
