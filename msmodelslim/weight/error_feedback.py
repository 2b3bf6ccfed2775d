"""Round a weight so that its outputs on the calibration inputs change least, column by column (GPTQ).

The loss of a row is Δ H Δᵀ with Δ = w − ŵ and H the damped Gram matrix. With H = R Rᵀ, R upper triangular, it is
‖Δ R‖², whose entry j depends on Δ up to column j only. So columns are rounded from left to right, each to what makes
its entry least: the target of column j is w_j + Σ_{i<j} Δ_i·R_ij/R_jj. This is GPTQ without its inverse: the Cholesky
factor of H⁻¹ that GPTQ uses is R⁻¹. The result can be refined: the scales are set to what is best for the steps, and
each column is rounded again with all others as they are, which can only lower the loss.

Letters: O output rows, I input columns in the order in which they are rounded, B columns of a block, S stretches of
columns that share scales.

Source: GPTQ, arXiv:2210.17323; the form without an inverse: arXiv:2507.18553; sweeps over columns: QuantEase,
arXiv:2309.01885.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from msmodelslim.weight.column_grid import ColumnGrid

_SYSTEM_ELEMENTS = 2**23  # of the linear systems solved at a time: 64 MiB in float64
_SYSTEM_ROWS = 512  # set up at a time, so that they stay in a cache


def upper_factor(gram_II: Tensor, damping: float) -> Tensor | None:
    """R, upper triangular, with R Rᵀ = H + damping·1; None where that is not positive definite.

    Factored in float32, and where that fails in float64. Measured on linears of a real model with a damping of 0.01 to
    1e-6, the two give the same loss in four digits, and float32 takes half the time.

    Args:
        gram_II: symmetric, float32 or float64; one triangle is read.
        damping: added to the diagonal.
    """
    for dtype in dict.fromkeys((gram_II.dtype, torch.float64)):
        turned_II = gram_II.flip(0, 1).to(dtype)
        turned_II.diagonal().add_(damping)
        lower_II, problem = torch.linalg.cholesky_ex(turned_II)
        if not int(problem) and lower_II.diagonal().isfinite().all():
            return lower_II.to(gram_II.dtype).flip(0, 1)
    return None


def row_loss(lost_IO: Tensor, factor_II: Tensor, damping: float, block: int = 512) -> Tensor:
    """Δ H Δᵀ of each row, undamped: ‖Δ R‖² less what the damping added; float64 [O], not below 0."""
    total_O = lost_IO.square().sum(0, dtype=torch.float64).mul_(-damping)
    for start, stop in _ends(len(lost_IO), block):
        total_O += (factor_II[:stop, start:stop].T @ lost_IO[:stop]).square_().sum(0, dtype=torch.float64)
    return total_O.clamp_(min=0)  # H is semidefinite: below 0 is the rounding of R


def best_scales(wanted_IO: Tensor, steps_IO: Tensor, gram_II: Tensor, width: int) -> Tensor:
    """The scales that lose least with the steps as they are: one small linear system a row.

    Args:
        wanted_IO: H w, columns in their original order.
        steps_IO: ŵ/s, in the same order.
        gram_II: H, damped, in the same order; the type of the weight.
        width: columns that share a scale.

    Returns:
        float64 [S, O]; NaN or nonsense where the steps determine none.
    """
    columns, rows = steps_IO.shape
    count = columns // width
    scale_SO = torch.empty(count, rows, dtype=torch.float64, device=steps_IO.device)
    for part in (slice(*ends) for ends in _ends(rows, min(max(_SYSTEM_ELEMENTS // count**2, 16), _SYSTEM_ROWS))):
        steps_SEO = steps_IO[:, part].unflatten(0, (count, width))
        system_SSO = torch.empty(count, count, steps_SEO.shape[2], dtype=torch.float64, device=steps_IO.device)
        for stretch in range(count):  # symmetric: only stretches from here on
            own = slice(stretch * width, (stretch + 1) * width)
            pull_IO = gram_II[own.start :, own] @ steps_SEO[stretch]
            found_SO = pull_IO.unflatten(0, (-1, width)).mul_(steps_SEO[stretch:]).sum(1)
            system_SSO[stretch, stretch:] = system_SSO[stretch:, stretch] = found_SO.double()
        wanted_SO = (wanted_IO[:, part].unflatten(0, (count, width)) * steps_SEO).sum(1)
        # A stretch whose steps are all zero has no equation; a trace on the diagonal makes its scale 0.
        diagonal_OS = system_SSO.diagonal()
        diagonal_OS.add_(diagonal_OS.mean(1, keepdim=True) * 1e-9 + torch.finfo(torch.float32).tiny)
        solved = torch.linalg.solve_ex(system_SSO.permute(2, 0, 1), wanted_SO.T.double().unsqueeze(2))
        scale_SO[:, part] = solved.result.squeeze(2).T
    return scale_SO


def _ends(length: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, length)) for start in range(0, length, step))


class Feedback:
    """Some rows of a weight while they are rounded.

    Args:
        weight_IO: the rows, transposed.
        block: columns whose errors are handed on together; no matter for the result but for float rounding.
    """

    def __init__(self, weight_IO: Tensor, block: int) -> None:
        self.weight_IO = weight_IO
        self.steps_IO = torch.zeros_like(weight_IO)
        #: w − ŵ
        self.lost_IO = torch.zeros_like(weight_IO)
        self._block = block

    def feed_back(self, grid: ColumnGrid, factor_II: Tensor, damping: float) -> Tensor:
        """Round all columns, each making up for the errors before it.

        Args:
            grid: what each column may become.
            factor_II: R, in the type of the weight.
            damping: what `factor_II` holds beside the Gram matrix.

        Returns:
            Δ H Δᵀ of each row, undamped, float64 [O], not below 0.
        """
        damped_loss_O = torch.zeros_like(self.weight_IO[0], dtype=torch.float64)
        for start, stop in _ends(len(self.weight_IO), self._block):
            share_IB = factor_II[:stop, start:stop] / factor_II.diagonal()[start:stop]
            target_BO = self.weight_IO[start:stop].clone()
            if start:
                target_BO.addmm_(share_IB[:start].T, self.lost_IO[:start])
            for column in range(start, stop):
                self._set(grid, column, target_BO[column - start])
                after = column + 1 - start
                target_BO[after:].addr_(share_IB[column, after:], self.lost_IO[column])
            # Entry j of Δ R is R_jj times what the column's target lost.
            target_BO -= self.weight_IO[start:stop]
            target_BO += self.lost_IO[start:stop]
            target_BO *= factor_II.diagonal()[start:stop].unsqueeze(1)
            damped_loss_O += target_BO.square_().sum(0, dtype=torch.float64)
        damped_loss_O -= damping * self.lost_IO.square().sum(0, dtype=torch.float64)
        return damped_loss_O.clamp_(min=0)  # as in `row_loss`

    def sweep(self, grid: ColumnGrid, gram_II: Tensor) -> None:
        """Round every column again with all others as they are.

        Args:
            grid: what each column may become; other scales than before are taken up here.
            gram_II: H, damped, in the type of the weight.
        """
        torch.sub(self.weight_IO, self.steps_IO * grid.scale_SO[grid.stretch_I], out=self.lost_IO)
        for start, stop in _ends(len(self.weight_IO), self._block):
            share_IB = gram_II[:, start:stop] / gram_II.diagonal()[start:stop]
            # What all columns ask of these, each one's own loss included.
            target_BO = torch.addmm(self.weight_IO[start:stop], share_IB.T, self.lost_IO)
            for column in range(start, stop):
                before_O = self.lost_IO[column].clone()
                self._set(grid, column, target_BO[column - start] - before_O)
                after = column + 1 - start
                target_BO[after:].addr_(share_IB[column, after:], self.lost_IO[column] - before_O)

    def _set(self, grid: ColumnGrid, column: int, target_O: Tensor) -> None:
        steps_O = grid.round(target_O, column)
        self.steps_IO[column] = steps_O
        torch.sub(self.weight_IO[column], grid.value(steps_O, column), out=self.lost_IO[column])
