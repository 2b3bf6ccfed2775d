"""How ascendV1 stores one linear: scheme → kind → tensors, and back. Pure layout; which engine reads what is not here.

Letters: O output rows, I input columns, G groups of columns, P pairs of rows or columns, S parts of the input.
Source: docs/formats.md, which lists every tensor with the reader's class.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from msmodelslim.ir.packing import (
    deq_scale,
    deq_scale_float32,
    deq_scale_int64,
    pack_columns_fp4,
    pack_columns_int32,
    pack_rows_int4,
    quant_bias,
    unpack_columns_fp4,
    unpack_columns_int32,
    unpack_rows_int4,
    w4a8_scale_bias,
)
from msmodelslim.ir.quant_linear import QuantLinear
from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import FLOAT, LinearScheme, QDType, QScheme, QScope

_Writer = Callable[[QuantLinear, torch.dtype, int, str], dict[str, Tensor]]
_Reader = Callable[[Mapping[str, Tensor]], QuantLinear]

FLOAT_KIND = "FLOAT"
ROW_PARTS = 16  # of the input of a linear that engines split along its input: any tensor-parallel degree up to 16
INT8_TOKEN = QScheme(QDType.INT8, QScope.PER_TOKEN)
INT4_TOKEN = QScheme(QDType.INT4, QScope.PER_TOKEN)
FP8_TOKEN = QScheme(QDType.FP8_E4M3, QScope.PER_TOKEN)
MXFP8 = QScheme(QDType.MXFP8, QScope.PER_BLOCK)
MXFP4 = QScheme(QDType.MXFP4, QScope.PER_BLOCK)
STATIC_SCOPES = {"W8A8": QScope.PER_TENSOR, "W8A8_MIX": QScope.PD_MIX}

#: how a weight differs from symmetric with one scale a row
PLAIN, PER_GROUP, TWO_LEVEL, TWO_LEVEL_ASYM, ASYM = "", "per_group", "two_level", "two_level asym", "asym"

#: (weight type, activation type and scope) → kind. The rest of the weight's scheme is its variant.
_KINDS: dict[tuple[QDType, QDType, QScope], str] = {
    (QDType.INT8, QDType.INT8, QScope.PER_TENSOR): "W8A8",
    (QDType.INT8, QDType.INT8, QScope.PER_TOKEN): "W8A8_DYNAMIC",
    (QDType.INT8, QDType.INT8, QScope.PD_MIX): "W8A8_MIX",
    (QDType.INT8, QDType.FLOAT, QScope.PER_TENSOR): "W8A16",
    (QDType.INT4, QDType.INT8, QScope.PER_TOKEN): "W4A8_DYNAMIC",
    (QDType.INT4, QDType.FLOAT, QScope.PER_TENSOR): "W4A16",
    (QDType.INT4, QDType.INT4, QScope.PER_TOKEN): "W4A4_DYNAMIC",
    (QDType.FP8_E4M3, QDType.FP8_E4M3, QScope.PER_TOKEN): "W8A8FP8_DYNAMIC",
    (QDType.MXFP8, QDType.MXFP8, QScope.PER_BLOCK): "W8A8_MXFP8",
    (QDType.MXFP4, QDType.MXFP8, QScope.PER_BLOCK): "W4A8_MXFP",
    (QDType.MXFP4, QDType.MXFP4, QScope.PER_BLOCK): "W4A4_MXFP4",
    (QDType.MXFP4, QDType.MXFP4, QScope.DUAL_SCALE): "W4A4_MXFP4_DUALSCALE",
    (QDType.MXFP4, QDType.FLOAT, QScope.PER_TENSOR): "W4A16_MXFP4",
}
#: kind → what its layout can tell apart of weights, whether or not an engine reads it
LAYOUTS: dict[str, tuple[str, ...]] = {
    "W8A8": (PLAIN,),
    "W8A8_DYNAMIC": (PLAIN, PER_GROUP, ASYM),
    "W8A8_MIX": (PLAIN,),
    "W8A16": (PLAIN, PER_GROUP, ASYM),
    "W4A8_DYNAMIC": (PLAIN, TWO_LEVEL, TWO_LEVEL_ASYM),
    "W4A16": (PLAIN, PER_GROUP),
    "W4A4_DYNAMIC": (PLAIN, PER_GROUP, ASYM),
    "W8A8FP8_DYNAMIC": (PLAIN,),
    "W8A8_MXFP8": (PLAIN,),
    "W4A8_MXFP": (PLAIN,),
    "W4A4_MXFP4": (PLAIN,),
    "W4A16_MXFP4": (PLAIN,),
    "W4A4_MXFP4_DUALSCALE": (PLAIN,),
}
OLD_FP8_KIND = "WFP8AFP8_DYNAMIC"  # what an older writer called W8A8FP8_DYNAMIC; no engine registers it


def kind_of(scheme: LinearScheme) -> str | None:
    """The kind whose layout fits; None when there is none."""
    weight, act = scheme.weight, scheme.act
    kind = _KINDS.get((weight.dtype, act.dtype, QScope.PER_TENSOR if act.is_float else act.scope))
    if weight.is_mx:
        return kind if weight.dual_block == act.dual_block else None
    if kind is None or variant_of(weight) not in LAYOUTS[kind] or weight.scope in (QScope.PER_TENSOR, QScope.PER_BLOCK):
        return None
    dynamic_asym = act.scope is QScope.PER_TOKEN and not act.symmetric
    return None if dynamic_asym else kind  # every reader computes its dynamic scales symmetric


def variant_of(scheme: QScheme) -> str:
    """The word for how a weight differs from symmetric with one scale a row."""
    if scheme.two_level:
        return TWO_LEVEL if scheme.symmetric else TWO_LEVEL_ASYM
    if not scheme.symmetric:
        return ASYM
    return PER_GROUP if scheme.scope is QScope.PER_GROUP else PLAIN


def group_size_of(kind: str, scheme: QScheme) -> int | None:
    """What the description's one `group_size` must be for this linear; None when its reader does not look."""
    if scheme.is_mx:
        return 32
    if kind == "W4A8_DYNAMIC" or scheme.scope is QScope.PER_GROUP:
        return scheme.group_size
    return None


