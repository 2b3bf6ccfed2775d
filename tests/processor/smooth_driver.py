"""A decoder layer with every kind of producer, and a run of one smoothing step over it without a checkpoint."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.model.structure import LayerStructure
from msmodelslim.processor.base import BatchProcessRequest, RunContext, RunRecord
from msmodelslim.processor.smooth import SmoothProcessor
from tests.processor.driver import CPU, step

NAME = "model.layers.0"
W4A8 = {
    "act": {"dtype": "int8", "scope": "per_token", "method": "minmax"},
    "weight": {"dtype": "int4", "scope": "per_channel"},
}
W4_GROUPS = {"dtype": "int4", "scope": "per_group", "ext": {"group_size": 8}}
#: every preset with what it requires
PRESETS: dict[str, dict[str, Any]] = {
    "smooth_quant": {},
    "iter_smooth": {},
    "flex_smooth_quant": {},
    "flex_awq_ssz": {"qconfig": W4A8},
    "awq": {"weight_qconfig": W4_GROUPS},
}
EVERY_KIND = ["norm-linear", "linear-linear", "ov", "up-down"]


class RMSNorm(nn.Module):
    """gain·x/rms(x), in the type of x throughout; the gain is `weight`, or 1 + `weight` as in Gemma's models."""

    def __init__(self, width: int, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class TinyLayer(nn.Module):
    """norm → attention → norm → gated MLP → two linears in a row, each with a residual; every width is different.

    Args:
        norm: "rms", "one_plus" (1 + weight) or "layer" (nn.LayerNorm with bias).
        fused: queries, keys and values from one linear.
    """

    def __init__(
        self, heads: int = 4, kv_heads: int = 2, *, norm: str = "rms", bias: bool = False, fused: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, 8
        hidden, queries, keys = 24, heads * 8, kv_heads * 8
        make = {"rms": RMSNorm, "one_plus": lambda width: RMSNorm(width, 1), "layer": nn.LayerNorm}[norm]
        self.norm_1, self.norm_2, self.fused = make(hidden), make(hidden), fused
        widths = {"gate": (hidden, 40), "up": (hidden, 40), "down": (40, hidden), "o": (queries, hidden)}
        widths |= {"first": (hidden, 16), "second": (16, hidden)}
        if fused:
            widths["qkv"] = (hidden, queries + 2 * keys)
        else:
            widths |= {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys)}
        for name, (columns, rows) in widths.items():
            self.add_module(name, nn.Linear(columns, rows, bias=bias))

    def randomize(self, seed: int = 0, outliers: bool = True) -> "TinyLayer":
        """Random parameters of the usual sizes; with `outliers` the norms make a few channels 30 times larger."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
                if name.endswith(".bias"):
                    parameter.mul_(0.1)
                if name in ("norm_1.weight", "norm_2.weight"):
                    parameter.add_(1)
                    if outliers:
                        parameter[3::7].mul_(30)
        return self

    def structure(self) -> LayerStructure:
        qkv = ("qkv",) if self.fused else ("q", "k", "v")
        values = ((self.heads + self.kv_heads) * 8, (self.heads + 2 * self.kv_heads) * 8)
        return LayerStructure(
            norm_linears=(("norm_1", qkv), ("norm_2", ("gate", "up"))),
            ov=(("qkv" if self.fused else "v", "o"),),
            up_down=(("up", "down"),),
            linear_linear=(("first", "second"),),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            value_rows=(values,) if self.fused else (),
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        parts = self.qkv(normed) if self.fused else torch.cat([self.q(normed), self.k(normed), self.v(normed)], -1)
        heads = parts.unflatten(-1, (-1, self.head_width)).transpose(-2, -3)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=-3)
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, -3), v.repeat_interleave(share, -3)
        mixed = (q @ k.transpose(-1, -2) / math.sqrt(self.head_width)).softmax(-1) @ v
        x = x + self.o(mixed.transpose(-2, -3).flatten(-2))
        normed = self.norm_2(x)
        x = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return x + self.second(self.first(x))


class StubAdapter:
    """The two things a smoothing step asks of a model family."""

    def __init__(self, structure: LayerStructure, dtype: torch.dtype = torch.float32) -> None:
        self._structure = structure
        self.dtype = dtype

    def structure(self, layer: nn.Module) -> LayerStructure:
        return self._structure


def inputs(count: int = 5, tokens: int = 9, width: int = 24, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, a token more each sample."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(1, tokens + i, width, generator=generator, dtype=torch.float64).to(dtype) for i in range(count)]


def smoother(layer: nn.Module, structure: LayerStructure, preset: str, **config: Any) -> SmoothProcessor:
    """The preset, on a layer that stands alone."""
    dtype = next(layer.parameters()).dtype
    stored_as = torch.float32 if dtype is torch.float64 else dtype
    context = RunContext(StubAdapter(structure, stored_as), layer, CPU, RunRecord())  # type: ignore[arg-type]
    processor = step(context, preset, **config)
    assert isinstance(processor, SmoothProcessor)
    return processor


@torch.no_grad()
def smooth(
    layer: nn.Module,
    samples: list[Tensor],
    processor: SmoothProcessor,
    sample_ids: list[int] | None = None,
    sample_count: int = 0,
) -> BatchProcessRequest:
    """Rehearse on a meta copy, then run the step on the layer, as a runner would."""
    processor.rehearse(BatchProcessRequest(NAME, copy.deepcopy(layer).to("meta")))
    ids = list(range(len(samples))) if sample_ids is None else sample_ids
    datas: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((x,), {}) for x in samples]
    request = BatchProcessRequest(NAME, layer, datas, sample_ids=ids, sample_count=sample_count or len(samples))
    processor.pre_run()
    processor.preprocess(request)
    processor.process(request)
    processor.postprocess(request)
    return request


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """‖found − expected‖ / ‖expected‖ over all samples."""
    lost = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    return math.sqrt(lost / sum(float(b.double().square().sum()) for b in expected))
