"""Scale and offset of integer blocks by search: exact, by alternating least squares, or on a grid.

A candidate counts only as it will be stored: its scale is rounded first, codes are chosen with the rounded scale, and
its error is measured in float64. Min-max is always among the candidates, so no block is ever worse.

Letters: N blocks that share a scale, E elements of a block.
"""

from enum import StrEnum

import torch
from torch import Tensor

from msmodelslim.ir.qparam import INT_RANGE, qparam, storable, to_codes
from msmodelslim.ir.quantize import WeightCodes
from msmodelslim.ir.scheme import QDType, QScheme
from msmodelslim.weight.base import unit_of
from msmodelslim.weight.exact_scale import certain_ends, exact_scale

_CHUNK_ELEMENTS = 2**18  # of weights searched at a time: their walks fit into a cache
_COARSE = [0.05 * step for step in range(6, 22)]  # 0.3 to 1.05 of the min-max scale
_FINE = 0.0125  # step of a second look around the best of the coarse grid
_WIDEST_INT8 = 1.05  # of the min-max scale: with 127 codes, a wider one only ever rounds worse by chance
_OFFSETS = (0, -1, 1, -2, 2)  # around the min-max offset


class Algo(StrEnum):
    """How the scale is searched; values are the words of recipes."""

    EXACT = "exact"
    ALS = "als"
    GRID = "grid"


