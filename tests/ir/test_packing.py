"""Packed layouts against their definition byte by byte, another library, and integer arithmetic of the kernels."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.mx import e2m1_values
from msmodelslim.ir.packing import (
    deq_scale,
    deq_scale_float32,
    deq_scale_int64,
    pack_columns_fp4,
    pack_columns_int32,
    pack_rows_int4,
    quant_bias,
    unpack_columns_fp4,
    unpack_columns_int32,
    unpack_rows_int4,
    w4a8_scale_bias,
)

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


def random_codes(low: int, high: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(low, high + 1, shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@given(sizes, sizes, seeds)
def test_rows_of_int4_come_back(pairs: int, columns: int, seed: int) -> None:
    codes = random_codes(-8, 7, (2 * pairs, columns), seed)
    packed = pack_rows_int4(codes)
    assert (packed.dtype, packed.shape) == (torch.int8, (pairs, columns))
    assert torch.equal(unpack_rows_int4(packed), codes)


@given(sizes, sizes, seeds, st.sampled_from([4, 8]))
def test_columns_in_int32_come_back_and_equal_those_of_compressed_tensors(
    rows: int, columns: int, seed: int, num_bits: int
) -> None:
    codes = random_codes(-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1, (rows, columns), seed)
    packed = pack_columns_int32(codes, num_bits)
    assert torch.equal(packed, pack_to_int32(codes, num_bits))
    assert torch.equal(unpack_columns_int32(packed, num_bits, columns), codes)
    assert torch.equal(unpack_from_int32(packed, num_bits, codes.shape), codes)


@given(sizes, sizes, seeds)
def test_zero_points_pack_as_the_transpose(rows: int, groups: int, seed: int) -> None:
    zero_point = random_codes(-8, 7, (rows, groups), seed)
    packed = pack_columns_int32(zero_point.t(), 4).t()
    assert torch.equal(packed, pack_to_int32(zero_point, 4, packed_dim=0))
    assert torch.equal(unpack_columns_int32(packed.t(), 4, rows).t(), zero_point)


@given(sizes, sizes, seeds)
def test_columns_of_fp4_come_back_and_equal_those_of_compressed_tensors(rows: int, pairs: int, seed: int) -> None:
    codes = random_codes(0, 15, (rows, 2 * pairs), seed, torch.uint8)
    packed = pack_columns_fp4(codes)
    assert torch.equal(packed, pack_fp4_to_uint8(e2m1_values(codes)))
    assert torch.equal(unpack_columns_fp4(packed), codes)


def test_the_even_row_and_the_even_column_take_the_low_nibble() -> None:
    assert pack_rows_int4(torch.tensor([[3], [-1]], dtype=torch.int8)).view(torch.uint8).tolist() == [[0xF3]]
    assert pack_columns_fp4(torch.tensor([[3, 15]], dtype=torch.uint8)).tolist() == [[0xF3]]


def test_odd_sizes_are_refused_by_module() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^up_proj: 3 rows do not pair into bytes of two int4; exclude the module$"
    ):
        pack_rows_int4(torch.zeros(3, 4, dtype=torch.int8), name="up_proj")
    with pytest.raises(UnsupportedError, match=r"^up_proj: 3 columns do not pair into bytes of two fp4; exclude the"):
        pack_columns_fp4(torch.zeros(4, 3, dtype=torch.uint8), name="up_proj")
    with pytest.raises(
        UnsupportedError, match=r"^down_proj: 40 columns do not divide into 16 parts; exclude the module$"
    ):
        w4a8_scale_bias(torch.zeros(4, 40, dtype=torch.int8), torch.ones(4, 1), 16, name="down_proj")


def test_other_widths_than_4_and_8_bits_are_refused() -> None:
    for call in (
        lambda: pack_columns_int32(torch.zeros(1, 8, dtype=torch.int8), 3),
        lambda: unpack_columns_int32(torch.zeros(1, 1, dtype=torch.int32), 3, 8),
    ):
        with pytest.raises(ValueError, match="num_bits is 3; codes are packed with 4 or 8 bits"):
            call()


def test_deq_scale_bits_come_back_from_int64() -> None:
    scale = deq_scale(torch.tensor([[1e-5], [3.7e-3], [1.0]]), torch.tensor([0.03]))
    widened = deq_scale_int64(scale)
    assert widened.dtype is torch.int64
    assert widened.tolist() == np.frombuffer(scale.numpy().tobytes(), dtype="<i4").tolist()
    assert torch.equal(deq_scale_float32(widened), scale)


def test_quant_bias_is_exact_where_float32_is_not() -> None:
    codes = torch.full((2, 20001), 127, dtype=torch.int8)
    codes[1, 0] = 126
    found = quant_bias(codes, torch.ones(2, 1), torch.ones(1), torch.tensor([-127.0]), None)
    total = 127 * 127 * 20001
    assert total > 2**24 and total % 2  # float32 holds only even numbers there
    assert found.tolist() == [total, total - 127]


def test_quant_bias_divides_by_the_stored_float32_scale() -> None:
    weight_scale, act_scale = torch.tensor([[0.1], [0.3]]), torch.tensor([1e-7])
    bias = torch.tensor([0.75, -1.25], dtype=torch.bfloat16)
    stored = deq_scale(weight_scale, act_scale).tolist()
    found = quant_bias(torch.zeros(2, 4, dtype=torch.int8), weight_scale, act_scale, None, bias)
    assert found.tolist() == [round(0.75 / stored[0]), round(-1.25 / stored[1])]


def test_quant_bias_outside_int32_is_clamped_with_a_warning() -> None:
    codes = torch.zeros(3, 4, dtype=torch.int8)
    args = (codes, torch.full((3, 1), 1e-6), torch.tensor([1e-6]), None, torch.tensor([1.0, -1.0, 1e-9]))
    with pytest.warns(UserWarning, match="q_proj: quant_bias of 2 rows passes int32 and was clamped; exclude it"):
        found = quant_bias(*args, name="q_proj")
    assert found.tolist() == [2**31 - 1, -(2**31), 1000]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quant_bias(codes, torch.ones(3, 1), torch.ones(1), None, torch.ones(3))


@pytest.mark.parametrize("parts", [1, 16])
@pytest.mark.parametrize("group_size", [0, 16, 64])
def test_scale_bias_is_eight_times_the_sum_of_each_part(parts: int, group_size: int) -> None:
    codes = random_codes(-8, 7, (6, 768), 0)  # 16 parts of 48 columns straddle groups of 64
    groups = 768 // group_size if group_size else 1
    scale = torch.rand(6, groups, generator=torch.Generator().manual_seed(1)) + 0.1
    found = w4a8_scale_bias(codes, scale, parts)
    weight = codes.numpy() * np.repeat(scale.numpy().astype(np.float64), 768 // groups, axis=1)
    expected = 8 * weight.reshape(6, parts, -1).sum(2)
    assert found.dtype is torch.float32
    assert np.allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_a_kernel_that_multiplies_signed_nibbles_and_adds_scale_bias_gives_the_product() -> None:
    codes, x = random_codes(-8, 7, (6, 64), 0), random_codes(-128, 127, (5, 64), 1).long()
    scale = torch.rand(6, 1, generator=torch.Generator().manual_seed(2)).double()
    weight = unpack_rows_int4(pack_rows_int4(codes)).long()
    high, low = x >> 4, (x & 15) - 8
    nibble_products = (16 * high @ weight.t() + low @ weight.t()).double() * scale.flatten()
    for parts in (1, 16):
        found = nibble_products + w4a8_scale_bias(codes, scale.float(), parts).double().sum(1)
        assert torch.allclose(found, (x @ weight.t()).double() * scale.flatten(), rtol=1e-5, atol=1e-4)


def test_every_layout_works_on_meta_tensors() -> None:
    codes, fp4 = torch.zeros(6, 32, dtype=torch.int8), torch.zeros(6, 32, dtype=torch.uint8)
    scale, one = torch.ones(6, 1), torch.ones(1)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (pack_rows_int4, (codes,)),
        (unpack_rows_int4, (pack_rows_int4(codes),)),
        (pack_columns_int32, (codes, 4)),
        (pack_columns_int32, (codes[:, :29], 8)),
        (pack_columns_int32, (codes.t(), 4)),
        (unpack_columns_int32, (pack_columns_int32(codes, 4), 4, 29)),
        (pack_columns_fp4, (fp4,)),
        (unpack_columns_fp4, (pack_columns_fp4(fp4),)),
        (deq_scale, (scale, one)),
        (deq_scale_int64, (deq_scale(scale, one),)),
        (deq_scale_float32, (deq_scale_int64(deq_scale(scale, one)),)),
        (quant_bias, (codes, scale, one, one, torch.ones(6))),
        (quant_bias, (codes, scale, one, None, None)),
        (w4a8_scale_bias, (codes, scale, 1)),
        (w4a8_scale_bias, (codes, torch.ones(6, 4), 16)),
    ]
    for function, args in calls:
        real = function(*args)
        meta = function(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
        assert meta.is_meta
        assert (meta.dtype, meta.shape) == (real.dtype, real.shape), function.__name__
        assert real.is_contiguous() and math.prod(real.shape) == real.numel()
