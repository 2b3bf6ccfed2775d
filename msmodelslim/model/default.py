"""Any other decoder-only model that transformers can build and whose layer has the usual parts and names."""

from typing import Any

import torch
from torch import nn

from msmodelslim.errors import UnsupportedError
from msmodelslim.model.decoder_layers import DecoderAdapter, usual_structure
from msmodelslim.model.structure import LayerStructure
from msmodelslim.registry import register

_NORMS = ("input_layernorm", "post_attention_layernorm")
#: module of the layer ("" the layer itself) → what it must hold, and what it may hold besides
_PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "": ((*_NORMS, "self_attn", "mlp"), ()),
    "self_attn": (("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm", "rotary_emb")),
    "mlp": (("gate_proj", "up_proj", "down_proj"), ("act_fn",)),
}


@register("default")
class DefaultAdapter(DecoderAdapter):
    """A model of no known family. Its structure is given only where the modules leave no doubt about it."""

    attention = None

    def structure(self, layer: nn.Module) -> LayerStructure:
        """As the usual one.

        Raises:
            UnsupportedError: a part is missing, there is one more than usual (it may stand between a norm and its
                linears), or a norm does anything but multiply by its weight.
        """
        kind = type(layer).__name__
        doubts = [*_missing_parts(layer), *_unusual_parts(layer)]
        doubts = doubts or [f"{name} does not multiply by its weight" for name in _NORMS if not _is_plain(layer, name)]
        if doubts:
            raise UnsupportedError(
                f"the parts of {kind} are not the usual ones: {', '.join(doubts)}",
                "leave out the steps that need the structure of a layer (smoothing, rotation)",
            )
        return usual_structure(layer, self.config.get_text_config())


def _missing_parts(layer: nn.Module) -> list[str]:
    paths = dict(layer.named_modules())
    return [
        f"no {_join(holder, part)}"
        for holder, (needed, _) in _PARTS.items()
        for part in needed
        if _join(holder, part) not in paths
    ]


def _unusual_parts(layer: nn.Module) -> list[str]:
    paths = dict(layer.named_modules())
    return [
        f"{_join(holder, part)} besides"
        for holder, (needed, allowed) in _PARTS.items()
        if holder in paths
        for part, _ in paths[holder].named_children()
        if part not in (*needed, *allowed)
    ]


def _is_plain(layer: nn.Module, name: str) -> bool:
    """Doubling the weight of the norm doubles its output; Gemma's norms multiply by 1 + weight, for one."""
    norm = layer.get_submodule(name)
    tensors: dict[str, Any] = {key: torch.zeros(value.shape) for key, value in norm.named_parameters()}
    if "weight" not in tensors:
        return False
    x_TC = torch.linspace(-1, 2, 2 * tensors["weight"].numel()).reshape(2, -1)
    once, twice = (
        torch.func.functional_call(norm, tensors | {"weight": torch.full_like(tensors["weight"], factor)}, x_TC)
        for factor in (1.0, 2.0)
    )
    return torch.equal(2 * once, twice)


def _join(holder: str, part: str) -> str:
    return f"{holder}.{part}" if holder else part
