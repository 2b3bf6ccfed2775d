"""Packed Gram matrices against the whole product in float64."""

import pytest
import torch

from msmodelslim.observer.gram_sum import packed_diagonal, packed_gram, packed_length, unpacked_gram


@pytest.mark.parametrize("columns", [1, 5, 127, 128, 129, 300, 576])
def test_the_unpacked_matrix_is_the_product_of_the_inputs_with_themselves(columns: int) -> None:
    x_TI = torch.randn(40, columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float64)
    packed_P = packed_gram(x_TI)
    gram_II = unpacked_gram(packed_P, columns)
    torch.testing.assert_close(gram_II, torch.einsum("ti,tj->ij", x_TI, x_TI), rtol=1e-12, atol=1e-12)
    assert torch.equal(packed_diagonal(packed_P, columns), gram_II.diagonal())


def test_packed_sums_are_sums_of_whole_products() -> None:
    parts = [torch.randn(tokens, 200, dtype=torch.float64) for tokens in (3, 50)]
    found = unpacked_gram(packed_gram(parts[0]) + packed_gram(parts[1]), 200)
    both = torch.cat(parts)
    torch.testing.assert_close(found, both.T @ both, rtol=1e-12, atol=1e-12)


def test_a_packed_matrix_holds_little_more_than_a_triangle() -> None:
    # 256 columns: a block of 128 x 128 on the diagonal, then 128 rows of 256
    assert packed_length(256) == 128 * 128 + 128 * 256
    assert packed_length(4096) < 0.52 * 4096**2


def test_float32_products_are_as_near_as_those_of_the_whole_product() -> None:
    x_TI = torch.randn(512, 384, generator=torch.Generator().manual_seed(0))
    exact = x_TI.double().T @ x_TI.double()
    packed = (unpacked_gram(packed_gram(x_TI), 384).double() - exact).abs().max()
    assert packed <= 2 * ((x_TI.T @ x_TI).double() - exact).abs().max()
