"""Weights and activations to codes and back, with scales from the extrema (min-max).

Everything is computed in float32, activations in float64 where they are float64, whatever the model's type.

Letters: O output rows, I input columns, T tokens, G groups of columns, R rows of a chunk.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from msmodelslim.errors import InvalidModelError, UnsupportedError
from msmodelslim.ir.mx import E8M0_NAN, dual_quantize, in_blocks, mx_dequantize, mx_quantize, spread
from msmodelslim.ir.qparam import INT_RANGE, divide, extrema, qparam, storable, to_codes
from msmodelslim.ir.scheme import FLOAT, MX_BLOCK, LinearScheme, QDType, QScheme, QScope

FP8_BLOCK = 128  # side of a tile where the scheme names none; DeepSeek-V3, arXiv:2412.19437, section 3.3.2
TWO_LEVEL_MAX = 119  # of the outer int8 codes, so that the inner rounding stays within int8; QoQ, arXiv:2405.04532, 4.1
_CHUNK_ELEMENTS = 2**18  # what is held in float32 at a time: 1 MiB, which stays in a core's cache
_ROWS = {QScope.PER_TENSOR, QScope.PER_CHANNEL, QScope.PER_GROUP}
_WEIGHT_SCOPES = {
    QDType.INT8: _ROWS,
    QDType.INT4: _ROWS,
    QDType.FP8_E4M3: {QScope.PER_TENSOR, QScope.PER_CHANNEL, QScope.PER_BLOCK},
    QDType.MXFP8: {QScope.PER_BLOCK},
    QDType.MXFP4: {QScope.PER_BLOCK, QScope.DUAL_SCALE},
}
_ACT_SCOPES = {
    QDType.INT8: {QScope.PER_TENSOR, QScope.PER_TOKEN, QScope.PD_MIX},
    QDType.INT4: {QScope.PER_TENSOR, QScope.PER_TOKEN},
    QDType.FP8_E4M3: {QScope.PER_TENSOR, QScope.PER_TOKEN, QScope.PER_BLOCK},
    QDType.MXFP8: {QScope.PER_BLOCK},
    QDType.MXFP4: {QScope.PER_BLOCK, QScope.DUAL_SCALE},
}


@dataclass(frozen=True)
class WeightCodes:
    """A quantized weight.

    Args:
        codes_OI: int8 (int8 and int4, one value a byte), float8_e4m3fn (fp8_e4m3 and mxfp8), uint8 0 to 15 (mxfp4).
        scale: float32 [O, 1] per_channel and two_level, [O, G] per_group, [1] per_tensor, [ceil(O/128), ceil(I/128)]
            fp8 per_block; MX: E8M0 bytes, uint8 [O, ceil(I/32)].
        offset: float32 integers in the range of the codes, shape of `scale`; None when symmetric, fp8 or MX.
        scale_second: two_level: float32 integers >= 1, [O, G]; dual_scale: the outer scales, float32
            [O, ceil(I/dual_block)].
        offset_second: two_level only: float32 integers, [O, G].
    """

    codes_OI: Tensor  # noqa: N815 - a tensor's name ends in its axes
    scale: Tensor
    offset: Tensor | None = None
    scale_second: Tensor | None = None
    offset_second: Tensor | None = None


def refuse_shape(scheme: LinearScheme, out_features: int, in_features: int, name: str) -> None:
    """Raise what cannot work for a linear of this size, before its weight is read.

    Raises:
        UnsupportedError: no quantizer for the weight's or the activation's scheme, or groups that do not divide the
            input features; names the module, the value found and the mend.
    """
    _refuse_scheme(scheme.weight, "weight", _WEIGHT_SCOPES, name)
    _refuse_scheme(scheme.act, "act", _ACT_SCOPES, name)
    if out_features < 1 or in_features < 1:
        raise UnsupportedError(
            f"{name}: a weight of {out_features} x {in_features} has nothing to quantize", "exclude it"
        )
    group = scheme.weight.group_size
    if group and in_features % group:
        divisor = math.gcd(in_features, group)
        mend = f"set group_size to {divisor} or exclude the module" if divisor > 1 else "exclude the module"
        raise UnsupportedError(f"{name}: {in_features} input features do not divide into groups of {group}", mend)


@torch.no_grad()
def quantize_weight(
    weight_OI: Tensor, scheme: QScheme, *, scale_dtype: torch.dtype = torch.float32, name: str = "weight"
) -> WeightCodes:
    """Codes of a weight, with scales from its extrema; works in row chunks, so temporaries stay small.

    A block of zeros has scale 1, offset 0 and codes 0.

    Args:
        weight_OI: any float type.
        scheme: dtype, scope, symmetry.
        scale_dtype: the type the scale will be stored in. The scale is rounded to it first and the codes are chosen
            with the rounded scale, so that storing it adds no error. Not used for fp8 tiles and MX blocks, whose
            format fixes the type.
        name: module, for errors.

    Raises:
        UnsupportedError: no quantizer for the scheme, or groups that do not divide the columns.
        InvalidModelError: the weight holds an infinity or a NaN; names the module and how many.
    """
    rows, columns = weight_OI.shape
    refuse_shape(LinearScheme(scheme), rows, columns, name)
    if scheme.is_mx:
        return _quantize_mx(weight_OI, scheme, name)
    if scheme.scope is QScope.PER_BLOCK:
        scale_dtype = torch.float32
    minimum, maximum = _weight_extrema(weight_OI, scheme)
    if not (minimum.isfinite() & maximum.isfinite()).all():
        _raise_non_finite(weight_OI, name)
    if scheme.two_level:
        return _quantize_two_level(weight_OI, scheme, torch.maximum(-minimum, maximum), scale_dtype)
    scale, offset = qparam(minimum, maximum, scheme, scale_dtype)
    codes_OI = torch.empty_like(weight_OI, dtype=_code_dtype(scheme), memory_format=torch.contiguous_format)
    for chunk in _row_chunks(rows, columns, scheme):
        offset_RI = None if offset is None else _spread_rows(offset, scheme, chunk, columns)
        scale_RI = _spread_rows(scale, scheme, chunk, columns)
        codes_OI[chunk] = to_codes(weight_OI[chunk].float(), scale_RI, offset_RI, scheme)
    return WeightCodes(codes_OI, scale, offset)


def codes_on_meta(scheme: QScheme, out_features: int, in_features: int) -> WeightCodes:
    """What `quantize_weight` would give for a weight of this size: the shapes and types, on device meta."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    codes_OI = empty(out_features, in_features, dtype=_code_dtype(scheme))
    if scheme.is_mx:
        outer = empty(out_features, -(-in_features // scheme.dual_block)) if scheme.dual_block else None
        exponents = empty(out_features, -(-in_features // MX_BLOCK), dtype=torch.uint8)
        return WeightCodes(codes_OI, exponents, scale_second=outer)
    if scheme.two_level:
        groups = in_features // scheme.group_size
        return WeightCodes(
            codes_OI, empty(out_features, 1), None, empty(out_features, groups), empty(out_features, groups)
        )
    height, width = _block(scheme, out_features, in_features)
    shape = (1,) if scheme.scope is QScope.PER_TENSOR else (-(-out_features // height), -(-in_features // width))
    return WeightCodes(codes_OI, empty(*shape), None if scheme.symmetric else empty(*shape))


@torch.no_grad()
def dequantize_weight(codes: WeightCodes, scheme: QScheme) -> Tensor:
    """The weight that the codes stand for, float32 [O, I]."""
    rows, columns = codes.codes_OI.shape
    weight_OI = torch.empty(rows, columns, device=codes.codes_OI.device)
    for chunk in _row_chunks(rows, columns, scheme):
        weight_OI[chunk] = _dequantize_rows(codes, scheme, chunk, columns)
    return weight_OI


def weight_error(weight_OI: Tensor, codes: WeightCodes, scheme: QScheme) -> float:
    """What rounding lost, ‖W − Ŵ‖ / ‖W‖, rows summed in float64, a few at a time; 0 for an all-zero weight."""
    rows, columns = weight_OI.shape
    lost = total = 0.0
    for chunk in _row_chunks(rows, columns, scheme):
        part_RI = weight_OI[chunk].float()
        total += _sum_of_squares(part_RI)
        lost += _sum_of_squares(part_RI - _dequantize_rows(codes, scheme, chunk, columns))
    return math.sqrt(lost / total) if total else 0.0


def _sum_of_squares(x_RI: Tensor) -> float:
    return float(torch.linalg.vector_norm(x_RI, dim=1).double().square().sum())


def act_qparam(
    minimum: Tensor, maximum: Tensor, scheme: QScheme, *, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Scale and offset of a static activation from its calibrated extrema.

    Args:
        minimum, maximum: extrema over all tokens, one element each.
        scheme: per_tensor, or pd_mix for its static half.
        scale_dtype: the type the scale will be stored in; the offset is chosen with the rounded scale.

    Returns:
        Scale float32 [1]; offset float32 [1], an integer in the range of the codes, None when symmetric.

    Raises:
        UnsupportedError: the scheme has no static half.
        ValueError: the extrema are not finite: no token was seen, or an activation was an infinity or a NaN.
    """
    _refuse_scheme(scheme, "act", _ACT_SCOPES, "static activation")
    if not scheme.is_static:
        raise UnsupportedError(f"an activation of {scheme} has no static scale", "use scope per_tensor or pd_mix")
    low, high = minimum.float().reshape(1), maximum.float().reshape(1)
    if not (low.isfinite() & high.isfinite()).all():
        seen = f"[{low.item()}, {high.item()}]"
        raise ValueError(f"the calibrated range is {seen}; calibrate with at least one token and finite activations")
    return qparam(low, high, scheme, scale_dtype)


def fake_quantize_act(x: Tensor, scheme: QScheme, scale: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
    """An activation quantized and dequantized, as the engine's kernel sees it.

    Dynamic scopes take their extrema from x itself, over the features (the last axis), each token for itself:
    per_token; per_block for fp8 (128 features) and MX (32); dual_scale. per_tensor and pd_mix use the given scale and
    offset. Where a dynamic block holds an infinity or a NaN, the whole block becomes NaN.

    Args:
        x: [..., I], any float type.
        scheme: dtype, scope, symmetry; float returns x itself, converted.
        scale: static schemes: [1].
        offset: static asymmetric schemes: [1].

    Returns:
        float32, or float64 if x is; shape of x.

    Raises:
        UnsupportedError: no quantizer for the scheme.
        ValueError: a static scheme without its scale, or an asymmetric one without its offset.
    """
    _refuse_scheme(scheme, "act", _ACT_SCOPES, "activation")
    x = x if x.dtype is torch.float64 else x.float()
    if scheme.is_float:
        return x
    if scheme.dual_block:
        codes, exponent, outer = dual_quantize(x, scheme.dual_block)
        return mx_dequantize(codes, exponent, x.dtype).mul_(spread(outer, scheme.dual_block, x.shape[-1]))
    if scheme.is_mx:
        return mx_dequantize(*mx_quantize(x, scheme.dtype), x.dtype)
    if scheme.is_static:
        if scale is None or (offset is None and not scheme.symmetric):
            raise ValueError(
                f"{scheme} is static; give the {'scale' if scale is None else 'offset'} of its calibration"
            )
        scale, offset = scale.to(x.dtype), None if scheme.symmetric or offset is None else offset.to(x.dtype)
    elif scheme.scope is QScope.PER_BLOCK:
        width = scheme.block[1] or FP8_BLOCK
        scale, offset = qparam(*extrema(in_blocks(x, width), -1), scheme, x.dtype)
        scale = spread(scale, width, x.shape[-1])
    else:
        scale, offset = qparam(*extrema(x, -1, keepdim=True), scheme, x.dtype)
    codes = to_codes(x, scale, offset, scheme).to(x.dtype)
    return (codes if offset is None else codes.sub_(offset)).mul_(scale)


def _refuse_scheme(scheme: QScheme, side: str, scopes: dict[QDType, set[QScope]], name: str) -> None:
    if scheme.is_float:
        if side == "weight":
            raise UnsupportedError(f"{name}: a float weight has no codes", "exclude the module or name a weight dtype")
        return
    allowed = scopes[scheme.dtype]
    if scheme.scope not in allowed:
        mend = f"use scope {' or '.join(sorted(allowed))}"
        raise UnsupportedError(f"{name}: {side} {scheme.dtype} has no scope {scheme.scope}", mend)
    if not scheme.symmetric and scheme.dtype not in INT_RANGE:
        raise UnsupportedError(f"{name}: {side} {scheme.dtype} has no offset", "set symmetric to true")
    if (scheme.scope is QScope.PER_GROUP) != (scheme.group_size > 0):
        mend = "set group_size for scope per_group, and only for it"
        raise UnsupportedError(f"{name}: {side} scope {scheme.scope} with group_size {scheme.group_size}", mend)
    if (scheme.scope is QScope.DUAL_SCALE) != (scheme.dual_block > 0) or scheme.dual_block % MX_BLOCK:
        mend = f"set dual_block to a multiple of {MX_BLOCK} for scope dual_scale, and only for it"
        raise UnsupportedError(f"{name}: {side} scope {scheme.scope} with dual_block {scheme.dual_block}", mend)
    if scheme.two_level and (scheme.dtype, scheme.scope) != (QDType.INT4, QScope.PER_GROUP):
        raise UnsupportedError(f"{name}: {side} {scheme} cannot be two_level", "use int4 per_group or drop two_level")


def _raise_non_finite(weight_OI: Tensor, name: str) -> None:
    count = sum(int((~weight_OI[chunk].float().isfinite()).sum()) for chunk in _row_chunks(*weight_OI.shape))
    raise InvalidModelError(
        f"{name}: {count} of {weight_OI.numel()} weights are infinite or NaN",
        "check the checkpoint for damage, or exclude the module",
    )


def _code_dtype(scheme: QScheme) -> torch.dtype:
    return (
        torch.int8
        if scheme.dtype in INT_RANGE
        else torch.uint8
        if scheme.dtype is QDType.MXFP4
        else torch.float8_e4m3fn
    )


def _block(scheme: QScheme, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if scheme.scope is QScope.PER_TENSOR:
        return rows, columns
    if scheme.scope is QScope.PER_BLOCK:
        return (1, MX_BLOCK) if scheme.is_mx else (scheme.block[0] or FP8_BLOCK, scheme.block[1] or FP8_BLOCK)
    return 1, scheme.group_size or columns


def _row_chunks(rows: int, columns: int, scheme: QScheme = FLOAT) -> Iterator[slice]:
    """Consecutive rows of about `_CHUNK_ELEMENTS` elements, never cutting a tile."""
    height = _block(scheme, rows, columns)[0] if scheme.scope is QScope.PER_BLOCK else 1
    step = max(_CHUNK_ELEMENTS // columns // height, 1) * height
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _weight_extrema(weight_OI: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor]:
    """Smallest and largest weight of each block, float32, shape of the scale ([O, 1] for two_level)."""
    rows, columns = weight_OI.shape
    height, width = _block(scheme, rows, columns)
    lows, highs = [], []
    for chunk in _row_chunks(rows, columns, scheme):
        part_RI = weight_OI[chunk].float()
        if scheme.scope is QScope.PER_BLOCK:
            padded = functional.pad(part_RI, (0, -columns % width, 0, -len(part_RI) % height))
            tiles = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
            low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
        elif scheme.scope is QScope.PER_GROUP and not scheme.two_level:
            low, high = extrema(part_RI.unflatten(1, (-1, width)), 2)
        else:
            low, high = extrema(part_RI, 1, keepdim=True)
        lows.append(low)
        highs.append(high)
    low, high = torch.cat(lows), torch.cat(highs)
    return (low.amin().reshape(1), high.amax().reshape(1)) if scheme.scope is QScope.PER_TENSOR else (low, high)


def _spread_rows(per_block: Tensor, scheme: QScheme, chunk: slice, columns: int) -> Tensor:
    """The scale or offset of a chunk's rows, shaped to broadcast over [R, columns]."""
    if scheme.scope is QScope.PER_TENSOR:
        return per_block
    if scheme.scope is QScope.PER_CHANNEL:
        return per_block[chunk]
    height, width = _block(scheme, chunk.stop, columns)
    part = spread(per_block[chunk.start // height : -(-chunk.stop // height)], width, columns)
    return part if height == 1 else part.repeat_interleave(height, dim=0)[: chunk.stop - chunk.start]


def _quantize_two_level(weight_OI: Tensor, scheme: QScheme, absmax_O1: Tensor, scale_dtype: torch.dtype) -> WeightCodes:
    """int8 channels up to ±119, then int4 groups of those integers with integer scales; ŵ = s1·s2·(q − z)."""
    rows, columns = weight_OI.shape
    scale_O1 = storable(divide(absmax_O1, TWO_LEVEL_MAX), scale_dtype).masked_fill_(absmax_O1 == 0, 1)
    codes_OI = torch.empty(rows, columns, dtype=torch.int8, device=weight_OI.device)
    scales_second, offsets_second = [], []
    qmin, qmax = INT_RANGE[scheme.dtype]
    for chunk in _row_chunks(rows, columns, scheme):
        outer = (weight_OI[chunk].float() / scale_O1[chunk]).round_().clamp_(-TWO_LEVEL_MAX, TWO_LEVEL_MAX)
        groups = outer.unflatten(1, (-1, scheme.group_size))
        low, high = extrema(groups, 2)
        low, high = low.clamp_(max=0), high.clamp_(min=0)
        steps = divide(torch.maximum(-low, high), qmax) if scheme.symmetric else divide(high - low, qmax - qmin)
        scale = steps.round_().clamp_(min=1)
        offset = (-low / scale).round_() + qmin
        offset.masked_fill_((low == high) | scheme.symmetric, 0)
        # The offset is added after the rounding here: halves are common among quotients of small integers, and the
        # kernel's int8 intermediate is a whole number of steps from zero.
        inner = (groups / scale.unsqueeze(2)).round_().add_(offset.unsqueeze(2)).clamp_(qmin, qmax)
        codes_OI[chunk] = inner.flatten(1)
        scales_second.append(scale)
        offsets_second.append(offset)
    return WeightCodes(codes_OI, scale_O1, None, torch.cat(scales_second), torch.cat(offsets_second))


def _quantize_mx(weight_OI: Tensor, scheme: QScheme, name: str) -> WeightCodes:
    rows, columns = weight_OI.shape
    codes_OI = torch.empty(rows, columns, dtype=_code_dtype(scheme), device=weight_OI.device)
    exponent_OB = torch.empty(rows, -(-columns // MX_BLOCK), dtype=torch.uint8, device=weight_OI.device)
    outers: list[Tensor] = []
    for chunk in _row_chunks(rows, columns, scheme):
        if scheme.dual_block:
            codes_OI[chunk], exponent_OB[chunk], outer = dual_quantize(weight_OI[chunk].float(), scheme.dual_block)
            outers.append(outer)
        else:
            codes_OI[chunk], exponent_OB[chunk] = mx_quantize(weight_OI[chunk].float(), scheme.dtype)
    if (exponent_OB == E8M0_NAN).any():
        _raise_non_finite(weight_OI, name)
    return WeightCodes(codes_OI, exponent_OB, scale_second=torch.cat(outers) if outers else None)


def _dequantize_rows(codes: WeightCodes, scheme: QScheme, chunk: slice, columns: int) -> Tensor:
    if scheme.is_mx:
        inner_RI = mx_dequantize(codes.codes_OI[chunk], codes.scale[chunk])
        if codes.scale_second is None:
            return inner_RI
        return inner_RI.mul_(spread(codes.scale_second[chunk], scheme.dual_block, columns))
    part_RI = codes.codes_OI[chunk].float()
    if codes.scale_second is not None and codes.offset_second is not None:
        part_RI -= spread(codes.offset_second[chunk], scheme.group_size, columns)
        part_RI *= spread(codes.scale_second[chunk], scheme.group_size, columns)
        return part_RI.mul_(codes.scale[chunk])
    if codes.offset is not None:
        part_RI -= _spread_rows(codes.offset, scheme, chunk, columns)
    return part_RI.mul_(_spread_rows(codes.scale, scheme, chunk, columns))
