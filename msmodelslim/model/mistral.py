"""Mistral: as Llama, attention within a sliding window in some versions."""

from torch import nn

from msmodelslim.model.decoder_layers import DecoderAdapter, usual_structure
from msmodelslim.model.structure import LayerStructure
from msmodelslim.registry import register


@register("mistral")
class MistralAdapter(DecoderAdapter):
    architectures = ("MistralForCausalLM",)
    model_names = ("mistral", "mathstral")
    pedigree = "dense"

    def structure(self, layer: nn.Module) -> LayerStructure:
        return usual_structure(layer, self.config.get_text_config())