def tensors_of(kind: str, linear: QuantLinear, model_dtype: torch.dtype, parts: int, name: str) -> dict[str, Tensor]:
    """Last part of the tensor's name → values as stored; on meta for a linear on meta.

    Args:
        kind: from `kind_of`.
        linear: its scales are float32.
        model_dtype: the type the model is served in; decides the type of deq_scale.
        parts: columns of scale_bias: 1, or `ROW_PARTS` for a linear that engines split along its input.
        name: of the module, for errors.
    """
    tensors = _WRITERS[kind](linear, model_dtype, parts, name)
    if linear.bias is not None:
        # quant_bias holds it for static kinds; their float bias is a copy in the type of the other scales.
        tensors["bias"] = linear.bias.float() if kind in STATIC_SCOPES else linear.bias
    return tensors


def linear_of(kind: str, tensors: Mapping[str, Tensor]) -> QuantLinear:
    """The linear that `tensors_of` stored so."""
    return _READERS[kind](tensors)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32)


def _channels(linear: QuantLinear, *_: object) -> dict[str, Tensor]:
    """weight, weight_scale and weight_offset; one code a byte."""
    offset = linear.weight_offset
    return {
        "weight": linear.codes,
        "weight_scale": linear.weight_scale,
        "weight_offset": _zeros(linear.weight_scale) if offset is None else offset,
    }


def _static(linear: QuantLinear, model_dtype: torch.dtype, parts: int, name: str) -> dict[str, Tensor]:
    assert linear.act_scale is not None, "a static scheme has its scale"
    scale, offset = linear.act_scale, linear.act_offset
    worth_O = deq_scale(linear.weight_scale, scale)
    bias_O = quant_bias(linear.codes, linear.weight_scale, scale, offset, linear.bias, name=name)
    return _channels(linear) | {
        "input_scale": scale,
        "input_offset": _zeros(scale) if offset is None else offset,
        "quant_bias": bias_O,
        "deq_scale": deq_scale_int64(worth_O) if model_dtype is torch.float16 else worth_O,
    }


