"""What a quantization does to outputs, of single linears (`mse`) or of whole blocks (`mse_layer_wise`), one at a time.

The steps of a recipe stand between two of these processors: the first sees the layer in float, the last one
quantized. The last one hands on what the float layer made, so every layer is measured on float inputs.
"""

from typing import Any

from torch import Tensor, nn

from msmodelslim.analysis.lost_squares import LostSquares
from msmodelslim.analysis.sharing import shared_names, union
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.processor.patterns import Selection


def hidden_states(output: Any) -> Tensor:
    """The hidden states of a layer's output."""
    return output[0] if isinstance(output, tuple) else output


class FloatForward(BaseSessionProcessor):
    """Stands before the steps: keeps what the float layer makes of each sample."""

    registered_name = "float_forward"

    def __init__(self, context: RunContext) -> None:
        super().__init__(None, context)
        #: of the present layer, one a sample of this rank
        self.outputs: list[Any] = []

    def support_distributed(self) -> bool:
        return True

    def shares_forward(self) -> bool:
        return True

    def postprocess(self, request: BatchProcessRequest) -> None:
        self.outputs = list(request.outputs or [])


class FloatLinears(BaseSessionProcessor):
    """Stands before each step: keeps the linears as they were last, before one became a `QuantLinear`."""

    registered_name = "float_linears"

    def __init__(self, context: RunContext) -> None:
        super().__init__(None, context)
        self.linears: dict[str, nn.Linear] = {}

    def support_distributed(self) -> bool:
        return True

    def is_data_free(self) -> bool:
        return True

    def shares_forward(self) -> bool:
        return True

    def preprocess(self, request: BatchProcessRequest) -> None:
        self.linears = {name: one for name, one in self.linears.items() if name.startswith(request.name + ".")}
        for name, module in request.module.named_modules(prefix=request.name):
            if isinstance(module, nn.Linear):
                self.linears[name] = module


class OutputAnalysis(BaseSessionProcessor):
    """What the metrics have in common; stands last."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(None, context)
        #: module → score, once the run is over
        self.scores: dict[str, float] = {}
        #: linears that no token reached
        self.unreached: list[str] = []
        self._lost = LostSquares()

    def support_distributed(self) -> bool:
        return True  # a sample's error is measured by the rank that forwards it, and sums are exact

    def post_run(self) -> None:
        self.scores = union(self.scores)
        self.unreached = sorted(set(union(dict.fromkeys(self.unreached, True))) - set(self.scores))

    def _agree(self, names: list[str], request: BatchProcessRequest) -> None:
        found = self._lost.agree(names, request.sample_ids, request.sample_count, shared_names(request))
        self.scores |= {name: score for name, score in found.items() if score is not None}
        self.unreached += [name for name, score in found.items() if score is None]


class LinearErrors(OutputAnalysis):
    """Each quantized linear against its float one, on the float model's inputs.

    Args:
        selection: which of them are scored.
        floats: knows the float ones.
    """

    registered_name = "mse"

    def __init__(self, selection: Selection, floats: FloatLinears, context: RunContext) -> None:
        super().__init__(context)
        self.selection = selection
        #: selected linears that no step quantizes
        self.left_in_float: list[str] = []
        self._floats = floats
        self._names: list[str] = []

    def rehearse(self, request: BatchProcessRequest) -> None:
        for name, module in request.module.named_modules(prefix=request.name):
            if isinstance(module, QuantLinear):
                self.selection.count(name)
            elif isinstance(module, nn.Linear) and self.selection.selects(name):
                self.left_in_float.append(name)

    def process(self, request: BatchProcessRequest) -> None:
        handles = []
        self._names = []
        for name, module in list(request.module.named_modules(prefix=request.name)):
            if not isinstance(module, QuantLinear):
                continue
            linear = self._floats.linears[name]
            request.module.set_submodule(name.removeprefix(request.name + "."), linear)
            if self.selection.selects(name):
                self._names.append(name)
                handles.append(linear.register_forward_hook(self._comparison(name, module, request)))
        super().process(request)
        for handle in handles:
            handle.remove()

    def postprocess(self, request: BatchProcessRequest) -> None:
        self._agree(self._names, request)

    def _comparison(self, name: str, quantized: QuantLinear, request: BatchProcessRequest) -> Any:
        def compare(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if output.numel():  # an expert that this sample does not reach is handed an empty tensor
                self._lost.add(name, request.sample_id, quantized(args[0]), output)

        return compare


class BlockErrors(OutputAnalysis):
    """Each quantized block against the float one, on the float model's inputs."""

    registered_name = "mse_layer_wise"

    def __init__(self, floats: FloatForward, context: RunContext) -> None:
        super().__init__(context)
        self._floats = floats
        self._is_quantized = False

    def process(self, request: BatchProcessRequest) -> None:
        self._is_quantized = is_quantized(request.module)
        if not self._is_quantized:
            request.outputs = list(self._floats.outputs)
            return
        super().process(request)
        floats, found = self._floats.outputs, request.outputs or []
        for sample, output, expected in zip(request.sample_ids, found, floats, strict=True):
            self._lost.add(request.name, sample, hidden_states(output), hidden_states(expected))
        request.outputs = list(floats)
        self._floats.outputs = []

    def postprocess(self, request: BatchProcessRequest) -> None:
        self._agree([request.name] if self._is_quantized else [], request)


def is_quantized(layer: nn.Module) -> bool:
    """Whether some linear of the layer is quantized."""
    return any(isinstance(module, QuantLinear) for module in layer.modules())
