"""How codes lie in a file, several to a byte or a word, and the constants that integer kernels add.

Every layout has its inverse, and all of them work on meta tensors. Words are little-endian, as in safetensors.

Letters: O output rows, I input columns, P pairs of rows or columns, N words, S parts of the input.
"""

import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from msmodelslim.errors import UnsupportedError

_CHUNK_ELEMENTS = 2**20  # what is held in int32 at a time: 4 MiB
_INT32 = torch.iinfo(torch.int32)


def pack_rows_int4(codes_OI: Tensor, *, name: str = "weight") -> Tensor:
    """Ascend W4A8: rows 2p and 2p+1 share byte [p, i], the even row in the low nibble.

    Args:
        codes_OI: int8, −8 to 7.
        name: module, for errors.

    Returns:
        int8 [O/2, I].

    Raises:
        UnsupportedError: odd O.
    """
    if codes_OI.shape[0] % 2:
        raise UnsupportedError(
            f"{name}: {codes_OI.shape[0]} rows do not pair into bytes of two int4", "exclude the module"
        )
    return (codes_OI[0::2] & 0xF) | (codes_OI[1::2] << 4)


def unpack_rows_int4(packed_PI: Tensor) -> Tensor:
    """Inverse of `pack_rows_int4`: int8 [O, I]."""
    return torch.stack((_sign_of_low_nibble(packed_PI), packed_PI >> 4), dim=1).flatten(0, 1)


def pack_columns_int32(codes_OI: Tensor, num_bits: int) -> Tensor:
    """compressed-tensors `weight_packed`: code + 2^(bits−1), in fields of `num_bits` from the low bit up, along I.

    Unused fields of the last word are 0. Zero points are packed along O: pack their transpose.

    Args:
        codes_OI: int8.
        num_bits: 4 or 8.

    Returns:
        int32 [O, ceil(I·bits/32)].
    """
    bytes_OI = codes_OI.contiguous().view(torch.uint8)
    missing = -codes_OI.shape[1] % _codes_a_word(num_bits)
    bytes_OI = (bytes_OI & 0xF) ^ 0x8 if num_bits == 4 else bytes_OI ^ 0x80
    bytes_OI = torch.nn.functional.pad(bytes_OI, (0, missing))
    if num_bits == 4:
        bytes_OI = bytes_OI[:, 0::2] | (bytes_OI[:, 1::2] << 4)
    return bytes_OI.flatten().view(torch.int32).unflatten(0, (len(codes_OI), -1))


def unpack_columns_int32(packed_ON: Tensor, num_bits: int, columns: int) -> Tensor:
    """Inverse of `pack_columns_int32`: int8 [O, columns]."""
    _codes_a_word(num_bits)
    bytes_OI = packed_ON.flatten().view(torch.uint8).unflatten(0, (len(packed_ON), -1))
    if num_bits == 4:
        bytes_OI = torch.stack((bytes_OI & 0xF, bytes_OI >> 4), dim=2).flatten(1)
    return (bytes_OI.view(torch.int8)[:, :columns] - (1 << (num_bits - 1))).contiguous()


def pack_columns_fp4(codes_OI: Tensor, *, name: str = "weight") -> Tensor:
    """MXFP4: columns 2p and 2p+1 share byte [o, p], the even column in the low nibble.

    Args:
        codes_OI: uint8, 0 to 15.
        name: module, for errors.

    Returns:
        uint8 [O, I/2].

    Raises:
        UnsupportedError: odd I.
    """
    if codes_OI.shape[1] % 2:
        raise UnsupportedError(
            f"{name}: {codes_OI.shape[1]} columns do not pair into bytes of two fp4", "exclude the module"
        )
    return codes_OI[:, 0::2] | (codes_OI[:, 1::2] << 4)


def unpack_columns_fp4(packed_OP: Tensor) -> Tensor:
    """Inverse of `pack_columns_fp4`: uint8 [O, I]."""
    return torch.stack((packed_OP & 0xF, packed_OP >> 4), dim=2).flatten(1)


def deq_scale(weight_scale: Tensor, act_scale: Tensor) -> Tensor:
    """What one unit of the integer product is worth: float32 [O] from scales [O, 1] and [1], [1] from two of [1]."""
    return weight_scale.flatten() * act_scale


