"""Factors from exponents, and the search for the exponents that cost the layer least.

s = act^a / weight^b, where act and weight measure how large a channel's activations and weights are. a = b = 0 changes
nothing and is always tried first: a searched factor is never worse than none, by the search's own measure. That is what
rounding does to the outputs of the consumers, ‖x̂Ŵᵀ − xWᵀ‖² over tokens, with the scheme that will be deployed. Where
only weights are rounded it is tr(Δ H Δᵀ) with Δ = Ŵ/s − W and H the Gram matrix of the inputs. Where there are more
rows than columns it is tr(E K Eᵀ) + ‖x̂Δᵀ‖² with E = x̂ − x and K the Gram matrix of the weight's rows, which counts all
rows at the price of a few: the two errors have nothing to do with each other, so their product is near zero.

Letters: T tokens, C channels with a factor, I input columns, O output rows, G query heads that share a channel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from msmodelslim.distributed import DistHelper, StatStore, run_tasks
from msmodelslim.ir.quantize import act_qparam, dequantize_weight, fake_quantize_act, quantize_weight
from msmodelslim.ir.scheme import MX_BLOCK, LinearScheme, QScheme, QScope
from msmodelslim.processor.smooth_rescale import LayerRescale, wide
from msmodelslim.processor.smooth_statistics import InputStats
from msmodelslim.processor.smooth_subgraphs import Subgraph

SMALLEST_WEIGHT = 1e-5  # below it a column counts as this large; SmoothQuant's own code, arXiv:2211.10438
_NORMALIZED = (1e-4, 1e4)  # bounds of a factor whose geometric middle is 1
_JUDGED_ROWS = 256  # of a consumer, for what the rounding of its weight does
_GRAM_COLUMNS = 4096  # the widest input that gets a Gram matrix, 64 MiB


class Exponents(NamedTuple):
    """Exponents of the activation's and the weight's size in a factor."""

    act: float
    weight: float


UNCHANGED = Exponents(0.0, 0.0)
Stage = Callable[[Exponents], Sequence[Exponents]]


@dataclass(frozen=True)
class Formula:
    """How exponents become factors.

    Args:
        act: size of a channel's activations: the largest or the mean |x|.
        weight: size of its weights: the largest |w|, or the mean of |w| over the largest of its group.
        floor: smallest factor.
        group: where several query heads share a value channel: the mean of their factors, or one factor from the
            largest of their sizes.
        normalize: centre the factors of a subgraph geometrically on 1.
    """

    act: Literal["absmax", "mean"] = "absmax"
    weight: Literal["absmax", "relative_mean"] = "absmax"
    floor: float = 1e-5
    group: Literal["mean", "max"] = "mean"
    normalize: bool = False


@dataclass(frozen=True)
class Plan:
    """What a preset makes of the engine.

    Args:
        formula: exponents to factors.
        start: exponents of the first stage's argument, or the final ones where there is no stage.
        stages: each gives the exponents to try from the best so far; of equal ones the first wins.
        scheme: how the consumers will be quantized; only used by a search.
        shift: centre the channels of norms, too.
    """

    formula: Formula
    start: Exponents
    stages: tuple[Stage, ...] = ()
    scheme: LinearScheme = LinearScheme(QScheme())  # noqa: RUF009 - frozen
    shift: bool = False

    def needs_gram(self, in_features: int) -> bool:
        """Whether an input of this width is judged by its Gram matrix."""
        return bool(self.stages) and self.scheme.act.is_float and in_features <= _GRAM_COLUMNS

    def needs_tokens(self, in_features: int) -> bool:
        """Whether an input of this width is judged by some of its tokens."""
        return bool(self.stages) and not self.needs_gram(in_features)


@dataclass(frozen=True)
class Case:
    """One subgraph to be scaled, with all that its factors depend on.

    Args:
        subgraph: producer and consumers.
        stats: of the consumers' input.
        act_I: size of each column's activations.
        weight_I: size of each column's weights, over all consumers.
    """

    subgraph: Subgraph
    stats: InputStats
    act_I: Tensor  # noqa: N815 - a tensor's name ends in its axes
    weight_I: Tensor  # noqa: N815

    def factors(self, exponents: Exponents, formula: Formula) -> Tensor:
        """[C]"""
        return channel_factors(self.subgraph, self.act_I, self.weight_I, exponents, formula)


def channel_factors(
    subgraph: Subgraph, act_I: Tensor, weight_I: Tensor, exponents: Exponents, formula: Formula
) -> Tensor:
    """Factor per channel: divide activations by it, multiply weight columns by it. A channel without activations has 1.

    Args:
        act_I: size of each column's activations, 0 or more.
        weight_I: size of each column's weights, 0 or more.

    Returns:
        s_C, in the type of `act_I`.

    Source: SmoothQuant, arXiv:2211.10438, equation 4, with free exponents; AWQ, arXiv:2306.00978, section 3.2.
    """
    act_GC, weight_GC = subgraph.by_channel(act_I), subgraph.by_channel(weight_I)
    if formula.group == "max":
        act_GC, weight_GC = act_GC.amax(0, keepdim=True), weight_GC.amax(0, keepdim=True)
    scaled_GC = act_GC**exponents.act / weight_GC.clamp(min=SMALLEST_WEIGHT) ** exponents.weight
    dead_GC = act_GC == 0
    factor_C = scaled_GC.clamp(min=formula.floor).masked_fill(dead_GC, 1).mean(0)
    live_C = ~dead_GC.all(0)
    if formula.normalize and live_C.any():
        middle = factor_C[live_C].amax().sqrt() * factor_C[live_C].amin().sqrt()
        factor_C = torch.where(live_C, (factor_C / middle).clamp(*_NORMALIZED), factor_C)
    return factor_C


def weight_size(rescale: LayerRescale, names: Sequence[str], formula: Formula, scheme: QScheme) -> Tensor:
    """[I]: how large the weights of each input column are, over all consumers."""
    if formula.weight == "absmax":
        return torch.stack([rescale.absmax(name) for name in names]).amax(0)
    sums, rows = [], 0
    for name in names:
        weight_OI = rescale.weight(name).abs()
        group = scheme.group_size or scheme.dual_block or (MX_BLOCK if scheme.is_mx else 0)
        if not group or weight_OI.shape[1] % group:
            group = weight_OI.shape[1]
        largest = weight_OI.unflatten(1, (-1, group)).amax(2, keepdim=True)
        shares = torch.where(largest > 0, weight_OI.unflatten(1, (-1, group)) / largest, 0.0)
        sums.append(shares.flatten(1).sum(0))
        rows += len(weight_OI)
    return torch.stack(sums).sum(0) / rows


class JudgedRows(NamedTuple):
    """The rows of a consumer's weight that a loss is measured on, and how many rows each of them stands for."""

    weight_RI: Tensor  # noqa: N815 - a tensor's name ends in its axes
    each: float = 1.0


