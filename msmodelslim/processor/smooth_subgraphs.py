"""Where a factor a channel can move from an activation into weights: a producer and its consumers.

The producer's channel c is divided by s_c and the matching columns of every consumer are multiplied by it, so the layer
computes what it did. Four kinds of producer allow that without work at run time; a norm with other readers than the
listed ones does not (`NormReaders` finds them), since engines have no multiplication to put in front of a linear. Where
a model's structure asks for one all the same, the linear is wrapped (`non-fusion`), and savers refuse it by name.

Letters: T tokens, C channels with a factor, I input columns of a consumer, O output rows, K key-value heads, G query
heads of one key-value head, D head width.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.input_scale import ScaledInputLinear
from msmodelslim.model.structure import LayerStructure
from msmodelslim.observer.watcher import Watcher


class SubgraphKind(StrEnum):
    """Words of recipes, in the order in which a layer's subgraphs are scaled."""

    UP_DOWN = "up-down"
    OV = "ov"
    LINEAR_LINEAR = "linear-linear"
    NORM_LINEAR = "norm-linear"
    #: no producer: the input is multiplied at run time. Not a word of recipes: it is there where a structure lists it
    NON_FUSION = "non-fusion"


@dataclass(frozen=True)
class Subgraph:
    """One producer and the consumers of its output; names are full module paths.

    Args:
        kind: what the producer is.
        source: the producer; the first consumer where there is none.
        targets: the consumers; statistics are taken from the input of the first.
        share: consumer columns that one channel feeds: query heads of a key-value head for `ov`, else 1.
        head_width: channels of one head for `ov`.
        heads: key-value heads for `ov`.
        rows: (start, stop) of the source's rows that carry the channels, in their order; empty for all rows.
    """

    kind: SubgraphKind
    source: str
    targets: tuple[str, ...]
    share: int = 1
    head_width: int = 1
    heads: int = 0
    rows: tuple[tuple[int, int], ...] = ()

    def by_channel(self, per_column_I: Tensor) -> Tensor:
        """[G, C]: what belongs to each channel, one row a query head that shares it."""
        return per_column_I.reshape(-1, self.share, self.head_width).transpose(0, 1).flatten(1)

    def by_column(self, per_channel_C: Tensor) -> Tensor:
        """[I]: each channel's value at every consumer column that the channel feeds."""
        return per_channel_C.reshape(-1, 1, self.head_width).expand(-1, self.share, -1).flatten()

    def by_row(self, per_channel_C: Tensor, rows: int) -> Tensor:
        """[O]: each channel's value at its row of the source, 1 at rows without a channel."""
        if not self.rows:
            return per_channel_C
        index = torch.cat([torch.arange(start, stop) for start, stop in self.rows]).to(per_channel_C.device)
        return per_channel_C.new_ones(rows).index_copy_(0, index, per_channel_C)


def declared(structure: LayerStructure, layer: str, kinds: Iterable[str]) -> list[Subgraph]:
    """The subgraphs of a layer that are of one of these kinds, in the order in which they are scaled.

    A norm that the structure lists several times is one subgraph with all its linears.

    Raises:
        UnsupportedError: a module is the producer, or a consumer, of two of them: its channels can move once.
    """

    def full(name: str) -> str:
        return f"{layer}.{name}"

    readers: dict[str, tuple[str, ...]] = {}
    for norm, linears in structure.norm_linears:
        readers[norm] = tuple(dict.fromkeys((*readers.get(norm, ()), *linears)))
    share = structure.heads // structure.kv_heads if structure.kv_heads else 0
    found = [Subgraph(SubgraphKind.UP_DOWN, full(up), (full(down),)) for up, down in structure.up_down]
    found += [
        Subgraph(
            SubgraphKind.OV,
            full(v),
            (full(o),),
            share,
            structure.head_width,
            structure.kv_heads,
            structure.value_rows,
        )
        for v, o in structure.ov
    ]
    found += [Subgraph(SubgraphKind.LINEAR_LINEAR, full(one), (full(two),)) for one, two in structure.linear_linear]
    found += [
        Subgraph(SubgraphKind.NORM_LINEAR, full(norm), tuple(map(full, linears))) for norm, linears in readers.items()
    ]
    found += [
        Subgraph(SubgraphKind.NON_FUSION, full(linears[0]), tuple(map(full, linears))) for linears in structure.unfused
    ]
    wanted = set(kinds)
    chosen = [subgraph for subgraph in found if subgraph.kind in wanted]
    _refuse_twice("source", [(one.source, one) for one in chosen])
    _refuse_twice("consumer", [(target, one) for one in chosen for target in one.targets])
    return chosen


