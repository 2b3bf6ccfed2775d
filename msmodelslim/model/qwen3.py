"""Qwen 3, dense: as Llama, with a norm on each head of q and k."""

from torch import nn

from msmodelslim.model.decoder_layers import DecoderAdapter, usual_structure
from msmodelslim.model.structure import LayerStructure
from msmodelslim.registry import register


@register("qwen3")
class Qwen3Adapter(DecoderAdapter):
    architectures = ("Qwen3ForCausalLM",)
    model_names = ("qwen3",)
    pedigree = "dense"

    def structure(self, layer: nn.Module) -> LayerStructure:
        return usual_structure(layer, self.config.get_text_config())
