"""How compressed-tensors stores one linear: scheme → arguments of that library → tensors, and back.

Letters: O output rows, I input columns, G groups of columns.
"""

from collections.abc import Mapping

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy, QuantizationType
from torch import Tensor

from msmodelslim.ir.packing import pack_columns_fp4, pack_columns_int32, unpack_columns_fp4, unpack_columns_int32
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import BITS, FLOAT, MX_BLOCK, LinearScheme, QDType, QScheme, QScope

_INTS = (QDType.INT8, QDType.INT4)
_STRATEGIES = {
    QScope.PER_TENSOR: QuantizationStrategy.TENSOR,
    QScope.PER_CHANNEL: QuantizationStrategy.CHANNEL,
    QScope.PER_GROUP: QuantizationStrategy.GROUP,
    QScope.PER_BLOCK: QuantizationStrategy.BLOCK,
    QScope.PER_TOKEN: QuantizationStrategy.TOKEN,
}
_SCOPES = {strategy.value: scope for scope, strategy in _STRATEGIES.items()}
PACKED, INTS, FLOATS = (
    CompressionFormat.pack_quantized.value,
    CompressionFormat.int_quantized.value,
    CompressionFormat.float_quantized.value,
)
MXFP4, MXFP8 = CompressionFormat.mxfp4_pack_quantized.value, CompressionFormat.mxfp8_quantized.value


def kind_of(scheme: LinearScheme) -> str | None:
    """A word for the scheme ("W4A16 group asym", "FP8_STATIC"); None when the format cannot express it."""
    weight, act = scheme.weight, scheme.act
    if weight.two_level or act.scope is QScope.PD_MIX:
        return None
    if weight.dtype in _INTS and act.dtype in (*_INTS, QDType.FLOAT):
        words = [
            f"W{BITS[weight.dtype]}A{BITS[act.dtype]}",
            "static" if act.is_static else "",
            {QScope.PER_GROUP: "group", QScope.PER_TENSOR: "tensor"}.get(weight.scope, ""),
            "" if weight.symmetric else "asym",
            "" if act.symmetric else "act_asym",
        ]
        return " ".join(word for word in words if word)
    if weight.dtype is QDType.FP8_E4M3 and act.dtype is QDType.FP8_E4M3:
        pairs = {
            (QScope.PER_CHANNEL, QScope.PER_TOKEN): "FP8_DYNAMIC",
            (QScope.PER_CHANNEL, QScope.PER_TENSOR): "FP8_STATIC",
            (QScope.PER_TENSOR, QScope.PER_TENSOR): "FP8_STATIC",
            (QScope.PER_BLOCK, QScope.PER_BLOCK): "FP8_BLOCK",
        }
        return pairs.get((weight.scope, act.scope))
    if weight.is_mx and not weight.dual_block and (act.is_float or act.dtype is weight.dtype):
        return str(weight.dtype).upper() + ("A16" if act.is_float else "")
    return None


def args_of(scheme: LinearScheme, targets: list[str]) -> QuantizationScheme:
    """The library's description of a scheme that `kind_of` has a word for.

    Args:
        targets: module classes or `re:` patterns the scheme holds for.
    """
    weight, act = scheme.weight, scheme.act
    return QuantizationScheme(
        targets=targets,
        weights=_weight_args(weight),
        input_activations=None if act.is_float else _act_args(act),
        format=_format_of(scheme),
    )


def scheme_of(args: QuantizationScheme) -> LinearScheme:
    """The inverse of `args_of`.

    Raises:
        ValueError: a scheme that this format's saver does not write.
    """
    if args.weights is None:
        raise ValueError("the scheme does not quantize weights")
    act = FLOAT if args.input_activations is None else _scheme_of(args.input_activations, args.weights)
    return LinearScheme(_scheme_of(args.weights, args.weights), act)


def tensors_of(linear: QuantLinear, model_dtype: torch.dtype) -> dict[str, Tensor]:
    """Last part of the tensor's name → values as stored; on meta for a linear on meta.

    Args:
        linear: its scales are representable in `model_dtype`, apart from those of fp8 tiles, which stay float32.
        model_dtype: type of the scales.
    """
    weight, codes_OI, scale = linear.scheme.weight, linear.codes, linear.weight_scale
    format_ = _format_of(linear.scheme)
    bits = BITS[weight.dtype]
    stored: dict[str, Tensor] = {}
    if format_ == PACKED:
        stored["weight_packed"] = pack_columns_int32(codes_OI, bits)
        stored["weight_shape"] = torch.tensor([linear.out_features, linear.in_features])
    elif format_ == MXFP4:
        stored["weight_packed"] = pack_columns_fp4(codes_OI)
    else:
        stored["weight"] = codes_OI
    keeps_type = weight.is_mx or weight.scope is QScope.PER_BLOCK
    stored["weight_scale"] = scale if keeps_type else scale.to(model_dtype)
    if linear.weight_offset is not None:
        zero_OG = linear.weight_offset.to(torch.int8)
        packed = pack_columns_int32(zero_OG.T, bits).T.contiguous() if format_ == PACKED else zero_OG
        stored["weight_zero_point"] = packed
    if linear.act_scale is not None:
        stored["input_scale"] = linear.act_scale.to(model_dtype)
    if linear.act_offset is not None:
        stored["input_zero_point"] = linear.act_offset.to(torch.int8)
    if linear.bias is not None:
        stored["bias"] = linear.bias
    return stored


