"""Scalar and numpy restatements of the number formats, written from their definitions: what the tests compare with."""

import math
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import QDType, QScheme, QScope

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# 127 finite magnitudes: code = exponent field (4 bits, bias 7) and 3 fraction bits; field 0 is subnormal, 0x7F is NaN.
E4M3 = [(c & 7) / 8 * 2**-6 if c < 8 else (1 + (c & 7) / 8) * 2 ** ((c >> 3) - 7) for c in range(127)]
TABLE = {QDType.MXFP4: E2M1, QDType.MXFP8: E4M3, QDType.FP8_E4M3: E4M3}
EMAX = {QDType.MXFP4: 2, QDType.MXFP8: 8}
INTEGERS = {QDType.INT8: (-128, 127), QDType.INT4: (-8, 7)}


def nearest_code(value: float, table: list[float]) -> int:
    """Index of the table's value nearest to |value|; of two equally near ones the even index."""
    size = abs(value)
    above = bisect_left(table, size)
    if above == 0:
        return 0
    if above == len(table):
        return above - 1
    low, high = size - table[above - 1], table[above] - size
    return above - 1 if low < high or (low == high and above % 2) else above


def mx_exponent(absmax: float, dtype: QDType) -> int:
    """floor(log2(absmax)) − emax, not below −127."""
    return max(math.frexp(absmax)[1] - 1 - EMAX[dtype], -127) if absmax else -127


def mx_value(value: float, exponent: int, dtype: QDType) -> float:
    """The element's value after rounding, times 2^exponent."""
    size = TABLE[dtype][nearest_code(math.ldexp(value, -exponent), TABLE[dtype])]
    return math.copysign(math.ldexp(size, exponent), value)


def float_values(codes: Tensor) -> NDArray[np.float64]:
    """What fp4 codes (uint8) or the bits of float8_e4m3fn stand for."""
    table, sign = (E2M1, 8) if codes.dtype is torch.uint8 else ([*E4M3, math.nan], 128)
    return np.array([*table, *(-value for value in table)])[codes.view(torch.uint8).numpy() & (2 * sign - 1)]


def dequantized(codes: WeightCodes, scheme: QScheme) -> NDArray[np.float64]:
    """The weight, in float64 from the definition of each scheme, element by element of the scale's block."""
    rows, columns = np.indices(codes.codes_OI.shape)
    if scheme.is_mx:
        exponents = codes.scale.numpy().astype(np.float64)[rows, columns // 32] - 127
        outer = (
            1.0
            if codes.scale_second is None
            else codes.scale_second.double().numpy()[rows, columns // scheme.dual_block]
        )
        return float_values(codes.codes_OI) * 2.0**exponents * outer
    if scheme.scope is QScope.PER_TENSOR:
        place: tuple[NDArray[np.int64], ...] = (np.zeros_like(rows),)
    elif scheme.scope is QScope.PER_CHANNEL:
        place = (rows, np.zeros_like(rows))
    elif scheme.scope is QScope.PER_GROUP:
        place = (rows, columns // scheme.group_size)
    else:
        place = (rows // scheme.block[0], columns // scheme.block[1])
    if scheme.dtype is QDType.FP8_E4M3:
        return float_values(codes.codes_OI) * codes.scale.numpy().astype(np.float64)[place]
    values = codes.codes_OI.numpy().astype(np.float64)
    if codes.scale_second is not None and codes.offset_second is not None:
        inner = (values - codes.offset_second.numpy()[place]) * codes.scale_second.numpy()[place]
        return inner * codes.scale.numpy().astype(np.float64)
    offset = 0 if codes.offset is None else codes.offset.numpy()[place]
    return (values - offset) * codes.scale.numpy().astype(np.float64)[place]


def integer_codes(
    block: NDArray[np.float32], scheme: QScheme, scale: Any = None
) -> tuple[np.float32, int, NDArray[np.float32]]:
    """Scale, offset and codes of one block of float32 numbers, not all zero, with numpy's own float32 arithmetic."""
    qmin, qmax = INTEGERS[scheme.dtype]
    low, high = np.float32(min(block.min(), 0)), np.float32(max(block.max(), 0))
    if scheme.symmetric:
        scale = max(-low, high) / np.float32(qmax) if scale is None else scale
        return scale, 0, np.clip(np.rint(block / scale), qmin, qmax)
    steps = np.float32(qmax - qmin)
    scale = high / steps - low / steps if scale is None else scale
    offset = int(np.clip(np.rint(-low / scale) + qmin, qmin, qmax))
    return scale, offset, np.clip(np.rint(block / scale + np.float32(offset)), qmin, qmax)


def halfway_points(table: list[float]) -> list[float]:
    """The ties between neighbours of a table."""
    return [(low + high) / 2 for low, high in pairwise(table)]