def _w4a8(linear: QuantLinear, model_dtype: torch.dtype, parts: int, name: str) -> dict[str, Tensor]:
    codes_OI, scale, second = linear.codes, linear.weight_scale, linear.weight_scale_second
    stored = {
        "weight": pack_rows_int4(codes_OI, name=name),
        "weight_scale": scale,
        "weight_offset": _zeros(scale),
    }
    if second is not None and linear.weight_offset_second is not None:
        stored |= {"weight_scale_second": second, "weight_offset_second": linear.weight_offset_second}
        width = linear.in_features // second.shape[1]
        codes_OI = codes_OI - linear.weight_offset_second.to(torch.int8).repeat_interleave(width, dim=1)
        scale = scale * second
    return stored | {"scale_bias": w4a8_scale_bias(codes_OI, scale, parts, name=name)}


def _w4a16(linear: QuantLinear, model_dtype: torch.dtype, parts: int, name: str) -> dict[str, Tensor]:
    return {
        "weight_packed": pack_columns_int32(linear.codes, 4),
        "weight_scale": linear.weight_scale.to(model_dtype),
        "weight_shape": torch.tensor([linear.out_features, linear.in_features], dtype=torch.int32),
    }


def _fp8(linear: QuantLinear, model_dtype: torch.dtype, parts: int, name: str) -> dict[str, Tensor]:
    scale = linear.weight_scale
    return {"weight": linear.codes, "weight_scale": scale, "weight_offset": _zeros(scale).to(model_dtype)}


def _mxfp8(linear: QuantLinear, *_: object) -> dict[str, Tensor]:
    return {"weight": linear.codes, "weight_scale": linear.weight_scale}


def _mxfp4(linear: QuantLinear, model_dtype: torch.dtype, parts: int, name: str) -> dict[str, Tensor]:
    return {"weight": pack_columns_fp4(linear.codes, name=name), "weight_scale": linear.weight_scale}


def _dual_scale(linear: QuantLinear, model_dtype: torch.dtype, parts: int, name: str) -> dict[str, Tensor]:
    assert linear.weight_scale_second is not None, "dual_scale has outer scales"
    return _mxfp4(linear, model_dtype, parts, name) | {"weight_dual_scale": linear.weight_scale_second}


_WRITERS: dict[str, _Writer] = {
    "W8A8": _static,
    "W8A8_MIX": _static,
    "W8A8_DYNAMIC": _channels,
    "W8A16": _channels,
    "W4A4_DYNAMIC": _channels,
    "W4A8_DYNAMIC": _w4a8,
    "W4A16": _w4a16,
    "W8A8FP8_DYNAMIC": _fp8,
    OLD_FP8_KIND: _fp8,
    "W8A8_MXFP8": _mxfp8,
    "W4A8_MXFP": _mxfp4,
    "W4A4_MXFP4": _mxfp4,
    "W4A16_MXFP4": _mxfp4,
    "W4A4_MXFP4_DUALSCALE": _dual_scale,
}


