"""Llama 1 to 3 and the many models that share its layer."""

from torch import nn

from msmodelslim.model.decoder_layers import DecoderAdapter, usual_structure
from msmodelslim.model.structure import LayerStructure
from msmodelslim.registry import register


@register("llama")
class LlamaAdapter(DecoderAdapter):
    architectures = ("LlamaForCausalLM",)
    model_names = ("llama", "meta-llama", "tinyllama", "smollm", "vicuna", "deepseek-r1-distill-llama")
    pedigree = "dense"

    def structure(self, layer: nn.Module) -> LayerStructure:
        return usual_structure(layer, self.config.get_text_config())
