"""What smoothing has to know of the inputs of linears, over all calibration samples and all ranks.

Ranges and counts are exact in any order; means and Gram matrices are added up by the store's fixed tree; a few tokens
of each sample stay on the rank that forwarded it, for objectives that are summed a sample at a time. So every rank
decides from the same numbers, whatever the number of ranks.

Letters: T tokens, I input columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.distributed import DistHelper, Stat, StatStore
from msmodelslim.errors import BadSampleError
from msmodelslim.observer.gram_sum import packed_gram, rescaled_gram, unpacked_gram
from msmodelslim.observer.watcher import Watcher
from msmodelslim.processor.smooth_rescale import wide

_TOKENS = 1024  # that an objective is judged by; their loss ranks exponents as that of all tokens does
_TOKENS_A_SAMPLE = 32  # enough for a matrix product to be worth its call
_KEPT_TOKENS = 4096  # over all samples, since which of them reach an expert is known only at the end
_NO_SAMPLE = torch.iinfo(torch.int64).max
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class InputStats:
    """The agreed statistics of one linear's input.

    Args:
        minimum_I, maximum_I: extrema of each column over all tokens, float32 (float64 for a float64 model).
        mean_I: mean |x| of each column; None unless asked for.
        gram_II: sum of x xᵀ over all tokens; None unless asked for.
        tokens: the tokens to judge by that this rank forwarded, a sample: global number → [T, I] in the model's type;
            empty unless asked for.
    """

    minimum_I: Tensor  # noqa: N815 - a tensor's name ends in its axes
    maximum_I: Tensor  # noqa: N815
    mean_I: Tensor | None  # noqa: N815
    gram_II: Tensor | None  # noqa: N815
    tokens: dict[int, Tensor]

    def rescaled(self, factor_I: Tensor) -> "InputStats":
        """Those of inputs whose columns have been divided by `factor_I`, above 0, since."""
        return InputStats(
            self.minimum_I / factor_I,
            self.maximum_I / factor_I,
            None if self.mean_I is None else self.mean_I / factor_I,
            None if self.gram_II is None else rescaled_gram(self.gram_II, factor_I),
            {sample: (wide(x_TI) / factor_I).to(x_TI.dtype) for sample, x_TI in self.tokens.items()},
        )

    @property
    def absmax_I(self) -> Tensor:  # noqa: N802 - as above
        """Largest |x| of each column."""
        return torch.maximum(-self.minimum_I, self.maximum_I)


class InputStatistics(Watcher):
    """Collects the input statistics of watched linears while samples flow; never communicates before `agree`.

    Args:
        store: of the run; its `sample_ids` are this rank's.
        samples: how many samples all ranks hold together.
        sample_id: says which sample is being forwarded.
    """

    def __init__(self, store: StatStore, samples: int, sample_id: Callable[[], int]) -> None:
        super().__init__()
        self._store = store
        self._sample_id = sample_id
        self._tokens_a_sample = max(1, min(_TOKENS_A_SAMPLE, _KEPT_TOKENS // max(samples, 1)))
        self._tokens: dict[str, dict[int, list[Tensor]]] = {}

    def watch(self, name: str, module: nn.Module, *, mean: bool, gram: bool, tokens: bool) -> None:
        """Collect from the first argument of every call of `module`, under its full name."""
        self._tokens[name] = {}

        def measure(_: nn.Module, args: tuple[Any, ...]) -> None:
            x_TI = args[0].reshape(-1, args[0].shape[-1])
            if not len(x_TI):  # an expert that this sample does not reach is handed an empty tensor
                return
            sample, store = self._sample_id(), self._store
            low_I, high_I = x_TI.amin(0), x_TI.amax(0)  # a fifth of the time of torch.aminmax over this axis
            finite = torch.isfinite(low_I).all() & torch.isfinite(high_I).all()
            store.add_min(f"{name}:min", sample, low_I)
            store.add_max(f"{name}:max", sample, high_I)
            store.add_min(f"{name}:not finite", sample, torch.where(finite, _NO_SAMPLE, sample))
            if mean:
                store.add_sum(f"{name}:sum", sample, wide(x_TI).abs().sum(0))
                store.add_count(f"{name}:tokens", sample, torch.tensor(len(x_TI)))
            if gram:
                store.add_sum(f"{name}:gram", sample, packed_gram(wide(x_TI)))
            if tokens:
                kept = kept_tokens(len(x_TI), self._tokens_a_sample, sample)
                self._tokens[name].setdefault(sample, []).append(x_TI[kept.to(x_TI.device)])

        self._handles.append(module.register_forward_pre_hook(measure))

    def agree(self, shared: DistHelper | None) -> dict[str, InputStats]:
        """Name → statistics of all ranks; without the linears that no sample reached on any rank.

        Raises:
            BadSampleError: an input was not finite; names the first linear watched and its first such sample.
        """
        for name, kept in self._tokens.items():
            for sample, parts in kept.items():
                self._store.add_scalar(f"{name}:kept", sample, sum(map(len, parts)))
        found = self._store.agree(shared)
        stats = {}
        # In the order of watching; a stream of this layer that was not watched here is another rank's alone.
        for name in [one for one in self._tokens if f"{one}:min" in found]:
            values = {word: found[f"{name}:{word}"].value for word in _WORDS if f"{name}:{word}" in found}
            bad = values["not finite"]
            assert bad is not None and values["min"] is not None and values["max"] is not None, f"{name} was seen"
            if int(bad) != _NO_SAMPLE:
                raise BadSampleError.of_input(name, int(bad))
            total_I, tokens = values.get("sum"), values.get("tokens")
            kept, judged = self._tokens.pop(name, {}), judged_samples(found.get(f"{name}:kept"))
            packed_P = values.get("gram")
            stats[name] = InputStats(
                values["min"],
                values["max"],
                None if total_I is None or tokens is None else total_I / tokens,
                None if packed_P is None else unpacked_gram(packed_P, len(values["min"])),
                {sample: torch.cat(parts) for sample, parts in kept.items() if sample in judged},
            )
        self._tokens.clear()
        return stats


_WORDS = ("min", "max", "not finite", "sum", "tokens", "gram")


def judged_samples(kept: Stat | None) -> set[int]:
    """The first samples, over all ranks, that hold enough tokens together.

    Args:
        kept: tokens a sample; None when tokens were not asked for.
    """
    judged: set[int] = set()
    tokens = 0.0
    if kept is not None and kept.value is not None:
        for sample, count in zip(kept.sample_ids, kept.value.tolist(), strict=True):
            if tokens < _TOKENS:
                judged.add(sample)
                tokens += count
    return judged


def kept_tokens(tokens: int, quota: int, sample: int) -> Tensor:
    """Which tokens of a sample are kept: evenly spaced, from a start that differs from sample to sample.

    It depends on the sample alone, so the set is the same on any number of ranks; and no place, the first one least of
    all, is in every sample.
    """
    if tokens <= quota:
        return torch.arange(tokens)
    start = sample * _GOLDEN % 1
    return ((torch.arange(quota, dtype=torch.float64) + start) * (tokens / quota)).long()