def _weight_scheme(dtype: QDType, codes_OI: Tensor, scale: Tensor, offset: Tensor | None) -> QScheme:
    groups = scale.shape[1]
    scope = QScope.PER_CHANNEL if groups == 1 else QScope.PER_GROUP
    return QScheme(dtype, scope, offset is None, group_size=0 if groups == 1 else codes_OI.shape[1] // groups)


def _offset(stored: Tensor | None) -> Tensor | None:
    """A stored offset; None when it is all zeros, which is how symmetric schemes are stored."""
    return None if stored is None or not stored.any() else stored


def _read_channels(dtype: QDType, act: QScheme) -> _Reader:
    def read(tensors: Mapping[str, Tensor]) -> QuantLinear:
        codes_OI, scale, offset = tensors["weight"], tensors["weight_scale"], _offset(tensors.get("weight_offset"))
        scheme = LinearScheme(_weight_scheme(dtype, codes_OI, scale, offset), act)
        return QuantLinear(scheme, WeightCodes(codes_OI, scale, offset), bias=tensors.get("bias"))

    return read


def _read_static(scope: QScope) -> _Reader:
    def read(tensors: Mapping[str, Tensor]) -> QuantLinear:
        act_scale, act_offset = tensors["input_scale"], _offset(tensors["input_offset"])
        worth_O = tensors["deq_scale"]
        worth_O = deq_scale_float32(worth_O) if worth_O.dtype is torch.int64 else worth_O
        scale = tensors.get("weight_scale", (worth_O / act_scale)[:, None])  # optional: no reader uses it
        if scope is QScope.PD_MIX:
            act_offset = tensors["input_offset"]  # always asymmetric
        scheme = LinearScheme(QScheme(QDType.INT8, QScope.PER_CHANNEL), QScheme(QDType.INT8, scope, act_offset is None))
        codes = WeightCodes(tensors["weight"], scale)
        return QuantLinear(scheme, codes, bias=tensors.get("bias"), act_scale=act_scale, act_offset=act_offset)

    return read


def _read_w4a8(tensors: Mapping[str, Tensor]) -> QuantLinear:
    codes_OI, second = unpack_rows_int4(tensors["weight"]), tensors.get("weight_scale_second")
    weight = QScheme(QDType.INT4, QScope.PER_CHANNEL)
    if second is not None:
        symmetric = not tensors["weight_offset_second"].any()
        group = codes_OI.shape[1] // second.shape[1]
        weight = QScheme(QDType.INT4, QScope.PER_GROUP, symmetric, group_size=group, two_level=True)
    codes = WeightCodes(codes_OI, tensors["weight_scale"], None, second, tensors.get("weight_offset_second"))
    return QuantLinear(LinearScheme(weight, INT8_TOKEN), codes, bias=tensors.get("bias"))


def _read_w4a16(tensors: Mapping[str, Tensor]) -> QuantLinear:
    codes_OI = unpack_columns_int32(tensors["weight_packed"], 4, int(tensors["weight_shape"][1]))
    scale = tensors["weight_scale"].float()
    scheme = LinearScheme(_weight_scheme(QDType.INT4, codes_OI, scale, None))
    return QuantLinear(scheme, WeightCodes(codes_OI, scale), bias=tensors.get("bias"))


def _read_fp8(tensors: Mapping[str, Tensor]) -> QuantLinear:
    scheme = LinearScheme(QScheme(QDType.FP8_E4M3, QScope.PER_CHANNEL), FP8_TOKEN)
    return QuantLinear(scheme, WeightCodes(tensors["weight"], tensors["weight_scale"]), bias=tensors.get("bias"))


def _read_mx(weight: QScheme, act: QScheme) -> _Reader:
    def read(tensors: Mapping[str, Tensor]) -> QuantLinear:
        codes = tensors["weight"]
        codes_OI = codes if weight.dtype is QDType.MXFP8 else unpack_columns_fp4(codes)
        scheme = LinearScheme(weight, act)
        return QuantLinear(scheme, WeightCodes(codes_OI, tensors["weight_scale"]), bias=tensors.get("bias"))

    return read


def _read_dual_scale(tensors: Mapping[str, Tensor]) -> QuantLinear:
    codes_OI, outer = unpack_columns_fp4(tensors["weight"]), tensors["weight_dual_scale"]
    scheme = QScheme(QDType.MXFP4, QScope.DUAL_SCALE, dual_block=codes_OI.shape[1] // outer.shape[1])
    codes = WeightCodes(codes_OI, tensors["weight_scale"], scale_second=outer)
    return QuantLinear(LinearScheme(scheme, scheme), codes, bias=tensors.get("bias"))


_READERS: dict[str, _Reader] = {
    "W8A8": _read_static(QScope.PER_TENSOR),
    "W8A8_MIX": _read_static(QScope.PD_MIX),
    "W8A8_DYNAMIC": _read_channels(QDType.INT8, INT8_TOKEN),
    "W8A16": _read_channels(QDType.INT8, FLOAT),
    "W4A4_DYNAMIC": _read_channels(QDType.INT4, INT4_TOKEN),
    "W4A8_DYNAMIC": _read_w4a8,
    "W4A16": _read_w4a16,
    "W8A8FP8_DYNAMIC": _read_fp8,
    OLD_FP8_KIND: _read_fp8,
    "W8A8_MXFP8": _read_mx(MXFP8, MXFP8),
    "W4A8_MXFP": _read_mx(MXFP4, MXFP8),
    "W4A4_MXFP4": _read_mx(MXFP4, MXFP4),
    "W4A16_MXFP4": _read_mx(MXFP4, FLOAT),
    "W4A4_MXFP4_DUALSCALE": _read_dual_scale,
}
