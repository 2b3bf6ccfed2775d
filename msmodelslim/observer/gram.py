"""What calibration says of the inputs of linears: XᵀX over all tokens, the same bits on any number of ranks.

Linears that read one tensor (q, k and v; gate and up) share one sum, and one rank that rounds them all can be its only
holder. Letters: T tokens, I input columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.distributed.stat_agree import StatKind
from msmodelslim.distributed.stat_store import StatStore
from msmodelslim.observer.gram_sum import packed_diagonal, packed_gram, rescaled_gram, unpacked_gram
from msmodelslim.observer.min_max import NO_SAMPLE
from msmodelslim.observer.watcher import Watcher


@dataclass(frozen=True)
class AgreedGram:
    """What all ranks together saw of a linear's input.

    Args:
        sums: XᵀX, float32 (float64 for such inputs) [I, I], or its diagonal [I]; None where another rank owns it, and
            when no token reached the linear.
        tokens: rows of X, the same on every rank.
        first_bad: global index of the first sample whose sums are not finite, the same on every rank; None without one.
    """

    sums: Tensor | None
    tokens: int
    first_bad: int | None = None


class GramObserver(Watcher):
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
        super().__init__()
        self._store = StatStore(sample_ids, sample_count, device=device)
        self._sample_id = sample_id
        self._streams: dict[str, str] = {}
        self._columns: dict[str, int] = {}

    def watch(self, names: Sequence[str], module: nn.Module, diagonal: bool) -> None:
        """Measure the first positional argument of every call of `module`, for all linears of `names`.

        Args:
            names: linears that read the same tensor; the first one's calls are measured.
            module: the first of them.
            diagonal: keep the sums of squares alone.
        """
        first = names[0]
        self._streams |= dict.fromkeys(names, first)
        self._store.declare(f"{first}:gram", StatKind.SUM)
        self._store.declare(f"{first}:tokens", StatKind.COUNT)
        self._store.declare(f"{first}:first bad", StatKind.MIN)
        if not diagonal:
            self._columns[first] = module.get_parameter("weight").shape[1]

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            x_TI = args[0].reshape(-1, args[0].shape[-1])
            if not len(x_TI):  # an expert that this sample does not reach is handed an empty tensor
                return
            x_TI = x_TI if x_TI.dtype is torch.float64 else x_TI.float()
            sums = x_TI.square().sum(0) if diagonal else packed_gram(x_TI)
            self._store.add_sum(f"{first}:gram", self._sample_id(), sums)
            self._store.add_count(f"{first}:tokens", self._sample_id(), torch.tensor(len(x_TI)))
            squares_I = (
                sums if diagonal else packed_diagonal(sums, x_TI.shape[1])
            )  # no product is larger than its two squares
            bad = torch.where(squares_I.isfinite().all(), NO_SAMPLE, self._sample_id())
            self._store.add_min(f"{first}:first bad", self._sample_id(), bad)

        self._handles.append(module.register_forward_pre_hook(measure))

    def agree(
        self,
        is_shared: Callable[[str], bool],
        owners: Mapping[str, int] | None = None,
        factors: Mapping[str, Tensor] | None = None,
    ) -> Mapping[str, AgreedGram]:
        """Linear → sums over all ranks; the same object for the same input. Every rank calls it, once a layer.

        Args:
            is_shared: whether all ranks hold this linear.
            owners: linear → the rank that alone needs the sums; all ranks get those of the others.
            factors: linear → what its input columns have been divided by since they were measured, above 0 [I].

        Raises:
            ValueError: linears that read the same tensor have different owners or factors.
        """
        owners, factors = owners or {}, factors or {}
        chosen: dict[str, int] = {}
        for name, first in self._streams.items():
            if owners.get(name) != owners.get(first):
                raise ValueError(
                    f"{first} and {name} share one sum, but their owners are {owners.get(first)} and "
                    f"{owners.get(name)}; deal linears with the same input to one rank"
                )
            if not _equal(factors.get(name), factors.get(first)):
                raise ValueError(f"{first} and {name} read one tensor, but their columns were divided by other factors")
            if first in owners:
                chosen[f"{first}:gram"] = owners[first]
        found = self._store.agree(is_shared, owners=chosen)
        grams = {}
        for first in set(self._streams.values()):
            tokens, bad = found[f"{first}:tokens"].value, found[f"{first}:first bad"].value
            sums = found[f"{first}:gram"].value
            if sums is not None and first in self._columns:
                sums = unpacked_gram(sums, self._columns[first])
            if sums is not None and first in factors:
                sums = rescaled_gram(sums, factors[first])
            grams[first] = AgreedGram(
                sums,
                0 if tokens is None else int(tokens),
                None if bad is None or int(bad) == NO_SAMPLE else int(bad),
            )
        return {name: grams[first] for name, first in self._streams.items()}


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
