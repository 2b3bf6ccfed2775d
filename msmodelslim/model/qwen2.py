"""Qwen 2 and 2.5: as Llama, with biases on q, k and v."""

from torch import nn

from msmodelslim.model.decoder_layers import DecoderAdapter, usual_structure
from msmodelslim.model.structure import LayerStructure
from msmodelslim.registry import register


@register("qwen2")
class Qwen2Adapter(DecoderAdapter):
    architectures = ("Qwen2ForCausalLM",)
    model_names = ("qwen2", "qwq", "deepseek-r1-distill-qwen")
    pedigree = "dense"

    def structure(self, layer: nn.Module) -> LayerStructure:
        return usual_structure(layer, self.config.get_text_config())
