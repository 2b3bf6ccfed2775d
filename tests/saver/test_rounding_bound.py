"""Against brute force: rounding stays inside the bound, and the bound is not far above what rounding does."""

import pytest
import torch

from msmodelslim.ir.quantize import quantize_weight
from msmodelslim.ir.scheme import QDType, QScheme, QScope
from msmodelslim.saver import rounding_bound
from msmodelslim.saver.rounding_bound import row_errors
from tests.saver import runs as r

EVERY = {
    "int8": r.INT8,
    "int8 asym": r.INT8_ASYM,
    "int8 group": r.INT8_G32,
    "int8 tensor": QScheme(QDType.INT8, QScope.PER_TENSOR),
    "int4": r.INT4,
    "int4 group asym": r.INT4_G32_ASYM,
    "two level": r.TWO_LEVEL,
    "two level asym": r.TWO_LEVEL_ASYM,
    "fp8": r.FP8,
    "fp8 tensor": r.FP8_TENSOR,
    "fp8 tiles": r.FP8_BLOCK,
    "mxfp8": r.MXFP8,
    "mxfp4": r.MXFP4,
    "dual scale": r.DUAL_SCALE,
}


def weights(seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    heavy = torch.randn(150, 160, generator=generator) ** 3  # outliers in every row
    return ((heavy + shift) * torch.rand(150, 1, generator=generator)).bfloat16()


@pytest.mark.parametrize("word", EVERY)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_rounding_never_passes_the_bound(word: str, scale_dtype: torch.dtype) -> None:
    for seed, shift in ((0, 0.0), (1, 1.0), (2, -0.3)):
        weight = weights(seed, shift)
        codes = quantize_weight(weight, EVERY[word], scale_dtype=scale_dtype)
        found = row_errors(weight, codes, EVERY[word])
        assert found.unexplained(1.0).tolist() == []
        wanted = (weight.double() - rounding_bound.dequantize_weight(codes, EVERY[word]).double()).norm(dim=1)
        torch.testing.assert_close(found.errors, wanted, rtol=1e-3, atol=1e-7)
        assert found.relative == pytest.approx(float(wanted.norm() / weight.double().norm()), rel=1e-3)


@pytest.mark.parametrize("word", [word for word in EVERY if "two" not in word])
def test_the_bound_is_within_four_times_what_rounding_does(word: str) -> None:
    weight = weights(0)
    found = row_errors(weight, quantize_weight(weight, EVERY[word]), EVERY[word])
    assert (found.bounds < 4 * found.errors).double().mean() > 0.9


def test_rows_in_chunks_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in EVERY.values():
        weight = weights(0)
        codes = quantize_weight(weight, scheme)
        whole = row_errors(weight, codes, scheme)
        monkeypatch.setattr(rounding_bound, "_CHUNK_ELEMENTS", 1)
        parts = row_errors(weight, codes, scheme)
        monkeypatch.undo()
        for one, other in ((whole.errors, parts.errors), (whole.bounds, parts.bounds), (whole.sizes, parts.sizes)):
            torch.testing.assert_close(one, other)


def test_a_number_that_is_none_is_unexplained() -> None:
    weight = weights(0)
    codes = quantize_weight(weight, r.INT8)
    codes.scale[3] = float("nan")
    assert row_errors(weight, codes, r.INT8).unexplained(1.05).tolist() == [3]


@pytest.mark.parametrize(
    ("off", "named"),
    [
        ({7: 1.0}, []),  # an exception
        ({7: 1.0, 9: 1.5}, []),  # 1 % of the rows
        ({7: 1.0, 9: 1.0, 11: 1.0}, [7, 9, 11]),
        ({7: 2.5}, [7]),
        ({7: float("nan")}, [7]),
        (dict.fromkeys(range(200), 0.8), list(range(200))),
    ],
)
def test_error_feedback_may_move_single_rows_far_but_not_many(off: dict[int, float], named: list[int]) -> None:
    errors = torch.full((200,), 0.3, dtype=torch.float64)
    for row, error in off.items():
        errors[row] = error
    found = rounding_bound.RowErrors(errors, errors.new_full((200,), 0.2), errors.new_ones(200))
    assert found.beyond(share=0.7, most=2.0, rows=0.01).tolist() == named


def test_an_all_zero_weight_has_no_error() -> None:
    weight = torch.zeros(4, 32)
    assert row_errors(weight, quantize_weight(weight, r.INT8), r.INT8).relative == 0.0
