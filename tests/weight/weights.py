"""Weights that methods are tried on, and what they lose, computed in float64 by the definitions."""

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import QDType, QScheme, QScope
from msmodelslim.weight.base import Gram
from tests.ir.oracle import dequantized

INT8, INT4, FP8, MXFP8, MXFP4 = QDType.INT8, QDType.INT4, QDType.FP8_E4M3, QDType.MXFP8, QDType.MXFP4
CHANNEL, GROUP, BLOCK = QScope.PER_CHANNEL, QScope.PER_GROUP, QScope.PER_BLOCK
DUAL = QScheme(MXFP4, QScope.DUAL_SCALE, dual_block=64)


def integer_schemes(group: int = 16) -> list[QScheme]:
    """int8 and int4, per channel and per group, with and without offset."""
    return [
        QScheme(dtype, scope, symmetric, group if scope is GROUP else 0)
        for dtype in (INT8, INT4)
        for scope in (CHANNEL, GROUP)
        for symmetric in (True, False)
    ]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal_weight(rows: int = 12, columns: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size, some of one sign only."""
    weight = torch.randn(rows, columns, generator=generator(seed)) * torch.logspace(-3, 1, rows)[:, None]
    weight[1], weight[2] = weight[1].abs(), -weight[2].abs()
    return weight.to(dtype)


def correlated_gram(columns: int = 64, tokens: int = 256, seed: int = 0) -> Gram:
    """Inputs with strongly related columns of very different size, as in a transformer."""
    mix = torch.randn(columns, columns, generator=generator(seed + 1)) * torch.logspace(-1, 1, columns)
    x = torch.randn(tokens, columns, generator=generator(seed)) @ (mix + 3 * torch.eye(columns))
    return Gram(x.T @ x, tokens)


@st.composite
def odd_weights(draw: st.DrawFn, columns: int = 32) -> Tensor:
    """Zero rows, constant rows, one outlier, one sign, equal magnitudes, tiny, huge, half precision."""
    rows = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**16))
    weight = torch.randn(rows, columns, generator=generator(seed))
    for row in range(rows):
        kind = draw(st.sampled_from(["plain", "zero", "constant", "outlier", "positive", "signs", "lattice", "sparse"]))
        if kind in ("zero", "constant"):
            weight[row] = 0 if kind == "zero" else -1.5
        elif kind == "outlier":
            weight[row, draw(st.integers(0, columns - 1))] = 100
        elif kind == "positive":
            weight[row] = weight[row].abs()
        elif kind == "signs":
            weight[row] = weight[row].sign()
        elif kind == "lattice":
            weight[row] = (weight[row] * 3).round() * 0.37
        elif kind == "sparse":
            weight[row, torch.rand(columns, generator=generator(seed + 1)) < 0.8] = 0
    weight *= 2.0 ** draw(st.sampled_from([-120, -40, -10, 0, 10, 60]))
    return weight.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def lost(weight: Tensor, codes: WeightCodes, scheme: QScheme) -> NDArray[np.float64]:
    """w − ŵ, float64."""
    return weight.double().numpy() - dequantized(codes, scheme)


def squares(weight: Tensor, codes: WeightCodes, scheme: QScheme, importance: Tensor | None = None) -> float:
    """Σ h·(w − ŵ)²."""
    error = lost(weight, codes, scheme) ** 2
    return float(error.sum() if importance is None else (error * importance.double().numpy()).sum())


def loss_on_inputs(weight: Tensor, codes: WeightCodes, scheme: QScheme, gram: Gram) -> float:
    """tr(Δ H Δᵀ)."""
    error = lost(weight, codes, scheme)
    return float(((error @ gram.sum_II.double().numpy()) * error).sum())
