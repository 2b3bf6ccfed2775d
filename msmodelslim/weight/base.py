"""What every weight method is: a weight, its scheme and what is known of its inputs become codes.

A method is never worse than min-max rounding by its own objective: it compares, block by block or row by row, and keeps
the better one.

Letters: O output rows, I input columns.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.mx import floor_log2
from msmodelslim.ir.quantize import WeightCodes, quantize_weight, refuse_shape
from msmodelslim.ir.scheme import MX_BLOCK, LinearScheme, QScheme


@dataclass(frozen=True)
class Gram:
    """What calibration says of a linear's inputs.

    Args:
        sum_II: XᵀX over all tokens of all ranks, float32 [I, I]; its diagonal alone, [I], is enough for a method whose
            `diagonal_suffices`. On the weight's device.
        tokens: how many rows X has; 0 when no token reached the linear.
        first_bad: number of the first calibration sample that makes the sums infinite or NaN, for errors.
        prepared: what a method derives of the matrix and wants again. Give linears with the same input the same object.
    """

    sum_II: Tensor  # noqa: N815 - a tensor's name ends in its axes
    tokens: int
    first_bad: int | None = None
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def diagonal(self) -> Tensor:
        """Sum of squares of each input column, [I]."""
        return self.sum_II if self.sum_II.dim() == 1 else self.sum_II.diagonal()


@dataclass(frozen=True)
class Rounded:
    """A rounded weight.

    Args:
        codes: the result.
        record: plain data for the report: "objective" and "objective_minmax" (what the method minimises, for its
            result and for min-max rounding), and where the method could not do its work "fallback" (the method used
            instead) and "why".
    """

    codes: WeightCodes
    record: dict[str, Any]


class WeightMethod(ABC):
    """One way to choose scales and codes. Its frozen nested `Ext` is the schema of `weight.ext` in a recipe."""

    kind: ClassVar[str] = "weight"
    registered_name: ClassVar[str]
    #: whether `quantize` wants a `Gram`; an option may turn it on, so ask the instance
    needs_gram: bool = False
    #: whether the diagonal of the Gram matrix is all that is read of it
    diagonal_suffices: bool = True

    class Ext(BaseModel, frozen=True, extra="forbid"):
        group_size: Annotated[int, Field(ge=1)] | None = Field(
            None, description="columns that share a scale; per_group only, 128 when left out"
        )
        dual_block_size: Annotated[int, Field(ge=MX_BLOCK, multiple_of=MX_BLOCK)] | None = Field(
            None, description="columns that share the outer scale; dual_scale only, 512 when left out"
        )
        axes: Literal[-1] = Field(-1, description="MX: the axis that blocks lie along, the last one, as it is stored")
        two_level: bool = Field(False, description="int4 groups with integer scales inside int8 channels")

    def __init__(self, ext: Any) -> None:
        self.ext = ext

    @classmethod
    @abstractmethod
    def supports(cls, scheme: QScheme) -> bool:
        """Whether this method can round a weight of the scheme."""

    @abstractmethod
    def cost(self, out_features: int, in_features: int) -> float:
        """Work of one weight in arbitrary units, comparable among methods, for dealing linears to ranks."""

    @abstractmethod
    def quantize(
        self,
        weight_OI: Tensor,
        scheme: QScheme,
        *,
        scale_dtype: torch.dtype = torch.float32,
        name: str = "weight",
        gram: Gram | None = None,
    ) -> Rounded:
        """Codes of a weight.

        Args:
            weight_OI: any float type.
            scheme: one that `supports` says yes to.
            scale_dtype: the type the scale will be stored in; the scale is rounded to it before codes are chosen.
            name: module, for errors.
            gram: of the linear's inputs; read only when `needs_gram`.

        Raises:
            UnsupportedError: the method has no such scheme, or groups that do not divide the columns.
            InvalidModelError: the weight or the Gram matrix holds an infinity or a NaN.
            ValueError: the Gram matrix has another size than the weight's columns.
        """

    def refuse_scheme(self, scheme: QScheme, name: str) -> None:
        """Raise `UnsupportedError` for a scheme that the method does not do."""
        if not self.supports(scheme):
            raise UnsupportedError(
                f"{name}: weight method {self.registered_name} has no {scheme}", "use method minmax or another scheme"
            )


def refuse_weight(weight_OI: Tensor, scheme: QScheme, name: str) -> None:
    """Raise what cannot be rounded: a shape that the scheme does not fit, or an infinity or a NaN.

    Raises:
        UnsupportedError: groups that do not divide the columns; names the module and the mend.
        InvalidModelError: the weight is not finite; names the module and how many.
    """
    rows, columns = weight_OI.shape
    refuse_shape(LinearScheme(scheme), rows, columns, name)
    if not _is_finite(weight_OI):
        quantize_weight(weight_OI, scheme, name=name)  # its error names module and count
        raise AssertionError(f"{name}: quantize_weight accepts a weight that is not finite")


def refuse_gram(gram: Gram, in_features: int, name: str) -> None:
    """Raise what is wrong with a Gram matrix.

    Raises:
        InvalidModelError: it is not finite; names the module.
        ValueError: it has another size than the weight's columns.
    """
    if gram.sum_II.shape not in ((in_features,), (in_features, in_features)):
        raise ValueError(f"{name}: a Gram matrix {tuple(gram.sum_II.shape)} for {in_features} input features")
    if not _is_finite(gram.sum_II):
        raise InvalidModelError(
            f"{name}: the sums of squares of its inputs are not finite"
            + ("" if gram.first_bad is None else f", from calibration sample {gram.first_bad} on"),
            "take the sample out whose activations overflow, or exclude the module",
        )


def _is_finite(x: Tensor) -> bool:
    low, high = x.aminmax()  # which hand a NaN on; many times faster than a mask
    return bool(low.isfinite() & high.isfinite())


def importance(gram: Gram | None, in_features: int, name: str) -> Tensor | None:
    """Mean square of each input column, float32 [I], relative to the mean over columns; None when nothing is known.

    Columns that saw only zeros count a millionth, so that their weights still get a sensible scale.
    """
    if gram is None or gram.tokens == 0:
        return None
    refuse_gram(gram, in_features, name)
    diagonal_I = gram.diagonal().float()
    mean = diagonal_I.mean()
    return None if mean <= 0 else (diagonal_I / mean).clamp_(min=1e-6)


def unit_of(absmax: Tensor) -> Tensor:
    """A power of two near each value above 0: dividing by it is exact, and keeps squares finite and above zero."""
    return torch.ldexp(torch.ones_like(absmax), floor_log2(absmax).clamp(-100, 100))


def improvement(objective: float, objective_minmax: float) -> dict[str, Any]:
    """The two objectives as the record states them; refuses to be worse."""
    assert not objective > objective_minmax * (1 + 1e-6), f"worse than min-max: {objective} > {objective_minmax}"
    assert math.isfinite(objective), "the objective is not finite although weight and statistics are"
    return {"objective": objective, "objective_minmax": objective_minmax}
