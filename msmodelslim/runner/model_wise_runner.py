"""The whole model on the device at once: for models that fit, and steps that look across layers."""

from torch import nn

from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.runner.base import BaseRunner


class ModelWiseRunner(BaseRunner):
    """All layers are read before the first step and stay until the end."""

    def _before_layers(self, model: nn.Module) -> None:
        for _ in self._context.adapter.generate_decoder_layer(model, self._context.device):
            pass

    def _after_layer(self, request: BatchProcessRequest) -> None:
        pass  # every layer stays