class Blocks:
    """Blocks to round, and how. Weights and scales are in units of a power of two a block, so that squares stay finite.

    Args:
        weight_NE: float32, finite.
        importance_NE: weight of each squared error, above 0, mean about 1; float32, or something that broadcasts.
        scheme: int8 or int4.
        scale_dtype: the type the scale will be stored in.
    """

    def __init__(self, weight_NE: Tensor, importance_NE: Tensor, scheme: QScheme, scale_dtype: torch.dtype) -> None:
        low_N1, high_N1 = weight_NE.amin(1, keepdim=True), weight_NE.amax(1, keepdim=True)
        self._unit_N1 = unit_of(torch.maximum(-low_N1, high_N1))
        self.weight_NE = weight_NE / self._unit_N1
        self.importance_NE = importance_NE
        self.scheme = scheme
        self.scale_dtype = scale_dtype
        scale_N1, self.minmax_offset_N1 = qparam(low_N1, high_N1, scheme, scale_dtype)
        self.minmax_scale_N1 = scale_N1 / self._unit_N1

    def real_scale(self, scale_N1: Tensor) -> Tensor:
        """A scale in the units of the weight as it was given."""
        return scale_N1 * self._unit_N1

    def real_error(self, error_N1: Tensor) -> Tensor:
        """A squared error in the units of the weight as it was given."""
        return error_N1 * self._unit_N1.double().square()

    def storable(self, scale_N1: Tensor) -> Tensor:
        """The nearest scale that can be stored, of the same sign."""
        return storable(self.real_scale(scale_N1.abs()), self.scale_dtype).copysign_(scale_N1) / self._unit_N1

    def codes(self, scale_N1: Tensor, offset_N1: Tensor | None) -> Tensor:
        """Codes, float32 [N, E]."""
        return to_codes(self.weight_NE, scale_N1, offset_N1, self.scheme)

    def steps(self, scale_N1: Tensor, offset_N1: Tensor | None) -> Tensor:
        """Codes minus the offset: how many scales each element is worth, float32 [N, E]."""
        codes_NE = self.codes(scale_N1, offset_N1)
        return codes_NE if offset_N1 is None else codes_NE.sub_(offset_N1)

    def error(self, scale_N1: Tensor, offset_N1: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
        """Σ h·(w − ŵ)² of each block, [N, 1]."""
        values_NE = self.steps(scale_N1, offset_N1).to(dtype).mul_(scale_N1)
        return values_NE.sub_(self.weight_NE).square_().mul_(self.importance_NE).sum(1, keepdim=True)

    def best_scale(self, steps_NE: Tensor) -> Tensor:
        """The scale that fits these steps best, float64 [N, 1]; 0 or NaN where no scale can."""
        weighted_NE = steps_NE.double() * self.importance_NE
        return (weighted_NE * self.weight_NE).sum(1, keepdim=True) / (weighted_NE * steps_NE).sum(1, keepdim=True)


class BlockSearch:
    """Scale and offset of each block, as good as the candidates so far.

    Args:
        blocks: what to round.
        negative_scale: consider scales below zero too; they put the extra negative code on the other side.
    """

    def __init__(self, blocks: Blocks, negative_scale: bool = False) -> None:
        self.blocks = blocks
        self.scale_N1, self.offset_N1 = blocks.minmax_scale_N1, blocks.minmax_offset_N1
        self.error_N1 = blocks.error(self.scale_N1, self.offset_N1)
        #: what min-max loses, Σ h·(w − ŵ)², float64 [N, 1]
        self.minmax_error_N1 = self.error_N1
        self._signs = (1, -1) if negative_scale and blocks.scheme.symmetric else (1,)

    def run(self, algo: Algo, rounds: int) -> None:
        """Search; afterwards `scale_N1`, `offset_N1` and `error_N1` are the best found.

        Args:
            algo: `exact`: the global optimum; of offsets within two of the min-max one for int4, of the min-max one for
                int8, whose scale is at most 1.05 of min-max. `als`: alternating least squares from min-max. `grid`: 22
                multiples of the min-max scale.
            rounds: of `als`, at most.
        """
        if algo is Algo.ALS:
            self._alternate(rounds)
            return
        start = self.offset_N1
        reach = _OFFSETS if start is not None and self.blocks.scheme.dtype is QDType.INT4 else (0,)
        qmin, qmax = INT_RANGE[self.blocks.scheme.dtype]
        for sign in self._signs:
            for shift in reach:
                offset_N1 = None if start is None else (start + shift).clamp_(qmin, qmax)
                guess_N1, error_N1 = self._grid(sign * self.blocks.minmax_scale_N1, offset_N1)
                if algo is Algo.EXACT:
                    self._consider_around(self._walk(sign, error_N1, offset_N1), offset_N1)
                else:
                    self._consider_around(guess_N1.double(), offset_N1)
        if algo is Algo.GRID or start is not None:
            self._alternate(2)

    def _grid(self, scale_N1: Tensor, offset_N1: Tensor | None) -> tuple[Tensor, Tensor]:
        """The best of some multiples of a scale, and its error in float32."""
        best_N1, error_N1 = scale_N1, torch.full_like(scale_N1, torch.inf)
        for ratio in _COARSE:
            best_N1, error_N1 = self._better(scale_N1 * ratio, offset_N1, best_N1, error_N1)
        middle_N1 = best_N1
        for step in (-3, -2, -1, 1, 2, 3):
            best_N1, error_N1 = self._better(middle_N1 + scale_N1 * (_FINE * step), offset_N1, best_N1, error_N1)
        return best_N1, error_N1

    def _better(
        self, scale_N1: Tensor, offset_N1: Tensor | None, best_N1: Tensor, error_N1: Tensor
    ) -> tuple[Tensor, Tensor]:
        found_N1 = self.blocks.error(scale_N1, offset_N1, torch.float32)
        return torch.where(found_N1 < error_N1, scale_N1, best_N1), torch.minimum(found_N1, error_N1)

    def _walk(self, sign: int, error_N1: Tensor, offset_N1: Tensor | None) -> Tensor:
        """The exact optimum for an offset and the sign of the scale."""
        qmin, qmax = INT_RANGE[self.blocks.scheme.dtype]
        zero_N1 = torch.zeros_like(error_N1) if offset_N1 is None else offset_N1
        below_N1, above_N1 = (zero_N1 - qmin, qmax - zero_N1)[::sign]
        weight_NE, importance_NE = self.blocks.weight_NE, self.blocks.importance_NE
        minmax_N1 = self.blocks.minmax_scale_N1
        error_N1 = torch.minimum(error_N1, self.error_N1.float())
        low_N1, high_N1 = certain_ends(weight_NE, importance_NE, below_N1, above_N1, minmax_N1, error_N1)
        if self.blocks.scheme.dtype is QDType.INT8:
            high_N1 = torch.minimum(high_N1, minmax_N1 * _WIDEST_INT8)
        return sign * exact_scale(weight_NE, importance_NE, below_N1, above_N1, low_N1, high_N1)

    def _consider_around(self, scale_N1: Tensor, offset_N1: Tensor | None) -> None:
        """Take a scale, or a storable neighbour of it, where one is better than the best so far."""
        step = torch.finfo(self.blocks.scale_dtype).eps / 2
        spread = (1.0,) if self.blocks.scale_dtype is torch.float32 else (1.0, 1 - step, 1 + step)
        for factor in spread:
            self._consider((scale_N1 * factor).float(), offset_N1)

    def _consider(self, scale_N1: Tensor, offset_N1: Tensor | None) -> bool:
        """Take a candidate where it is better; says whether it was anywhere."""
        usable_N1 = scale_N1.isfinite() & (scale_N1 != 0)
        scale_N1 = torch.where(usable_N1, self.blocks.storable(scale_N1), self.scale_N1)
        error_N1 = self.blocks.error(scale_N1, offset_N1)
        better_N1 = error_N1 < self.error_N1
        self.error_N1 = torch.where(better_N1, error_N1, self.error_N1)
        self.scale_N1 = torch.where(better_N1, scale_N1, self.scale_N1)
        if offset_N1 is not None and self.offset_N1 is not None:
            self.offset_N1 = torch.where(better_N1, offset_N1, self.offset_N1)
        return bool(better_N1.any())

    def _alternate(self, rounds: int) -> None:
        """Codes for the scale, then scale and offset for the codes, while any block gains."""
        for _ in range(rounds):
            steps_NE, offset_N1 = self.blocks.steps(self.scale_N1, self.offset_N1), self.offset_N1
            if offset_N1 is not None:
                shift_N1 = self._regression_shift(steps_NE)
                qmin, qmax = INT_RANGE[self.blocks.scheme.dtype]
                moved_N1 = (offset_N1 + shift_N1).clamp_(qmin, qmax)
                steps_NE = steps_NE - (moved_N1 - offset_N1)
                offset_N1 = moved_N1
            if not self._consider(self.blocks.best_scale(steps_NE).float(), offset_N1):
                return

    def _regression_shift(self, steps_NE: Tensor) -> Tensor:
        """By how many codes the zero point should move, so that w ≈ s·(steps − shift) fits best; whole numbers."""
        h_NE = self.blocks.importance_NE.double().expand_as(steps_NE)
        total_N1 = h_NE.sum(1, keepdim=True)
        mean_w_N1 = (h_NE * self.blocks.weight_NE).sum(1, keepdim=True) / total_N1
        mean_q_N1 = (h_NE * steps_NE).sum(1, keepdim=True) / total_N1
        centred_NE = (steps_NE - mean_q_N1) * h_NE
        slope_N1 = (centred_NE * self.blocks.weight_NE).sum(1, keepdim=True) / (centred_NE * steps_NE).sum(
            1, keepdim=True
        )
        return (mean_q_N1 - mean_w_N1 / slope_N1).round_().nan_to_num_(0, 0, 0).float()


def search_weight(
    weight_OI: Tensor,
    scheme: QScheme,
    importance_I: Tensor | None,
    scale_dtype: torch.dtype,
    algo: Algo,
    rounds: int,
    negative_scale: bool,
) -> tuple[WeightCodes, float, float]:
    """Codes of a whole weight; a few rows at a time, so that temporaries stay small.

    Args:
        weight_OI: finite, any float type.
        scheme: int8 or int4, per_channel or per_group.
        importance_I: weight of each column's squared errors, above 0; None for 1.
        scale_dtype, algo, rounds, negative_scale: as in `Blocks` and `BlockSearch`.

    Returns:
        Codes, Σ h·(w − ŵ)², and the same for min-max.
    """
    columns = weight_OI.shape[1]
    width = scheme.group_size or columns
    if importance_I is None:
        importance_I = torch.ones(columns, device=weight_OI.device)
    importance_GE = importance_I.unflatten(0, (-1, width))
    codes_OI = torch.empty_like(weight_OI, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale_OG = torch.empty(len(weight_OI), len(importance_GE), device=weight_OI.device)
    offset_OG = None if scheme.symmetric else torch.empty_like(scale_OG)
    error = minmax_error = 0.0
    step = max(_CHUNK_ELEMENTS // columns, 1)
    for rows in (slice(start, start + step) for start in range(0, len(weight_OI), step)):
        part_RI = weight_OI[rows].float()
        blocks = Blocks(part_RI.reshape(-1, width), importance_GE.repeat(len(part_RI), 1), scheme, scale_dtype)
        found = BlockSearch(blocks, negative_scale)
        found.run(algo, rounds)
        codes_OI[rows] = blocks.codes(found.scale_N1, found.offset_N1).view_as(part_RI)
        scale_OG[rows] = blocks.real_scale(found.scale_N1).view_as(scale_OG[rows])
        if offset_OG is not None and found.offset_N1 is not None:
            offset_OG[rows] = found.offset_N1.view_as(offset_OG[rows])
        error += float(blocks.real_error(found.error_N1).sum())
        minmax_error += float(blocks.real_error(found.minmax_error_N1).sum())
    return WeightCodes(codes_OI, scale_OG, offset_OG), error, minmax_error
