"""Clip the largest weights of a block where that loses less on the inputs that calibration saw (AWQ's clip search).

A row's loss on tokens X is Σ (x·(w − ŵ))² = (w − ŵ) H (w − ŵ)ᵀ with H = XᵀX, so the tokens themselves are not needed.
For a group, H is its diagonal block.

Letters: O output rows, I input columns, R rows of a chunk, G groups of a row, E columns of a group.

Source: AWQ, arXiv:2306.00978, section 4 (weight clipping).
"""

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from msmodelslim.ir.qparam import qparam, to_codes
from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import QDType, QScheme, QScope
from msmodelslim.registry import register
from msmodelslim.weight.base import (
    Gram,
    Rounded,
    WeightMethod,
    importance,
    improvement,
    refuse_gram,
    refuse_weight,
    unit_of,
)

_CHUNK_ELEMENTS = 2**20


@register("awq_clip")
class AwqClip(WeightMethod):
    """Min-max with the range shrunk, block by block, to what loses least on the calibration inputs; int8 and int4."""

    class Ext(WeightMethod.Ext, frozen=True):
        n_grid: int = Field(20, ge=1, description="steps that the whole range is divided into")
        max_shrink: float = Field(0.5, gt=0, lt=1, description="largest share of the range that may be clipped")
        weighting: Literal["gram", "diagonal"] = Field(
            "gram", description="loss on the inputs: exact within a block, or as if its columns were independent"
        )

    needs_gram = True

    def __init__(self, ext: Any) -> None:
        super().__init__(ext)
        self.diagonal_suffices = ext.weighting == "diagonal"

    @classmethod
    def supports(cls, scheme: QScheme) -> bool:
        return (
            scheme.dtype in (QDType.INT8, QDType.INT4)
            and scheme.scope in (QScope.PER_CHANNEL, QScope.PER_GROUP)
            and not scheme.two_level
        )

    def cost(self, out_features: int, in_features: int) -> float:
        width = 1 if self.ext.weighting == "diagonal" else self.ext.group_size or in_features
        return (2.0 * width + 40) * len(self._ratios()) * out_features * in_features

    def quantize(
        self,
        weight_OI: Tensor,
        scheme: QScheme,
        *,
        scale_dtype: torch.dtype = torch.float32,
        name: str = "weight",
        gram: Gram | None = None,
    ) -> Rounded:
        self.refuse_scheme(scheme, name)
        refuse_weight(weight_OI, scheme, name)
        columns = weight_OI.shape[1]
        width = scheme.group_size or columns
        importance_I = importance(gram, columns, name)
        gram_GEE = None
        if importance_I is not None and gram is not None and self.ext.weighting == "gram":
            gram_GEE = _diagonal_blocks(gram, width, name)
        codes, scales, offsets = [], [], []
        error = minmax_error = 0.0
        for part_OI in weight_OI.split(max(_CHUNK_ELEMENTS // columns, 1)):
            weight_RGE = part_OI.float().unflatten(1, (-1, width))
            scale_RG1, offset_RG1, error_RG, minmax_RG = self._search(
                weight_RGE, scheme, scale_dtype, gram_GEE, importance_I
            )
            codes.append(to_codes(weight_RGE, scale_RG1, offset_RG1, scheme).flatten(1).to(torch.int8))
            scales.append(scale_RG1.squeeze(2))
            offsets += [] if offset_RG1 is None else [offset_RG1.squeeze(2)]
            error, minmax_error = error + float(error_RG.sum()), minmax_error + float(minmax_RG.sum())
        record = improvement(error, minmax_error)
        if importance_I is None:
            record |= {"fallback": "unweighted clip search", "why": "no calibration token reached it"}
        offset = torch.cat(offsets) if offsets else None
        return Rounded(WeightCodes(torch.cat(codes), torch.cat(scales), offset), record)

    def _ratios(self) -> list[float]:
        return [
            1 - step / self.ext.n_grid for step in range(math.floor(self.ext.max_shrink * self.ext.n_grid + 1e-9) + 1)
        ]

    def _search(
        self,
        weight_RGE: Tensor,
        scheme: QScheme,
        scale_dtype: torch.dtype,
        gram_GEE: Tensor | None,
        importance_I: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Scale and offset [R, G, 1], and the loss with them and with min-max, float64 [R, G]."""
        low_RG1, high_RG1 = weight_RGE.amin(2, keepdim=True), weight_RGE.amax(2, keepdim=True)
        # Losses are squares, so they are taken in units of a power of two a block.
        unit_RG1 = unit_of(torch.maximum(-low_RG1, high_RG1))
        best: tuple[Tensor, Tensor | None, Tensor, Tensor] | None = None
        for ratio in self._ratios():
            scale_RG1, offset_RG1 = qparam(low_RG1 * ratio, high_RG1 * ratio, scheme, scale_dtype)
            steps_RGE = to_codes(weight_RGE, scale_RG1, offset_RG1, scheme)
            if offset_RG1 is not None:
                steps_RGE -= offset_RG1
            lost_RGE = (weight_RGE - steps_RGE * scale_RG1) / unit_RG1
            error_RG = _loss(lost_RGE, gram_GEE, importance_I) * unit_RG1.squeeze(2).double().square()
            if best is None:
                best = scale_RG1, offset_RG1, error_RG, error_RG
                continue
            better_RG1 = (error_RG < best[2]).unsqueeze(2)
            best = (
                torch.where(better_RG1, scale_RG1, best[0]),
                None if offset_RG1 is None or best[1] is None else torch.where(better_RG1, offset_RG1, best[1]),
                torch.minimum(error_RG, best[2]),
                best[3],
            )
        assert best is not None, "ratio 1 is always tried"
        return best


def _diagonal_blocks(gram: Gram, width: int, name: str) -> Tensor:
    """The part of the Gram matrix that each group sees, relative to its mean diagonal: [G, E, E]."""
    if gram.sum_II.dim() == 1:
        raise ValueError(f"{name}: weighting gram needs the whole Gram matrix, not its diagonal; write diagonal")
    refuse_gram(gram, len(gram.sum_II), name)
    blocks = gram.sum_II.float() / gram.diagonal().float().mean()
    return torch.stack([blocks[at : at + width, at : at + width] for at in range(0, len(blocks), width)])


def _loss(lost_RGE: Tensor, gram_GEE: Tensor | None, importance_I: Tensor | None) -> Tensor:
    """Loss of each block on the calibration inputs, or plain squares where nothing is known of them; float64 [R, G]."""
    if gram_GEE is not None:
        lost_GRE = lost_RGE.transpose(0, 1)
        return torch.bmm(lost_GRE, gram_GEE).mul_(lost_GRE).sum(2, dtype=torch.float64).T
    if importance_I is None:
        return lost_RGE.square().sum(2, dtype=torch.float64)
    return (lost_RGE.square() * importance_I.unflatten(0, lost_RGE.shape[1:])).sum(2, dtype=torch.float64)