def _refuse_twice(role: str, members: Iterable[tuple[str, Subgraph]]) -> None:
    seen: dict[str, Subgraph] = {}
    for name, subgraph in members:
        other = seen.setdefault(name, subgraph)
        if other is not subgraph:
            raise UnsupportedError(
                f"{name} is the {role} of two subgraphs: {other.kind} {other.source} -> {', '.join(other.targets)} and "
                f"{subgraph.kind} {subgraph.source} -> {', '.join(subgraph.targets)}",
                "list it once in the model's structure(), or leave one kind out of enable_subgraph_type",
            )


def refuse_subgraph(subgraph: Subgraph, modules: Mapping[str, nn.Module], shifted: bool) -> None:
    """Raise what cannot work, from the modules' kinds and shapes alone; tensors may be on `meta`.

    Args:
        modules: full name → module, of the whole layer.
        shifted: the channels are to be centred too, which needs a bias at the norm and at each of its linears.

    Raises:
        UnsupportedError: a member is missing, has no float weight matrix or another width than the others; value rows
            overlap or lie outside the source; a norm computes something else than (k + weight)·n(x) + bias; a bias is
            missing. Names subgraph, module and mend.
    """
    mend = f"exclude {subgraph.source} from smoothing"
    place = f"{subgraph.kind} {subgraph.source} -> {', '.join(subgraph.targets)}"
    if not subgraph.targets:
        raise UnsupportedError(f"{place}no linear that reads it is listed", mend)
    widths = {name: _matrix_shape(name, modules, mend)[1] for name in subgraph.targets}
    if subgraph.kind is SubgraphKind.NORM_LINEAR:
        if subgraph.source not in modules:
            raise UnsupportedError(f"{subgraph.source}: the layer has no such module", mend)
        norm_offset(modules[subgraph.source], subgraph.source)
        channels = modules[subgraph.source].get_parameter("weight").numel()
    elif subgraph.kind is SubgraphKind.NON_FUSION:
        channels = widths[subgraph.targets[0]]
    else:
        rows = _matrix_shape(subgraph.source, modules, mend)[0]
        carrying = [row for start, stop in subgraph.rows for row in range(start, stop)]
        if len(set(carrying)) < len(carrying) or not set(carrying) <= set(range(rows)):
            ranges = ", ".join(f"{start} to {stop}" for start, stop in subgraph.rows)
            raise UnsupportedError(f"{place}: value rows {ranges} overlap, or {subgraph.source} has not so many", mend)
        channels = len(carrying) if subgraph.rows else rows
        if subgraph.kind is SubgraphKind.OV and channels != subgraph.heads * subgraph.head_width:
            raise UnsupportedError(
                f"{place}: {channels} value channels are not {subgraph.heads} key-value heads of {subgraph.head_width}",
                mend,
            )
    for name, width in widths.items():
        if width != channels * subgraph.share:
            times = f" times {subgraph.share} heads that share them" if subgraph.share != 1 else ""
            raise UnsupportedError(f"{place}: {name} has {width} columns for {channels} channels{times}", mend)
    if shifted and subgraph.kind is SubgraphKind.NORM_LINEAR:
        without = [name for name in (subgraph.source, *subgraph.targets) if "bias" not in own_parameters(modules[name])]
        if without:
            raise UnsupportedError(
                f"{place}: symmetric: false needs a bias everywhere, and {', '.join(without)} has none "
                "(an engine would drop an invented one)",
                f"write symmetric: true, or {mend}",
            )


