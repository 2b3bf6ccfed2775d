"""A linear whose input is multiplied at run time: where a channel's factor has no producer that could take it.

Letters: I input columns.
"""

import torch
from torch import Tensor, nn


class InputScale(nn.Module):
    """x · mul_scale, a number a channel; nothing until it is set."""

    def __init__(self, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("mul_scale", torch.ones(columns, dtype=dtype, device=device))
        self.mul_scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mul_scale


class ScaledInputLinear(nn.Module):
    """`linear` behind `div`; stored as `div.mul_scale` and `linear.*`, as the known tools name them.

    Args:
        linear: what was there; its weight may be on `meta`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.div = InputScale(linear.in_features, linear.weight.dtype, linear.weight.device)
        self.linear: nn.Module = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.div(x))
