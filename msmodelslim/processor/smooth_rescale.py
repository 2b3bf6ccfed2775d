"""The change that smoothing makes to a layer: factors collected module by module, tried, and put in place at the end.

A module's output may be divided by a factor a row (it is a producer) and its input columns multiplied by a factor a
column (it is a consumer). Both are kept until all subgraphs are decided, so a tensor is rounded to its own type once.
Nothing is written into the old tensors: they may be views of the checkpoint.

Letters: C channels of a norm, I input columns, O output rows, R rows of a chunk.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from msmodelslim.processor.smooth_subgraphs import Subgraph, SubgraphKind, norm_offset, own_parameters

_CHUNK_ELEMENTS = 2**22  # of a weight that is computed in float32 at a time: 16 MiB


@dataclass(frozen=True)
class Change:
    """What happens to one module: y → (y + plus) / divide, and its input columns times multiply. None leaves alone."""

    divide_O: Tensor | None = None  # noqa: N815 - a tensor's name ends in its axes
    plus_O: Tensor | None = None  # noqa: N815
    multiply_I: Tensor | None = None  # noqa: N815


class LayerRescale:
    """The factors of one layer's modules so far, and the tensors that follow from them.

    Args:
        modules: full name → module, of the whole layer.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._changes: dict[str, Change] = {}
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._scales: dict[str, Tensor] = {}  # full name of each module in front of a linear without a producer

    def weight(self, name: str, rows_R: Tensor | None = None) -> Tensor:
        """A linear's weight as it stands, with all factors so far; float32, or float64 if the weight is.

        Args:
            rows_R: indexes of the rows that are wanted; all when None.
        """
        weight_OI, change = self._modules[name].get_parameter("weight"), self._changes.get(name, Change())
        if rows_R is None:
            return _rescaled(wide(weight_OI), change)
        return _rescaled(wide(weight_OI[rows_R]), _of_rows(change, rows_R))

    def rows(self, name: str) -> int:
        """How many rows a linear's weight has."""
        return self._modules[name].get_parameter("weight").shape[0]

    def columns(self, name: str) -> int:
        """How many columns a linear's weight has."""
        return self._modules[name].get_parameter("weight").shape[1]

    def gram_of_rows(self, name: str) -> Tensor:
        """Sum of w wᵀ over the rows of a linear's weight, with all factors so far; [I, I]."""
        weight_OI, change = self._modules[name].get_parameter("weight"), self._changes.get(name, Change())
        columns = weight_OI.shape[1]
        total_II = torch.zeros(columns, columns, dtype=wide(weight_OI[:0]).dtype, device=weight_OI.device)
        for rows in _chunks(weight_OI):
            part_RI = _rescaled(wide(weight_OI[rows]), _of_rows(change, rows))
            total_II.addmm_(part_RI.T, part_RI)
        return total_II

    def absmax(self, name: str) -> Tensor:
        """Largest |weight| in each input column, with all factors so far; [I]."""
        weight_OI, change = self._modules[name].get_parameter("weight"), self._changes.get(name, Change())
        largest = [
            _rescaled(wide(weight_OI[rows]), _of_rows(change, rows)).abs().amax(0) for rows in _chunks(weight_OI)
        ]
        return torch.stack(largest).amax(0)

    def apply(self, subgraph: Subgraph, factor_C: Tensor, shift_C: Tensor | None = None) -> str:
        """Take `shift_C` from the producer's channels, divide them by `factor_C`, and make up for it at the consumers.

        Every tensor that this changes is computed and looked at first; if one cannot hold the result in its own type,
        nothing happens.

        Args:
            factor_C: above 0.
            shift_C: only for a norm whose linears all have a bias.

        Returns:
            Why nothing was changed; "" when all was.
        """
        source = self._modules[subgraph.source]
        scales: dict[str, Tensor] = {}
        tried: dict[str, Change] = {}
        if subgraph.kind is SubgraphKind.NON_FUSION:
            scales, factor_C = self._input_scales(subgraph, factor_C)
            if not all(torch.isfinite(scale_I).all() and (scale_I > 0).all() for scale_I in scales.values()):
                return f"its type cannot hold the scales in front of {', '.join(subgraph.targets)}"
        elif subgraph.kind is SubgraphKind.NORM_LINEAR:
            factor_C = _storable_factor(source, subgraph.source, factor_C)
            tried = {subgraph.source: Change(factor_C, None if shift_C is None else -shift_C)}
        else:
            divide_O = subgraph.by_row(factor_C, source.get_parameter("weight").shape[0])
            tried = {subgraph.source: self._with(subgraph.source, divide_O=divide_O)}
        for name in subgraph.targets:
            plus_O = None if shift_C is None else wide(self._modules[name].get_parameter("weight")) @ shift_C
            tried[name] = self._with(name, multiply_I=subgraph.by_column(factor_C), plus_O=plus_O)
        tensors = {}
        for name, change in tried.items():
            tensors[name], problem = _new_tensors(self._modules[name], name, change)
            if problem:
                return problem
        self._changes |= tried
        self._tensors |= tensors
        self._scales |= scales
        return ""

    def _input_scales(self, subgraph: Subgraph, factor_C: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """New scales in front of the linears, and the factor that they really divide by, as they are rounded."""
        scales = {}
        for name in subgraph.targets:
            div = f"{name.removesuffix('.linear')}.div"
            before_I = self._modules[div].get_buffer("mul_scale")
            scales[div] = (wide(before_I) / factor_C).to(before_I.dtype)
        return scales, wide(before_I) / wide(scales[div])

    def input_factors(self) -> dict[str, Tensor]:
        """Linear → what the columns of its input are divided by, [I], of all that is not yet put in place."""
        return {name: one.multiply_I for name, one in self._changes.items() if one.multiply_I is not None}

    def commit(self) -> list[str]:
        """Put the new tensors in place of the old ones; returns their full names."""
        changed = []
        for name in list(self._tensors):
            for key, tensor in self._tensors.pop(name).items():
                setattr(self._modules[name], key, nn.Parameter(tensor, requires_grad=False))
                changed.append(f"{name}.{key}")
        self._changes.clear()
        for div in list(self._scales):
            self._modules[div].mul_scale = self._scales.pop(div)
            changed.append(f"{div}.mul_scale")
        return changed

    def _with(self, name: str, **parts: Tensor | None) -> Change:
        before = self._changes.get(name, Change())
        for part in parts:
            assert vars(before)[part] is None or parts[part] is None, f"{name} is a member of two subgraphs of one kind"
        return replace(before, **{part: value for part, value in parts.items() if value is not None})


def wide(x: Tensor) -> Tensor:
    """x in the type that is computed in: float32, or float64 if x is."""
    return x if x.dtype is torch.float64 else x.float()


def _storable_factor(norm: nn.Module, name: str, factor_C: Tensor) -> Tensor:
    """The factor that the norm really divides by once its new weight is rounded: with it the norm adds no error."""
    weight_C = norm.get_parameter("weight")
    offset = norm_offset(norm, name)
    gain_C = offset + wide(weight_C)
    new_C = offset + wide((gain_C / factor_C - offset).to(weight_C.dtype))
    real_C = gain_C / new_C
    # A gain that rounds to 0 cannot be undone, so that channel keeps its own; a gain of 0 takes any factor.
    usable_C = torch.isfinite(real_C) & (real_C > 0)
    return torch.where(usable_C, real_C, torch.where(gain_C == 0, factor_C, 1.0))


def _new_tensors(module: nn.Module, name: str, change: Change) -> tuple[dict[str, Tensor], str]:
    """The module's tensors after the change, in their own types; and why they cannot be, or ""."""
    old = own_parameters(module)
    weight = old["weight"]
    new: dict[str, Tensor] = {"weight": torch.empty_like(weight, memory_format=torch.contiguous_format)}
    if weight.dim() == 1:
        assert change.divide_O is not None, "a norm is only ever a producer"
        offset = norm_offset(module, name)
        gain_C = offset + wide(weight)
        new["weight"].copy_(gain_C / change.divide_O - offset)
        kept = torch.isfinite(new["weight"]).all() and _is_kept(offset + wide(new["weight"]), gain_C, change, weight)
    else:
        kept = True
        for rows in _chunks(weight):
            part_RI, part_change = wide(weight[rows]), _of_rows(change, rows)
            new["weight"][rows] = _rescaled(part_RI, part_change)
            kept = kept and _is_kept(wide(new["weight"][rows]), part_RI, part_change, weight)
    if "bias" in old:
        bias_O = wide(old["bias"])
        if change.plus_O is not None:
            bias_O = bias_O + change.plus_O
        if change.divide_O is not None:
            bias_O = bias_O / change.divide_O
        new["bias"] = bias_O.to(old["bias"].dtype)
        kept = kept and bool(torch.isfinite(new["bias"]).all())
    if kept:
        return new, ""
    word = str(weight.dtype).removeprefix("torch.")
    return {}, f"{word} cannot hold {name} once its channels are scaled by {_span(change)}"


def _rescaled(weight_RI: Tensor, change: Change) -> Tensor:
    if change.multiply_I is not None:
        weight_RI = weight_RI * change.multiply_I
    return weight_RI if change.divide_O is None else weight_RI / change.divide_O.unsqueeze(1)


def _is_kept(new: Tensor, old: Tensor, change: Change, weight: Tensor) -> bool:
    """Whether undoing the factors gives the old values but for rounding, seen over rows and over columns."""
    if not torch.isfinite(new).all():
        return False
    back = new if change.divide_O is None else new * _shaped(change.divide_O, new)
    back = back if change.multiply_I is None else back / change.multiply_I
    bound = 4 * torch.finfo(weight.dtype).eps
    return all(
        bool((torch.linalg.vector_norm(back - old, dim=dim) <= bound * torch.linalg.vector_norm(old, dim=dim)).all())
        for dim in range(old.dim())
    )


def _shaped(per_row: Tensor, like: Tensor) -> Tensor:
    return per_row if like.dim() == 1 else per_row.unsqueeze(1)


def _of_rows(change: Change, rows: slice | Tensor) -> Change:
    return change if change.divide_O is None else replace(change, divide_O=change.divide_O[rows])


def _chunks(weight_OI: Tensor) -> Iterator[slice]:
    rows, columns = weight_OI.shape
    step = max(_CHUNK_ELEMENTS // max(columns, 1), 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _span(change: Change) -> str:
    factors = change.multiply_I if change.divide_O is None else 1 / change.divide_O
    assert factors is not None, "a change without factors is not tried"
    return f"{float(factors.min()):.3g} to {float(factors.max()):.3g}"