@dataclass(frozen=True)
class Consumers:
    """The linears that a loss is measured at.

    Args:
        rows: full name → rows that are looked at.
        gram_II: sum of w wᵀ over all rows of all of them; with it, what rounding the activations does is measured on
            all rows.
    """

    rows: Mapping[str, JudgedRows]
    gram_II: Tensor | None = None  # noqa: N815 - as above


def judged_rows(rows: int, scheme: QScheme) -> Tensor:
    """Indexes of evenly spaced rows, at most `_JUDGED_ROWS`; all rows where several rows share a scale."""
    if rows <= _JUDGED_ROWS or not (scheme.is_mx or scheme.scope in (QScope.PER_CHANNEL, QScope.PER_GROUP)):
        return torch.arange(rows)
    return torch.arange(_JUDGED_ROWS) * rows // _JUDGED_ROWS


class ExponentSearch:
    """Finds each case's exponents; every rank holds the same numbers and decides alike.

    Args:
        plan: formula, stages and scheme.
        store: sums losses over samples, and over ranks; on the host.
        scale_dtype: type of stored weight scales.
        shared: which modules every rank holds; None without ranks.
    """

    def __init__(self, plan: Plan, store: StatStore, scale_dtype: torch.dtype, shared: DistHelper | None) -> None:
        self._plan = plan
        self._store = store
        self._scale_dtype = scale_dtype
        self._shared = shared

    def choose(self, cases: Sequence[Case], rescale: LayerRescale) -> list[Exponents | None]:
        """The best exponents of each case; None where no loss is finite, as the squares of its inputs overflow.

        Every rank calls it equally often, also without a case of its own.
        """
        best = [self._plan.start] * len(cases)
        judged = [True] * len(cases)
        for stage in self._plan.stages:
            tried = [stage(exponents) for exponents in best]
            losses = self._losses(cases, tried, rescale)
            best = [
                exponents[first_smallest(case_losses)] for exponents, case_losses in zip(tried, losses, strict=True)
            ]
            judged = [
                known and bool(case_losses.isfinite().any()) for known, case_losses in zip(judged, losses, strict=True)
            ]
        return [exponents if known else None for exponents, known in zip(best, judged, strict=True)]

    def _losses(
        self, cases: Sequence[Case], tried: Sequence[Sequence[Exponents]], rescale: LayerRescale
    ) -> list[Tensor]:
        """What rounding costs each case with each of its exponents, float64."""
        plan = self._plan
        tasks: dict[str, Callable[[], Mapping[str, Tensor]]] = {}
        costs: dict[str, float] = {}
        found: list[Tensor | None] = [None] * len(cases)
        for at, (case, exponents) in enumerate(zip(cases, tried, strict=True)):
            subgraph = case.subgraph
            factors = [subgraph.by_column(case.factors(one, plan.formula)) for one in exponents]
            if case.stats.gram_II is None:
                judged = self._consumers(subgraph.targets, rescale)
                for sample, loss in token_losses(case.stats, judged, factors, plan.scheme, self._scale_dtype).items():
                    self._store.add_sum(f"{subgraph.targets[0]}:loss", sample, loss)
            elif self._is_shared(subgraph):
                for number, factor_I in enumerate(factors):
                    name = f"{subgraph.source} {number:03}"
                    tasks[name] = self._gram_task(case, factor_I, rescale)
                    costs[name] = len(subgraph.targets) * float(len(factor_I)) ** 2
            else:
                found[at] = torch.cat([self._gram_task(case, factor_I, rescale)()["loss"] for factor_I in factors])
        summed = self._store.agree(self._shared)
        done = run_tasks(tasks, costs) if plan.scheme.act.is_float else {}
        for at, (case, exponents) in enumerate(zip(cases, tried, strict=True)):
            if case.stats.gram_II is None:
                found[at] = summed[f"{case.subgraph.targets[0]}:loss"].value
            elif found[at] is None:
                found[at] = torch.cat(
                    [done[f"{case.subgraph.source} {number:03}"]["loss"] for number in range(len(exponents))]
                )
        return [losses for losses in found if losses is not None]

    def _gram_task(self, case: Case, factor_I: Tensor, rescale: LayerRescale) -> Callable[[], Mapping[str, Tensor]]:
        def loss() -> Mapping[str, Tensor]:
            assert case.stats.gram_II is not None, "only cases with a Gram matrix are judged by one"
            total = torch.zeros(1, dtype=torch.float64)
            for name in case.subgraph.targets:
                judged = self._judged(name, rescale)
                total += gram_loss(
                    judged, case.stats.gram_II, factor_I, self._plan.scheme.weight, self._scale_dtype, name
                )
            return {"loss": total}

        return loss

    def _consumers(self, names: Sequence[str], rescale: LayerRescale) -> Consumers:
        rows, columns = sum(map(rescale.rows, names)), rescale.columns(names[0])
        if rows <= columns:
            return Consumers({name: JudgedRows(rescale.weight(name)) for name in names})
        judged = {name: self._judged(name, rescale) for name in names}
        if columns > _GRAM_COLUMNS or all(one.each == 1 for one in judged.values()):
            return Consumers(judged)
        return Consumers(judged, torch.stack([rescale.gram_of_rows(name) for name in names]).sum(0))

    def _judged(self, name: str, rescale: LayerRescale) -> JudgedRows:
        rows = rescale.rows(name)
        rows_R = judged_rows(rows, self._plan.scheme.weight)
        return JudgedRows(rescale.weight(name, rows_R), rows / len(rows_R))

    def _is_shared(self, subgraph: Subgraph) -> bool:
        return self._shared is None or self._shared.is_shared(subgraph.source)


