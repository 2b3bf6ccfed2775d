"""One layer on the device at a time: memory does not grow with the model's depth."""

from torch import nn

from msmodelslim import device as devices
from msmodelslim.processor.base import BatchProcessRequest
from msmodelslim.runner.base import BaseRunner


class LayerWiseRunner(BaseRunner):
    """Each layer is read when it is reached and forgotten when its savers have written it."""

    def _before_layers(self, model: nn.Module) -> None:
        pass  # layers are read one by one, when they are reached

    def _after_layer(self, request: BatchProcessRequest) -> None:
        request.module.to("meta")
        devices.empty_cache(self._context.device.type)