def linear_of(args: QuantizationScheme, tensors: Mapping[str, Tensor]) -> QuantLinear:
    """The linear that `tensors_of` stored so."""
    scheme = scheme_of(args)
    bits, zero = BITS[scheme.weight.dtype], tensors.get("weight_zero_point")
    scale = tensors["weight_scale"] if scheme.weight.is_mx else tensors["weight_scale"].float()
    if args.format == PACKED:
        rows, columns = (int(size) for size in tensors["weight_shape"])
        codes_OI = unpack_columns_int32(tensors["weight_packed"], bits, columns)
        zero = None if zero is None else unpack_columns_int32(zero.T, bits, rows).T
    else:
        codes_OI = unpack_columns_fp4(tensors["weight_packed"]) if args.format == MXFP4 else tensors["weight"]
    return QuantLinear(
        scheme,
        WeightCodes(codes_OI, scale, None if zero is None else zero.float()),
        bias=tensors.get("bias"),
        act_scale=_float(tensors.get("input_scale")),
        act_offset=None if scheme.act.symmetric else _float(tensors.get("input_zero_point")),
    )


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _format_of(scheme: LinearScheme) -> str:
    if scheme.weight.dtype in _INTS:
        return PACKED if scheme.act.is_float else INTS
    return {QDType.MXFP4: MXFP4, QDType.MXFP8: MXFP8}.get(scheme.weight.dtype, FLOATS)


def _type_of(scheme: QScheme) -> QuantizationType:
    return QuantizationType.INT if scheme.dtype in _INTS else QuantizationType.FLOAT


def _weight_args(scheme: QScheme) -> QuantizationArgs:
    if scheme.is_mx:
        return _mx_args(scheme, dynamic=False)
    return QuantizationArgs(
        num_bits=BITS[scheme.dtype],
        type=_type_of(scheme),
        symmetric=scheme.symmetric,
        strategy=_STRATEGIES[scheme.scope],
        group_size=scheme.group_size or None,
        block_structure=list(scheme.block) if scheme.scope is QScope.PER_BLOCK else None,
        dynamic=False,
    )


def _act_args(scheme: QScheme) -> QuantizationArgs:
    if scheme.is_mx:
        return _mx_args(scheme, dynamic=True)
    tile = scheme.block[1] or 128
    return QuantizationArgs(
        num_bits=BITS[scheme.dtype],
        type=_type_of(scheme),
        symmetric=scheme.symmetric,
        strategy=QuantizationStrategy.GROUP if scheme.scope is QScope.PER_BLOCK else _STRATEGIES[scheme.scope],
        group_size=tile if scheme.scope is QScope.PER_BLOCK else None,
        dynamic=not scheme.is_static,
    )


def _mx_args(scheme: QScheme, dynamic: bool) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=BITS[scheme.dtype],
        type=QuantizationType.FLOAT,
        symmetric=True,
        strategy=QuantizationStrategy.GROUP,
        group_size=MX_BLOCK,
        dynamic=dynamic,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    )


def _scheme_of(args: QuantizationArgs, weights: QuantizationArgs) -> QScheme:
    """The scheme of one side; `weights` tells the groups of fp8 tiles from those of MX."""
    if args.type == QuantizationType.FLOAT.value:
        if args.scale_dtype is torch.uint8:
            return QScheme(QDType.MXFP4 if args.num_bits == 4 else QDType.MXFP8, QScope.PER_BLOCK)
        if args.num_bits != 8:
            raise ValueError(f"{args.num_bits}-bit floats with scales of {args.scale_dtype} are not known here")
        if weights.block_structure is not None:
            rows, columns = weights.block_structure
            return QScheme(QDType.FP8_E4M3, QScope.PER_BLOCK, block=(rows if args is weights else 1, columns))
        return QScheme(QDType.FP8_E4M3, _scope_of(args))
    if args.num_bits not in (4, 8):
        raise ValueError(f"{args.num_bits}-bit integers are not known here")
    dtype = QDType.INT4 if args.num_bits == 4 else QDType.INT8
    return QScheme(dtype, _scope_of(args), args.symmetric, group_size=args.group_size or 0)


def _scope_of(args: QuantizationArgs) -> QScope:
    if args.strategy not in _SCOPES:
        raise ValueError(f"strategy {args.strategy} is not known here")
    return _SCOPES[args.strategy]
