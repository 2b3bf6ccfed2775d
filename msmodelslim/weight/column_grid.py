"""Rounding of a weight column by column, with scales that are fixed beforehand, for every scheme alike.

A column's value is steps·scale, where steps is the code minus the offset of an integer, or what a float code stands
for.

Letters: O output rows, I input columns (in any order), S stretches of columns that share scales.
"""

import torch
from torch import Tensor

from msmodelslim.ir.mx import e2m1_round, e2m1_values, e4m3_round, power_of_two, spread
from msmodelslim.ir.qparam import INT_RANGE
from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import MX_BLOCK, QDType, QScheme, QScope

_INT8_MAX = 127  # that a two-level weight may reach between its levels


class ColumnGrid:
    """The values that each column of some rows may take.

    Args:
        scheme: of the weight.
        codes: only scales and offsets are read.
        order_I: the original number of each column, in the order in which columns will be rounded.
        unit_O: what each row's values are divided by.
    """

    def __init__(self, scheme: QScheme, codes: WeightCodes, order_I: Tensor, unit_O: Tensor) -> None:
        self._scheme = scheme
        self._range = INT_RANGE.get(scheme.dtype)
        rows, columns = codes.codes_OI.shape
        #: in units of the row, [S, O]
        self.scale_SO = _of_rows(scheme, _scales(scheme, codes), rows) / unit_O
        offset = codes.offset if codes.offset_second is None else codes.offset_second
        self.offset_SO = None if offset is None else _of_rows(scheme, offset, rows)
        second = codes.scale_second
        self._limit_SO = (
            (_INT8_MAX / second).floor_().T.contiguous() if scheme.two_level and second is not None else None
        )
        #: stretch of each column, in rounding order
        self.stretch_I = order_I // stretch_width(scheme, columns)
        self._stretches: list[int] = self.stretch_I.tolist()

    def round(self, target_O: Tensor, column: int) -> Tensor:
        """Nearest steps to a column's wished-for values, float32 [O]."""
        stretch = self._stretches[column]
        scaled_O = target_O / self.scale_SO[stretch]
        if self._range is None:
            return _round_float(scaled_O, self._scheme.dtype)
        if self.offset_SO is None:
            steps_O = scaled_O.round_().clamp_(*self._range)
        else:
            offset_O = self.offset_SO[stretch]
            steps_O = scaled_O.add_(offset_O).round_().clamp_(*self._range).sub_(offset_O)
        if self._limit_SO is not None:
            steps_O = torch.maximum(torch.minimum(steps_O, self._limit_SO[stretch]), -self._limit_SO[stretch])
        return steps_O

    def value(self, steps_O: Tensor, column: int) -> Tensor:
        """What a column's steps stand for."""
        return steps_O * self.scale_SO[self._stretches[column]]

    def codes(self, steps_IO: Tensor) -> Tensor:
        """Codes of steps, in the type of the format, [I, O]."""
        if self._range is None:
            return e2m1_round(steps_IO) if self._scheme.dtype is QDType.MXFP4 else e4m3_round(steps_IO)
        return (steps_IO if self.offset_SO is None else steps_IO + self.offset_SO[self.stretch_I]).to(torch.int8)

    def values(self, codes_IO: Tensor) -> Tensor:
        """What codes stand for, in units of the row, float32 [I, O]."""
        steps_IO = e2m1_values(codes_IO) if self._scheme.dtype is QDType.MXFP4 else codes_IO.float()
        if self.offset_SO is not None:
            steps_IO -= self.offset_SO[self.stretch_I]
        return steps_IO.mul_(self.scale_SO[self.stretch_I])


def stretch_width(scheme: QScheme, columns: int) -> int:
    """How many neighbouring columns share their scales."""
    if scheme.is_mx:
        return MX_BLOCK
    if scheme.scope is QScope.PER_BLOCK:
        return scheme.block[1]
    return scheme.group_size or columns


def slice_rows(codes: WeightCodes, scheme: QScheme, rows: slice) -> WeightCodes:
    """Codes, scales and offsets of some rows; of fp8 tiles, whole ones."""
    scale_rows = rows
    if scheme.scope is QScope.PER_TENSOR:
        scale_rows = slice(None)
    elif scheme.scope is QScope.PER_BLOCK and not scheme.is_mx:
        scale_rows = slice(rows.start // scheme.block[0], -(-rows.stop // scheme.block[0]))
    return WeightCodes(
        codes.codes_OI[rows],
        codes.scale[scale_rows],
        *(
            None if tensor is None else tensor[scale_rows]
            for tensor in (codes.offset, codes.scale_second, codes.offset_second)
        ),
    )


def _round_float(scaled_O: Tensor, dtype: QDType) -> Tensor:
    return e2m1_values(e2m1_round(scaled_O)) if dtype is QDType.MXFP4 else e4m3_round(scaled_O).float()


def _scales(scheme: QScheme, codes: WeightCodes) -> Tensor:
    if scheme.is_mx:
        inner = power_of_two(codes.scale)
        return (
            inner
            if codes.scale_second is None
            else inner * spread(codes.scale_second, scheme.dual_block // MX_BLOCK, inner.shape[1])
        )
    return codes.scale if codes.scale_second is None else codes.scale * codes.scale_second


def _of_rows(scheme: QScheme, per_scale: Tensor, rows: int) -> Tensor:
    """What is kept a scale, for each row: [S, O]."""
    if scheme.scope is QScope.PER_TENSOR:
        return per_scale.reshape(1, 1).expand(1, rows).contiguous()
    if scheme.scope is QScope.PER_BLOCK and not scheme.is_mx:
        per_scale = per_scale.repeat_interleave(scheme.block[0], dim=0)[:rows]
    return per_scale.T.contiguous()