def token_losses(
    stats: InputStats,
    consumers: Consumers,
    factors: Sequence[Tensor],
    scheme: LinearScheme,
    scale_dtype: torch.dtype,
) -> dict[int, Tensor]:
    """‖x̂Ŵᵀ − xWᵀ‖² over a sample's kept tokens and all consumers, for each factor: sample → float64 [factors].

    A sample is computed for itself, so its numbers do not depend on which others a rank holds.

    Args:
        factors: s_I each.
    """
    gram_II, losses = consumers.gram_II, {sample: list[Tensor]() for sample in stats.tokens}
    exact = {
        sample: [0.0 if gram_II is not None else wide(x_TI) @ rows.weight_RI.T for rows in consumers.rows.values()]
        for sample, x_TI in stats.tokens.items()
    }
    for factor_I in factors:
        scale, offset = None, None
        if scheme.act.is_static:
            low, high = (stats.minimum_I / factor_I).amin(), (stats.maximum_I / factor_I).amax()
            scale, offset = act_qparam(low, high, scheme.act, scale_dtype=scale_dtype)
        multiplied = []
        for name, rows in consumers.rows.items():
            rounded_RI = _rounded(rows.weight_RI * factor_I, scheme.weight, scale_dtype, name)
            multiplied.append(rounded_RI if gram_II is None else rounded_RI - rows.weight_RI * factor_I)
        for sample, x_TI in stats.tokens.items():
            seen_TI = fake_quantize_act(wide(x_TI) / factor_I, scheme.act, scale, offset)
            lost = torch.zeros((), dtype=torch.float64)
            if gram_II is not None:
                off_TI = seen_TI * factor_I - wide(x_TI)
                lost += _total((off_TI @ gram_II).mul_(off_TI))
            for weight_RI, rows, y_TR in zip(multiplied, consumers.rows.values(), exact[sample], strict=True):
                lost += _total((seen_TI @ weight_RI.T).sub_(y_TR).square_()) * rows.each
            losses[sample].append(lost)
    return {sample: torch.stack(found) for sample, found in losses.items()}


