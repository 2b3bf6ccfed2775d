"""Microscaling numbers: 32 neighbours of the last axis share a power of two, each keeps a tiny float of its own.

An element's value is its code's value times 2^E. E is stored as an E8M0 byte, E + 127; byte 255 is NaN and marks a
block that holds an infinity or a NaN. E = floor(log2(largest |x|)) − emax, so only elements in the top part of the
largest one's octave saturate. Elements are rounded half to even. A last block that is not full counts as filled up with
zeros.

With two scales, a wider block's largest |x| is brought to 6, the largest E2M1 value, by a float32 scale before its
blocks of 32 are made.

Letters: I columns, B blocks of 32 columns. Source: OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3.
"""

import torch
from torch import Tensor
from torch.nn import functional

from msmodelslim.ir.scheme import MX_BLOCK, QDType

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # a code's low three bits; bit 3 is the sign
E4M3_MAX = 448.0
E8M0_BIAS = 127
E8M0_NAN = 255
_EMAX = {QDType.MXFP8: 8, QDType.MXFP4: 2}  # floor(log2(largest element value))
# The bits of a float: view as this integer, shift out the fraction, keep the exponent field, subtract the bias.
_EXPONENT_FIELD = {torch.float32: (torch.int32, 23, 0xFF, 127), torch.float64: (torch.int64, 52, 0x7FF, 1023)}


def floor_log2(x: Tensor) -> Tensor:
    """Exponent of each x >= 0 from its bits, so that no logarithm is rounded.

    Zero and subnormal numbers give the smallest exponent of the type minus 1, infinity and NaN the largest plus 1.

    Args:
        x: float32 or float64.

    Returns:
        Integers, int32 or int64.
    """
    integer, fraction_bits, mask, bias = _EXPONENT_FIELD[x.dtype]
    return ((x.view(integer) >> fraction_bits) & mask) - bias


def power_of_two(exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^E of E8M0 bytes; byte 255 gives NaN."""
    return exponent.view(torch.float8_e8m0fnu).to(dtype)


def e4m3_round(x: Tensor) -> Tensor:
    """Nearest float8_e4m3fn, half to even, saturating at ±448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1_round(x: Tensor) -> Tensor:
    """Nearest E2M1 code, half to even, saturating at ±6. The sign survives, also that of zero, as in IEEE 754.

    Returns:
        uint8 of x's shape: bit 3 the sign, bits 0 to 2 the index into `E2M1_VALUES`.
    """
    size = x.abs().clamp_(max=E2M1_VALUES[-1])
    # The steps are 0.5 below 2, 1 below 4, then 2; a step's end is the next step's start, so rounding up may cross.
    index = torch.where(size < 2, (size * 2).round_(), torch.where(size < 4, size.round() + 2, (size / 2).round_() + 4))
    return index.to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)


def e2m1_values(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What E2M1 codes 0 to 15 stand for."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=codes.device)
    return table[codes.int()]


def in_blocks(x: Tensor, width: int) -> Tensor:
    """The last axis cut into blocks, the last one filled up with zeros: [..., I] → [..., ceil(I/width), width]."""
    missing = -x.shape[-1] % width
    return (functional.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, width))


def spread(per_block: Tensor, width: int, columns: int) -> Tensor:
    """One value a block → one value a column: [..., ceil(columns/width)] → [..., columns]."""
    return per_block.unsqueeze(-1).expand(*per_block.shape, width).flatten(-2)[..., :columns]


def shared_exponent(absmax: Tensor, dtype: QDType) -> Tensor:
    """E8M0 byte of blocks from their largest |x|; a block of zeros has the smallest, E = −127.

    Args:
        absmax: float32 or float64.
        dtype: the element type, `mxfp8` or `mxfp4`.

    Returns:
        uint8 of the same shape.
    """
    biased = (floor_log2(absmax) - _EMAX[dtype] + E8M0_BIAS).clamp_(0, E8M0_NAN - 1)
    return biased.masked_fill_(~absmax.isfinite(), E8M0_NAN).to(torch.uint8)


def mx_quantize(x: Tensor, dtype: QDType) -> tuple[Tensor, Tensor]:
    """Codes and shared exponents of the last axis.

    Args:
        x: [..., I], float32 or float64.
        dtype: the element type, `mxfp8` or `mxfp4`.

    Returns:
        Codes [..., I]: float8_e4m3fn (`mxfp8`) or uint8 0 to 15 (`mxfp4`); E8M0 bytes uint8 [..., ceil(I/32)].
    """
    blocks = in_blocks(x, MX_BLOCK)
    exponent = shared_exponent(blocks.abs().amax(-1), dtype)
    # 254 − byte is the byte of 2^−E (NaN's wraps to itself); a product with a power of two is exact.
    scaled = x * spread(power_of_two(2 * E8M0_BIAS - exponent, x.dtype), MX_BLOCK, x.shape[-1])
    return (e4m3_round(scaled) if dtype is QDType.MXFP8 else e2m1_round(scaled)), exponent


def dual_quantize(x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, shared exponents and outer scales of the last axis; a wide block of zeros has the outer scale 1.

    Args:
        x: [..., I], float32 or float64.
        width: columns that share an outer scale, a multiple of 32.

    Returns:
        Codes and E8M0 bytes as of `mx_quantize` with mxfp4; outer scales [..., ceil(I/width)] in the type of x.
    """
    outer = outer_scale(in_blocks(x, width).abs().amax(-1))
    return *mx_quantize(x / spread(outer, width, x.shape[-1]), QDType.MXFP4), outer


def outer_scale(absmax: Tensor) -> Tensor:
    """What makes each largest |x| 6; 1 where it is 0, infinite or NaN where it is."""
    # By a tensor, as accelerators multiply by the rounded reciprocal of a plain number.
    scale = absmax / torch.full((), E2M1_VALUES[-1], dtype=absmax.dtype, device=absmax.device)
    return scale.clamp(min=torch.finfo(torch.float32).smallest_normal).masked_fill_(absmax == 0, 1)


def mx_dequantize(codes: Tensor, exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What codes and shared exponents stand for: [..., I]; uint8 codes are E2M1."""
    values = e2m1_values(codes, dtype) if codes.dtype is torch.uint8 else codes.to(dtype)
    return values * spread(power_of_two(exponent, dtype), MX_BLOCK, codes.shape[-1])
