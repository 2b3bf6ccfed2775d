"""A linear whose weight is codes: carries all that a saver writes, and computes what an engine would.

Letters: T tokens, O output rows, I input columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from msmodelslim.ir.quantize import WeightCodes, codes_on_meta, dequantize_weight, fake_quantize_act, refuse_shape
from msmodelslim.ir.scheme import LinearScheme, QDType, QScheme, QScope

_PREFILL = QScheme(QDType.INT8, QScope.PER_TOKEN)  # the dynamic half of pd_mix


class QuantLinear(nn.Module):
    """y = x̂·Ŵᵀ + b with x̂ and Ŵ quantized and dequantized by the scheme.

    Args:
        scheme: of weight and activation.
        codes: the weight, from `quantize_weight` or a better method.
        bias: [O], kept in its own type.
        act_scale: float32 [1], for a static activation.
        act_offset: float32 [1], for a static asymmetric activation.

    Raises:
        ValueError: a static activation without its scale or offset, or parameters that the scheme has no use for.
    """

    codes: Tensor
    weight_scale: Tensor
    weight_offset: Tensor | None
    weight_scale_second: Tensor | None
    weight_offset_second: Tensor | None
    act_scale: Tensor | None
    act_offset: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        scheme: LinearScheme,
        codes: WeightCodes,
        *,
        bias: Tensor | None = None,
        act_scale: Tensor | None = None,
        act_offset: Tensor | None = None,
    ) -> None:
        super().__init__()
        _refuse_act_qparam(scheme.act, act_scale, act_offset)
        self.scheme = scheme
        self.out_features, self.in_features = codes.codes_OI.shape
        self.register_buffer("codes", codes.codes_OI)
        self.register_buffer("weight_scale", codes.scale)
        self.register_buffer("weight_offset", codes.offset)
        self.register_buffer("weight_scale_second", codes.scale_second)
        self.register_buffer("weight_offset_second", codes.offset_second)
        self.register_buffer("act_scale", act_scale)
        self.register_buffer("act_offset", act_offset)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._holds = False
        self._held_OI: Tensor | None = None

    @classmethod
    def on_meta(
        cls,
        scheme: LinearScheme,
        out_features: int,
        in_features: int,
        bias_dtype: torch.dtype | None,
        name: str = "weight",
    ) -> Self:
        """The same module with the right shapes and types but no data, for a rehearsal.

        Args:
            bias_dtype: type of the bias; None for a linear without one.
            name: module, for errors.

        Raises:
            UnsupportedError: as `refuse_shape`.
        """
        refuse_shape(scheme, out_features, in_features, name)
        static = scheme.act.is_static
        return cls(
            scheme,
            codes_on_meta(scheme.weight, out_features, in_features),
            bias=None if bias_dtype is None else torch.empty(out_features, dtype=bias_dtype, device="meta"),
            act_scale=torch.empty(1, device="meta") if static else None,
            act_offset=torch.empty(1, device="meta") if static and not scheme.act.symmetric else None,
        )

    @property
    def weight_codes(self) -> WeightCodes:
        """The weight's tensors together, as `quantize_weight` gave them."""
        return WeightCodes(
            self.codes, self.weight_scale, self.weight_offset, self.weight_scale_second, self.weight_offset_second
        )

    def dequantized_weight(self) -> Tensor:
        """What the codes stand for, float32 [O, I]."""
        return dequantize_weight(self.weight_codes, self.scheme.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] → [..., O] in the type of x; computed in float32, or float64 if x is (but see `held_weights`).

        pd_mix: several tokens are a prefill, each quantized for itself; one token is a decode, with the static scale.
        """
        scheme = self.scheme.act
        if scheme.scope is QScope.PD_MIX and x.numel() > self.in_features:
            scheme = _PREFILL
        as_it_is = self._holds and scheme.is_float  # engines multiply in the type of the input then
        x_quantized = x if as_it_is else fake_quantize_act(x, scheme, self.act_scale, self.act_offset)
        weight_OI = self._held_OI
        if weight_OI is None or weight_OI.dtype is not x_quantized.dtype:
            weight_OI = self.dequantized_weight().to(x_quantized.dtype)
        if self._holds:
            self._held_OI = weight_OI
        bias = None if self.bias is None else self.bias.to(x_quantized.dtype)
        return functional.linear(x_quantized, weight_OI, bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.scheme}, bias={self.bias is not None}"


@contextmanager
def held_weights(module: nn.Module) -> Iterator[None]:
    """For many calls: the quantized linears of `module` keep what their codes stand for, not to make it each time.

    Linears whose input stays float multiply in the type of their input meanwhile, as engines do, which costs half.
    """
    linears = [part for part in module.modules() if isinstance(part, QuantLinear)]
    try:
        for linear in linears:
            linear._holds = True
        yield
    finally:
        for linear in linears:
            linear._holds, linear._held_OI = False, None


def _refuse_act_qparam(scheme: QScheme, scale: Tensor | None, offset: Tensor | None) -> None:
    wants_offset = scheme.is_static and not scheme.symmetric
    for what, given, wanted in (("act_scale", scale, scheme.is_static), ("act_offset", offset, wants_offset)):
        if (given is not None) != wanted:
            raise ValueError(f"act {scheme} {'needs' if wanted else 'has no use for'} {what}")