def _total(x_TN: Tensor) -> Tensor:
    """The sum of all elements, rows in float64, on the host."""
    return x_TN.sum(1).cpu().double().sum()


def gram_loss(
    judged: JudgedRows, gram_II: Tensor, factor_I: Tensor, scheme: QScheme, scale_dtype: torch.dtype, name: str
) -> float:
    """tr(Δ H Δᵀ) with Δ = Ŵ(Ws)/s − W: what rounding the scaled weight does to its outputs, over all tokens of H."""
    delta_RI = _rounded(judged.weight_RI * factor_I, scheme, scale_dtype, name) / factor_I - judged.weight_RI
    return float(((delta_RI @ gram_II) * delta_RI).sum(1).double().sum()) * judged.each


def first_smallest(losses: Tensor) -> int:
    """Index of the smallest loss, the first of equal ones; an infinity or a NaN is never smaller than a number."""
    values = losses.nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()
    return values.index(min(values))


def _rounded(weight_OI: Tensor, scheme: QScheme, scale_dtype: torch.dtype, name: str) -> Tensor:
    """The weight that the codes will stand for, in the type of `weight_OI`."""
    return dequantize_weight(quantize_weight(weight_OI, scheme, scale_dtype=scale_dtype, name=name), scheme).to(
        weight_OI.dtype
    )
