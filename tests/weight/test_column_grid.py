"""Rounding column by column against rounding whole weights."""

import pytest
import torch

from msmodelslim.ir.quantize import dequantize_weight, quantize_weight
from msmodelslim.ir.scheme import QScheme, QScope
from msmodelslim.weight.column_grid import ColumnGrid, slice_rows
from tests.weight.weights import BLOCK, CHANNEL, FP8, GROUP, INT4, INT8, MXFP4, MXFP8, generator, integer_schemes

TWO_LEVEL = [QScheme(INT4, GROUP, symmetric, 16, two_level=True) for symmetric in (True, False)]
ALL = [
    *integer_schemes(),
    *TWO_LEVEL,
    QScheme(INT8, QScope.PER_TENSOR),
    QScheme(INT4, QScope.PER_TENSOR, False),
    QScheme(FP8, CHANNEL),
    QScheme(FP8, QScope.PER_TENSOR),
    QScheme(FP8, BLOCK, block=(128, 128)),
    QScheme(FP8, BLOCK, block=(32, 16)),
    QScheme(MXFP8, BLOCK),
    QScheme(MXFP4, BLOCK),
]


def weight_of(rows: int = 160, columns: int = 208) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator(1)) * torch.logspace(-2, 1, rows)[:, None]


@pytest.mark.parametrize("scheme", [scheme for scheme in ALL if not scheme.two_level], ids=str)
def test_columns_in_any_order_round_as_the_whole_weight_does(scheme: QScheme) -> None:
    weight = weight_of()
    codes = quantize_weight(weight, scheme)
    order = torch.randperm(208, generator=generator(2))
    grid = ColumnGrid(scheme, codes, order, torch.ones(160))
    steps = torch.stack([grid.round(weight[:, column], at) for at, column in enumerate(order.tolist())])
    found = grid.codes(steps)
    assert torch.equal(found.view(torch.uint8).T, codes.codes_OI.view(torch.uint8)[:, order])
    expected = dequantize_weight(codes, scheme)[:, order].T
    assert torch.equal(torch.stack([grid.value(steps[at], at) for at in range(208)]), expected)
    assert torch.equal(grid.values(found), expected)


@pytest.mark.parametrize("scheme", TWO_LEVEL, ids=str)
def test_a_two_level_column_takes_the_nearest_value_that_its_int8_half_can_hold(scheme: QScheme) -> None:
    weight = weight_of(8, 64)
    codes = quantize_weight(weight, scheme)
    assert codes.scale_second is not None and codes.offset_second is not None
    grid = ColumnGrid(scheme, codes, torch.arange(64), torch.ones(8))
    wished = weight * 1.5  # as error feedback may ask for
    for column in range(64):
        group = column // 16
        inner = codes.scale_second[:, group, None] * (torch.arange(-8, 8) - codes.offset_second[:, group, None])
        values = (inner * codes.scale).masked_fill_(inner.abs() > 127, torch.inf)
        nearest = (values - wished[:, column, None]).abs().amin(1)
        found = grid.value(grid.round(wished[:, column], column), column)
        assert torch.allclose((found - wished[:, column]).abs(), nearest, rtol=1e-4)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_values_in_units_of_the_rows_are_values_divided(scheme: QScheme) -> None:
    codes = quantize_weight(weight_of(), scheme)
    unit = torch.ldexp(torch.ones(160), torch.arange(160) % 7 - 3)
    grid = ColumnGrid(scheme, codes, torch.arange(208), unit)
    expected = dequantize_weight(codes, scheme).T / unit
    assert torch.allclose(grid.values(codes.codes_OI.T.contiguous()), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_some_rows_stand_for_the_same_values_as_in_the_whole_weight(scheme: QScheme) -> None:
    codes = quantize_weight(weight_of(), scheme)
    rows = slice(128, 160)
    part = slice_rows(codes, scheme, rows)
    assert torch.equal(dequantize_weight(part, scheme), dequantize_weight(codes, scheme)[rows])
