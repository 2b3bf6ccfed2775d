"""The parts of error feedback against linear algebra in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from msmodelslim.ir.quantize import WeightCodes, quantize_weight
from msmodelslim.ir.scheme import QScheme
from msmodelslim.weight.column_grid import ColumnGrid
from msmodelslim.weight.error_feedback import Feedback, best_scales, row_loss, upper_factor
from tests.weight.weights import CHANNEL, GROUP, INT4, correlated_gram, generator

SCHEME = QScheme(INT4, GROUP, group_size=8)


def problem(columns: int = 32, rows: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, WeightCodes]:
    """Weight [I, O], damped Gram matrix, and scales."""
    weight = torch.randn(rows, columns, generator=generator(3))
    gram = correlated_gram(columns).sum_II.to(dtype)
    gram = gram / gram.diagonal().mean() + 0.01 * torch.eye(columns, dtype=dtype)
    return weight.T.contiguous().to(dtype), gram, quantize_weight(weight, SCHEME)


def grid_of(codes: WeightCodes, columns: int = 32, rows: int = 6) -> ColumnGrid:
    return ColumnGrid(SCHEME, codes, torch.arange(columns), torch.ones(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_factor_is_upper_triangular_and_multiplies_to_the_damped_matrix(dtype: torch.dtype) -> None:
    gram = correlated_gram(24).sum_II.to(dtype)
    gram /= gram.diagonal().mean()
    factor = upper_factor(gram, 0.5)
    assert factor is not None and factor.dtype is dtype
    assert torch.equal(factor, factor.triu())
    expected = gram.double() + 0.5 * torch.eye(24)
    assert torch.allclose(factor.double() @ factor.double().T, expected, rtol=1e-5, atol=1e-5)


def test_the_factor_of_the_inverse_that_gptq_uses_is_its_inverse() -> None:
    _, gram, _ = problem()
    factor = upper_factor(gram, 0)
    assert factor is not None
    expected = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    assert torch.allclose(torch.linalg.inv(factor), expected)


def test_an_indefinite_matrix_has_no_factor() -> None:
    assert upper_factor(torch.tensor([[1.0, 3.0], [3.0, 1.0]]), 0.1) is None
    assert upper_factor(torch.full((2, 2), torch.nan), 0.1) is None


def test_what_float32_cannot_factor_float64_can() -> None:
    twice_the_same_column = torch.ones(2, 2)  # 1 + 1e-8 is 1 in float32
    factor = upper_factor(twice_the_same_column, 1e-8)
    assert factor is not None
    assert abs(float(factor[0, 0]) - 2e-8**0.5) < 1e-8


def test_the_row_loss_is_the_undamped_quadratic_form() -> None:
    weight, gram, _ = problem(96)
    undamped = gram - 0.01 * torch.eye(96)
    factor = upper_factor(gram, 0)
    assert factor is not None
    expected = ((weight.T @ undamped) * weight.T).sum(1)
    assert torch.allclose(row_loss(weight, factor, 0.01, block=40), expected)


@pytest.mark.parametrize("block", [1, 8, 13, 32, 128])
def test_the_size_of_a_block_changes_nothing_in_float64(block: int) -> None:
    weight, gram, codes = problem()
    factor = upper_factor(gram, 0)
    assert factor is not None
    found, expected = Feedback(weight, block), Feedback(weight, 32)
    for one in (found, expected):
        one.feed_back(grid_of(codes), factor, 0.01)
        one.sweep(grid_of(codes), gram)
    assert torch.equal(found.steps_IO, expected.steps_IO)


def test_feeding_back_returns_the_loss_of_what_it_rounded() -> None:
    weight, gram, codes = problem()
    factor = upper_factor(gram, 0)
    assert factor is not None
    rounded = Feedback(weight, 8)
    loss = rounded.feed_back(grid_of(codes), factor, 0.01)
    assert torch.allclose(loss, row_loss(rounded.lost_IO, factor, 0.01))
    assert torch.equal(rounded.lost_IO, weight - rounded.steps_IO * grid_of(codes).scale_SO[grid_of(codes).stretch_I])


def test_sweeps_end_where_no_single_code_can_be_bettered() -> None:
    weight, gram, codes = problem()
    factor = upper_factor(gram, 0)
    assert factor is not None
    grid, rounded = grid_of(codes), Feedback(weight, 8)
    losses = [rounded.feed_back(grid, factor, 0)]
    for _ in range(10):
        rounded.sweep(grid, gram)
        losses.append(row_loss(rounded.lost_IO, factor, 0))
    assert all((after <= before * (1 + 1e-12)).all() for before, after in pairwise(losses))
    assert losses[-1].sum() < 0.99 * losses[0].sum()
    for column in range(32):
        for change in (-1, 1):
            tried = rounded.lost_IO.clone()
            allowed = (rounded.steps_IO[column] + change).clamp(-8, 7) != rounded.steps_IO[column]
            tried[column] -= change * grid.scale_SO[column // 8] * allowed
            assert (row_loss(tried, factor, 0) >= losses[-1] * (1 - 1e-12)).all()


@pytest.mark.parametrize("rows", [6, 40])
def test_the_best_scales_are_those_of_least_squares(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msmodelslim.weight.error_feedback._SYSTEM_ROWS", 16)
    weight, gram, codes = problem(rows=rows)
    steps = codes.codes_OI.T.double()
    found = best_scales(gram @ weight, steps, gram, 8)
    root = np.linalg.cholesky(gram.numpy()).T  # ‖root (w − Z s)‖² is the loss
    for row in range(rows):
        columns = np.zeros((32, 4))
        for group in range(4):
            columns[group * 8 : group * 8 + 8, group] = steps[group * 8 : group * 8 + 8, row]
        expected = np.linalg.lstsq(root @ columns, root @ weight[:, row].numpy(), rcond=None)[0]
        assert np.allclose(found[:, row], expected, rtol=1e-6)


def test_a_group_of_zeros_gets_scale_zero_and_disturbs_no_other() -> None:
    weight, gram, codes = problem()
    steps = codes.codes_OI.T.double()
    steps[8:16] = 0
    found = best_scales(gram @ weight, steps, gram, 8)
    assert found[1].abs().max() < 1e-3
    assert found[[0, 2, 3]].abs().min() > 0.05


def test_a_scheme_with_one_scale_a_row_has_one_unknown() -> None:
    weight, gram, _ = problem()
    codes = quantize_weight(weight.T.float(), QScheme(INT4, CHANNEL))
    steps = codes.codes_OI.T.double()
    pulled = gram @ steps
    expected = (pulled * weight).sum(0) / (pulled * steps).sum(0)
    assert torch.allclose(best_scales(gram @ weight, steps, gram, 32), expected.unsqueeze(0))