def open_inputs(subgraph: Subgraph, layer: nn.Module, prefix: str) -> Subgraph:
    """The subgraph with a place for factors in front of its consumers, where it has no producer; else as it is.

    Args:
        layer: whose linears are wrapped, unless an earlier step did.
        prefix: its full name.
    """
    if subgraph.kind is not SubgraphKind.NON_FUSION:
        return subgraph
    modules = dict(layer.named_modules(prefix=prefix))
    targets = []
    for name in subgraph.targets:
        module = modules.get(name)
        if isinstance(module, nn.Linear):
            layer.set_submodule(name.removeprefix(f"{prefix}."), ScaledInputLinear(module))
        targets.append(f"{name}.linear" if isinstance(module, (nn.Linear, ScaledInputLinear)) else name)
    return replace(subgraph, targets=tuple(targets))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the module itself holds, by key."""
    return dict(module.named_parameters(recurse=False))


def norm_offset(norm: nn.Module, name: str) -> int:
    """k of a norm that computes (k + weight)·n(x) + bias, with or without the bias: 0 for most, 1 for Gemma's kind.

    Asked of the module itself, with made-up parameters: neither the class's name nor real tensors matter.

    Raises:
        UnsupportedError: the module computes something else.
    """
    shapes = {key: parameter.shape for key, parameter in own_parameters(norm).items()}
    error = UnsupportedError(
        f"{name}: {type(norm).__name__} computes neither weight·n(x) nor (1 + weight)·n(x), so its channels cannot be "
        "scaled",
        f"exclude {name} from smoothing",
    )
    if "weight" not in shapes or not shapes.keys() <= {"weight", "bias"} or len(shapes["weight"]) != 1:
        raise error
    channels = shapes["weight"].numel()
    ramp_C = torch.linspace(0.5, 1.5, channels, dtype=torch.float64)
    x_TC = torch.linspace(-1, 2, 3 * channels, dtype=torch.float64).square().reshape(3, channels)

    def call(weight_C: Tensor, bias_C: Tensor) -> Tensor:
        tensors = {"weight": weight_C} | ({"bias": bias_C} if "bias" in shapes else {})
        return torch.func.functional_call(norm, tensors, (x_TC,)).double()

    zero_C, one_C = torch.zeros_like(ramp_C), torch.ones_like(ramp_C)
    try:
        at_zero = call(zero_C, zero_C)
        normed = call(one_C, zero_C) - at_zero
        ramped = call(ramp_C, -ramp_C)
    except TypeError as mismatch:  # it is called with more than the hidden states
        raise error from mismatch
    bias_C = -ramp_C if "bias" in shapes else zero_C
    for offset in (0, 1):
        expected = torch.cat((offset * normed, (offset + ramp_C) * normed + bias_C))
        found = torch.cat((at_zero, ramped))
        if normed.any() and torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(normed.abs().max())):
            return offset
    raise error


class NormReaders(Watcher):
    """Which modules with weights are handed the output of a norm, seen during the first sample of a forward.

    Args:
        layer: the layer, whose modules are watched.
        prefix: its full name.
        norms: full names of the norms.
        sample_id: says which sample is being forwarded.
    """

    def __init__(self, layer: nn.Module, prefix: str, norms: Iterable[str], sample_id: Callable[[], int]) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = {name: set() for name in norms}
        self._sample_id = sample_id
        self._first: int | None = None
        self._outputs: dict[str, Tensor] = {}
        for name, module in layer.named_modules(prefix=prefix):
            if name in self.found:
                self._handles.append(module.register_forward_hook(self._keeper(name)))
            elif own_parameters(module) and not any(True for _ in module.children()):
                self._handles.append(module.register_forward_pre_hook(self._watcher(name), with_kwargs=True))

    def close(self) -> None:
        """Take the hooks away and forget the outputs."""
        super().close()
        self._outputs.clear()

    def refuse_others(self, subgraphs: Iterable[Subgraph]) -> None:
        """Raise where a norm has a reader that its subgraph does not list.

        Raises:
            UnsupportedError: names norm, reader and mend.
        """
        for subgraph in subgraphs:
            others = self.found.get(subgraph.source, set()) - set(subgraph.targets)
            if others:
                raise UnsupportedError(
                    f"{subgraph.source}: {', '.join(sorted(others))} reads its output, too, and is not among the "
                    f"linears of the norm ({', '.join(subgraph.targets)}); scaling those alone would need a "
                    "multiplication at run time, which engines lack",
                    f"list every reader in the model's structure(), or exclude {subgraph.source} from smoothing",
                )

    def _is_first(self) -> bool:
        if self._first is None:
            self._first = self._sample_id()
        return self._first == self._sample_id()

    def _keeper(self, norm: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            self._outputs.pop(norm, None)
            if self._is_first() and isinstance(output, Tensor):
                self._outputs[norm] = output  # held, so that no other tensor can take its place in memory

        return keep

    def _watcher(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [x.untyped_storage().data_ptr() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            for norm, output in self._outputs.items():
                if output.untyped_storage().data_ptr() in given:
                    self.found[norm].add(name)

        return watch


def _matrix_shape(name: str, modules: Mapping[str, nn.Module], mend: str) -> torch.Size:
    if name not in modules:
        raise UnsupportedError(f"{name}: the layer has no such module", mend)
    weight = own_parameters(modules[name]).get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        raise UnsupportedError(
            f"{name}: a {type(modules[name]).__name__} has no float weight matrix to scale",
            f"put smoothing before the steps that quantize, or {mend}",
        )
    return weight.shape
