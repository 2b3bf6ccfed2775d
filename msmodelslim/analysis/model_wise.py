"""How far the error of one quantized block reaches: into the model's logits (`mse_model_wise`, `kl_model_wise`).

Every block makes a copy of each sample's hidden states in which it alone is quantized. All copies go on together
through the float layers behind it, so each layer is read once; but a model of L layers costs about L²/2 forwards of
a layer a sample, and memory for L copies of all hidden states. Like all samples, copies are forwarded one at a time.

Letters: T tokens, V vocabulary.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from msmodelslim.analysis.lost_squares import refuse_infinite, share_lost, square_sum
from msmodelslim.analysis.outputs import FloatForward, OutputAnalysis, hidden_states, is_quantized
from msmodelslim.distributed import watchdog
from msmodelslim.distributed.stat_agree import StatKind
from msmodelslim.distributed.stat_store import StatStore
from msmodelslim.model.head import LOGITS_AT_ONCE, load_outside_layers, logits
from msmodelslim.processor.base import BatchProcessRequest, RunContext

#: of each sample: Σ(z − ẑ)², Σz², ΣKL, tokens
_PARTS = ("lost", "total", "divergence", "tokens")


class CopiesForward(FloatForward):
    """Stands before the steps: takes the copies of earlier blocks through the layer, while it is in float."""

    registered_name = "float_forward"

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        #: block that is quantized → hidden states behind the present layer, one a sample of this rank
        self.copies: dict[str, list[Tensor]] = {}

    def shares_forward(self) -> bool:
        return False  # an observer of another step would see the copies, too

    def process(self, request: BatchProcessRequest) -> None:
        super().process(request)
        done = len(request.sample_ids)
        total = done * (1 + len(self.copies))
        for states in self.copies.values():
            for index, (args, kwargs) in enumerate(request.datas or []):
                states[index] = hidden_states(request.module(states[index], *args[1:], **kwargs))
                done += 1
                request.on_sample(done, total)


class ModelErrors(OutputAnalysis):
    """Each block quantized alone, judged by the logits.

    Args:
        is_divergence: score by the divergence, not by squares.
    """

    def __init__(self, floats: CopiesForward, is_divergence: bool, context: RunContext) -> None:
        super().__init__(context)
        self.registered_name = "kl_model_wise" if is_divergence else "mse_model_wise"  # type: ignore[misc]
        self._floats = floats
        self._sample_ids: list[int] = []
        self._sample_count = 0

    def process(self, request: BatchProcessRequest) -> None:
        self._sample_ids, self._sample_count = list(request.sample_ids), request.sample_count
        if is_quantized(request.module):
            super().process(request)
            self._floats.copies[request.name] = [hidden_states(output) for output in request.outputs or []]
        request.outputs = list(self._floats.outputs)

    def post_run(self) -> None:
        adapter, model, device = self.context.adapter, self.context.model, self.context.device
        load_outside_layers(adapter, model, device)
        store = StatStore(self._sample_ids, self._sample_count)
        copies = self._floats.copies
        for name in copies:
            for part in _PARTS:
                store.declare(f"{name}:{part}", StatKind.SCALAR)
        for index, sample in enumerate(self._sample_ids):
            expected = hidden_states(self._floats.outputs[index])
            sums = self._compare(expected, {name: states[index] for name, states in copies.items()})
            for name, values in sums.items():
                for part, value in zip(_PARTS, values, strict=True):
                    store.add_scalar(f"{name}:{part}", sample, value)
        found = store.agree(None)
        for name in copies:
            stats = [found[f"{name}:{part}"] for part in _PARTS]
            lost, total, divergence, tokens = (stat.value.tolist() for stat in stats if stat.value is not None)
            refuse_infinite("the head", "float", total, stats[0].sample_ids)
            refuse_infinite(f"the head, with {name} quantized, in", "quantized", lost, stats[0].sample_ids)
            by_squares = self.registered_name == "mse_model_wise"
            self.scores[name] = share_lost(lost, total) if by_squares else math.fsum(divergence) / math.fsum(tokens)
        self._floats.copies = {}

    def _compare(self, expected: Tensor, copies: dict[str, Tensor]) -> dict[str, list[float]]:
        """Of one sample: block → the values of `_PARTS`, KL(float ‖ quantized) in nats; few rows at a time."""
        adapter, model = self.context.adapter, cast(Any, self.context.model)
        sums = {name: [0.0, 0.0, 0.0, float(expected.shape[1])] for name in copies}
        rows = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
        for start in range(0, expected.shape[1], rows):
            rows_of = slice(start, start + rows)
            expected_TV = logits(adapter, model, expected[:, rows_of])
            log_TV = torch.log_softmax(expected_TV, dim=-1)
            total = square_sum(expected_TV)
            for name, states in copies.items():
                found_TV = logits(adapter, model, states[:, rows_of])
                terms_TV = log_TV.exp() * (log_TV - torch.log_softmax(found_TV, dim=-1))
                added = (square_sum(found_TV - expected_TV), total, float(terms_TV.sum(dtype=torch.float64)))
                for place, value in enumerate(added):
                    sums[name][place] += value
                watchdog.beat()
        return sums
