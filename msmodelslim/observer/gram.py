"""What calibration says of the inputs of linears: XᵀX over all tokens, the same bits on any number of ranks.

Linears that read one tensor (q, k and v; gate and up) share one sum. Letters: T tokens, I input columns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from msmodelslim.distributed.stat_agree import StatKind
from msmodelslim.distributed.stat_store import StatStore


class GramObserver:
    """Adds up products of inputs during a forward; only accumulates, never communicates before `agree`.

    Args:
        sample_ids: global index of each sample of this rank.
        sample_count: samples of all ranks together.
        sample_id: says which sample is being forwarded.
        device: where the sums are kept.
    """

    def __init__(
        self, sample_ids: Sequence[int], sample_count: int, sample_id: Callable[[], int], device: torch.device
    ) -> None:
        self._store = StatStore(sample_ids, sample_count, device=device)
        self._sample_id = sample_id
        self._streams: dict[str, str] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, names: Sequence[str], module: nn.Module, diagonal: bool) -> None:
        """Measure the first positional argument of every call of `module`, for all linears of `names`.

        Args:
            names: linears that read the same tensor; the first one's calls are measured.
            module: the first of them.
            diagonal: keep the sums of squares alone.
        """
        owner = names[0]
        self._streams |= dict.fromkeys(names, owner)
        self._store.declare(f"{owner}:gram", StatKind.SUM)
        self._store.declare(f"{owner}:tokens", StatKind.COUNT)

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            x_TI = args[0].reshape(-1, args[0].shape[-1])
            if not len(x_TI):  # an expert that this sample does not reach is handed an empty tensor
                return
            x_TI = x_TI if x_TI.dtype is torch.float64 else x_TI.float()
            sums = x_TI.square().sum(0) if diagonal else x_TI.T @ x_TI
            self._store.add_sum(f"{owner}:gram", self._sample_id(), sums)
            self._store.add_count(f"{owner}:tokens", self._sample_id(), torch.tensor(len(x_TI)))

        self._handles.append(module.register_forward_pre_hook(measure))

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def agree(self, is_shared: Callable[[str], bool]) -> Mapping[str, tuple[Tensor, int] | None]:
        """Linear → (sums over all ranks, tokens), None when no token reached it; every rank calls it once a layer.

        Args:
            is_shared: whether all ranks hold this linear.
        """
        found = self._store.agree(is_shared)
        result: dict[str, tuple[Tensor, int] | None] = {}
        for name, owner in self._streams.items():
            sums, tokens = found[f"{owner}:gram"].value, found[f"{owner}:tokens"].value
            result[name] = None if sums is None or tokens is None else (sums, int(tokens))
        return result