def deq_scale_int64(deq_scale_O: Tensor) -> Tensor:
    """For engines that serve in fp16: the bits of each float32, widened to int64."""
    return deq_scale_O.view(torch.int32).to(torch.int64)


def deq_scale_float32(deq_scale_O: Tensor) -> Tensor:
    """Inverse of `deq_scale_int64`."""
    return deq_scale_O.to(torch.int32).view(torch.float32)


def quant_bias(
    codes_OI: Tensor,
    weight_scale: Tensor,
    act_scale: Tensor,
    act_offset: Tensor | None,
    bias: Tensor | None,
    *,
    name: str = "weight",
) -> Tensor:
    """What a static int8 kernel adds to the integer product: round(bias/deq_scale) − act_offset·Σᵢ code.

    So that y = (x_codes·codesᵀ + quant_bias)·deq_scale. Sums in int64, the quotient in float64: the product can pass
    2^24, where float32 stops being exact. Warns when a value leaves int32; it is clamped.

    Args:
        codes_OI: int8.
        weight_scale: float32 [O, 1], or [1].
        act_scale: float32 [1].
        act_offset: float32 [1], an integer; None for 0.
        bias: [O], any float type; None for 0.
        name: module, for the warning.

    Returns:
        int32 [O].
    """
    total_O = torch.zeros(codes_OI.shape[0], dtype=torch.int64, device=codes_OI.device)
    if act_offset is not None:
        total_O -= act_offset.to(torch.int64) * _segment_sums(codes_OI, codes_OI.shape[1]).squeeze(1)
    if bias is not None:
        steps_O = (bias.double() / deq_scale(weight_scale, act_scale).double()).round_()
        total_O += steps_O.clamp_(-(2.0**62), 2.0**62).to(torch.int64)
    clamped_O = total_O.clamp(_INT32.min, _INT32.max)
    if not codes_OI.is_meta and not torch.equal(clamped_O, total_O):
        outside = int((clamped_O != total_O).sum())
        warnings.warn(f"{name}: quant_bias of {outside} rows passes int32 and was clamped; exclude it", stacklevel=2)
    return clamped_O.to(torch.int32)


def w4a8_scale_bias(codes_OI: Tensor, weight_scale: Tensor, parts: int, *, name: str = "weight") -> Tensor:
    """What Ascend's W4A8 kernel must add back: 8·Σᵢ code·scale, for each of `parts` equal stretches of the input.

    The kernel splits each int8 activation into nibbles, x = 16·high + (low − 8) + 8, and multiplies only the two signed
    numbers.

    Args:
        codes_OI: int8, −8 to 7; for asymmetric groups the codes minus their offset.
        weight_scale: float32 [O, 1], or [O, G] with one scale a group.
        parts: 1 for linears split along their output; 16 for those split along their input, so that any engine of up
            to 16 devices finds its share.
        name: module, for errors.

    Returns:
        float32 [O, parts].

    Raises:
        UnsupportedError: `parts` does not divide I.
    """
    columns, groups = codes_OI.shape[1], weight_scale.shape[1]
    if columns % parts:
        raise UnsupportedError(f"{name}: {columns} columns do not divide into {parts} parts", "exclude the module")
    width = math.gcd(columns // parts, columns // groups)  # the longest stretch with one scale and in one part
    scale_OG = weight_scale.double().repeat_interleave(columns // groups // width, dim=1)
    sums_OS = (_segment_sums(codes_OI, width) * scale_OG).unflatten(1, (parts, -1)).sum(2)
    return (8 * sums_OS).float()


def _sign_of_low_nibble(packed: Tensor) -> Tensor:
    return (packed << 4) >> 4


def _codes_a_word(num_bits: int) -> int:
    if num_bits not in (4, 8):
        raise ValueError(f"num_bits is {num_bits}; codes are packed with 4 or 8 bits")
    return 32 // num_bits


def _segment_sums(codes_OI: Tensor, width: int) -> Tensor:
    """Exact sums of each `width` columns: int64 [O, I/width]."""
    return torch.cat([part.unflatten(1, (-1, width)).sum(2, dtype=torch.int64) for part in _row_chunks(codes_OI)])


def _row_chunks(codes_OI: Tensor) -> Iterator[Tensor]:
    yield from codes_OI.split(max(_CHUNK_ELEMENTS // codes_OI.shape[1], 1))
