import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed import (
    RankMismatchError,
    ReduceOperation,
    sync_base_operation,
    sync_gather_tensor_lists,
    sync_gather_tensors,
)
from msmodelslim.distributed.dist_ops import from_ordered, to_ordered
from msmodelslim.errors import UnsupportedError

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OPS = ["min", "max", "sum", "mean", "prod"]


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def rank_tensors(dtype: torch.dtype, shape: tuple[int, ...], world_size: int) -> list[Tensor]:
    """Small whole numbers, which every type holds exactly, also their sums and products."""
    generator = torch.Generator().manual_seed(0)
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    return [torch.randint(low, 3, shape, generator=generator).to(dtype) for _ in range(world_size)]


def expected(tensors: list[Tensor], op: str) -> Tensor:
    stack = torch.stack([one.to(torch.float64) for one in tensors])
    reduced = {
        "min": stack.amin(0),
        "max": stack.amax(0),
        "sum": stack.sum(0),
        "mean": stack.mean(0),
        "prod": stack.prod(0),
    }
    return reduced[op].to(tensors[0].dtype)


# ---------------------------------------------------------------- sync_base_operation


def reduce_all(rank: int, cases: list[tuple[list[Tensor], str]]) -> list[Tensor]:
    found = []
    for tensors, op in cases:
        own = tensors[rank].clone()
        assert sync_base_operation(own, op) is own
        found.append(own)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_op_and_type_equals_the_reduction_of_the_stack(run_ranks, world_size):
    cases = [
        (rank_tensors(dtype, shape, world_size), op)
        for dtype in FLOATS + FLOAT8 + INTEGERS
        for op in OPS
        if op != "mean" or dtype.is_floating_point
        for shape in [(2, 3), (), (0, 4)]
    ]
    for found in run_ranks(world_size, reduce_all, cases):
        for (tensors, op), one in zip(cases, found, strict=True):
            want = expected(tensors, op)
            assert one.dtype == want.dtype and one.shape == want.shape
            assert torch.equal(one.to(torch.float64), want.to(torch.float64)), (tensors, op, one)


def test_min_of_bools_is_all_and_max_is_any(run_ranks):
    tensors = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    for low, high, product in run_ranks(2, reduce_all, [(tensors, "min"), (tensors, "MAX"), (tensors, "prod")]):
        assert low.tolist() == product.tolist() == [True, False, False]
        assert high.tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2])
def test_nan_wins_and_zeros_keep_their_order_whichever_rank_has_them(run_ranks, dtype):
    nan, inf = float("nan"), float("inf")
    one = torch.tensor([1.0, nan, -0.0, 0.0, -inf, inf]).to(dtype)
    other = torch.tensor([nan, 1.0, 0.0, -0.0, inf, -inf]).to(dtype)
    low = torch.tensor([nan, nan, -0.0, -0.0, -inf, -inf])
    high = torch.tensor([nan, nan, 0.0, 0.0, inf, inf])
    for found_low, found_high in run_ranks(2, reduce_all, [([one, other], "min"), ([one, other], "max")]):
        for found, want in ((found_low.float(), low), (found_high.float(), high)):
            assert torch.equal(found.isnan(), want.isnan())
            assert torch.equal(found.nan_to_num(7), want.nan_to_num(7))
            assert torch.equal(found.signbit()[2:], want.signbit()[2:])


def test_integers_in_the_order_of_floats_sort_as_the_floats_do():
    values = torch.tensor([float("-inf"), -3.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, float("inf"), float("nan")])
    for dtype in (torch.float32, torch.float64):
        ordered = to_ordered(values.to(dtype))
        assert torch.equal(ordered, ordered.sort().values)
        assert ordered.unique().numel() == (9 if dtype == torch.float32 else ordered.unique().numel())
        assert same_bits(from_ordered(ordered, dtype).nan_to_num(7), values.to(dtype).nan_to_num(7))


def reduce_forms(rank: int) -> dict[str, Tensor]:
    base = torch.arange(12.0).reshape(3, 4) * (rank + 1)
    sync_base_operation(base.T[1:, ::2], ReduceOperation.SUM)
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    sync_base_operation(weight, "Mean")
    return {"strided": base, "parameter": weight.detach()}


def test_views_and_parameters_are_updated_in_place(run_ranks):
    want = torch.arange(12.0).reshape(3, 4)
    for rank, found in enumerate(run_ranks(2, reduce_forms)):
        own = want * (rank + 1)
        own.T[1:, ::2] = (want * 3).T[1:, ::2]
        assert torch.equal(found["strided"], own)
        assert torch.equal(found["parameter"], torch.full((2,), 0.5))


def reduce_bf16(rank: int, values: list[Tensor]) -> Tensor:
    return sync_base_operation(values[rank].clone(), "sum")


def test_bfloat16_is_summed_in_float32_and_rounded_once(run_ranks):
    values = [torch.tensor([1.0]), torch.tensor([2**-8]), torch.tensor([2**-8])]
    values = [one.to(torch.bfloat16) for one in values]
    for found in run_ranks(3, reduce_bf16, values):  # 1 + 2^-8 rounds to 1 in bfloat16, 1 + 2^-7 does not
        assert found.item() == 1 + 2**-7


def overflow(rank: int) -> list[int]:
    own = torch.tensor([100, 1], dtype=torch.int8)
    with pytest.raises(OverflowError, match=r"sum over 2 ranks reaches 200, beyond torch.int8; use a wider tensor"):
        sync_base_operation(own, "sum")
    return own.tolist()


def test_an_integer_sum_beyond_its_type_raises_on_every_rank_and_changes_nothing(run_ranks):
    assert run_ranks(2, overflow) == [[100, 1], [100, 1]]


def groups(rank: int) -> list[Tensor]:
    even, odd = dist.new_group([0, 2]), dist.new_group([1])
    own = torch.tensor([float(rank)])
    if rank == 1:
        with pytest.raises(ValueError, match=r"sync_base_operation: rank 1 is not in the group of ranks \[0, 2\]"):
            sync_base_operation(own, "sum", even)
        return [sync_base_operation(own, "sum", odd), *sync_gather_tensors(own, group=odd)]
    total = sync_base_operation(own.clone(), "sum", even)
    ragged = torch.full((rank + 1,), rank, dtype=torch.int16)
    return [
        total,
        *sync_gather_tensors(ragged, variable_shapes=True, group=even),
        *sync_gather_tensor_lists([own], group=even),
    ]


def test_every_function_stays_inside_its_group(run_ranks):
    first, alone, third = run_ranks(3, groups)
    assert [one.tolist() for one in alone] == [[1.0], [1.0]]
    for found in (first, third):
        assert [one.tolist() for one in found] == [[2.0], [0], [2, 2, 2], [0.0], [2.0]]


def disagree(rank: int, what: str) -> None:
    own = torch.ones(
        2 + (rank if what == "shape" else 0), dtype=torch.int32 if what == "dtype" and rank else torch.float32
    )
    if what == "call" and rank == 1:
        sync_gather_tensors(own)
    else:
        sync_base_operation(own, "min" if what == "op" and rank else "max", name=f"m{rank}" if what == "name" else "m")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("op", r"sync_base_operation of 'm': op differs: max on rank 0; min on ranks 1, 2"),
        ("shape", r"sync_base_operation of 'm': shape differs: \[2\] on rank 0; \[3\] on rank 1; \[4\] on rank 2"),
        ("dtype", r"dtype differs: torch.float32 on rank 0; torch.int32 on ranks 1, 2"),
        ("name", r"name differs: m0 on rank 0; m1 on rank 1; m2 on rank 2"),
        (
            "call",
            r"ranks are in different collectives: sync_base_operation \(at test_dist_ops.py:\d+\) on ranks 0, 2; "
            r"sync_gather_tensors \(at test_dist_ops.py:\d+\) on rank 1",
        ),
    ],
)
def test_a_disagreement_raises_the_same_error_on_every_rank(run_ranks, what, text):
    errors = run_ranks.errors(3, disagree, what)
    for error in errors:
        assert isinstance(error, RankMismatchError)
        with pytest.raises(RankMismatchError, match=text):
            raise error
    assert len({str(error) for error in errors}) == 1


def refuse(rank: int, case: str) -> None:
    own = {
        "op": torch.ones(2),
        "mean": torch.ones(2, dtype=torch.int32),
        "bool": torch.ones(2, dtype=torch.bool),
        "complex": torch.ones(2, dtype=torch.complex64),
        "expand": torch.ones(1).expand(3),
        "sparse": torch.ones(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
    }[case]
    sync_base_operation(own, {"op": "median", "mean": "mean"}.get(case, "sum"))


REFUSALS = [
    ("op", "op 'median' is not one of min, max, sum, mean, prod"),
    ("mean", "mean of torch.int32 is not an integer; sum first"),
    ("bool", "sum of bools does not fit a bool; count with an integer tensor"),
    ("complex", "sum of torch.complex64 has no exact carrier"),
    ("expand", r"the tensor of shape \(3,\) repeats its memory"),
    ("sparse", "torch.sparse_coo torch.float32 has no plain memory to send"),
    ("meta", "a meta tensor has no plain memory to send"),
]


@pytest.mark.parametrize(("case", "text"), REFUSALS)
def test_what_cannot_be_reduced_is_refused_with_one_rank_too(case, text):
    with pytest.raises(UnsupportedError, match=text):
        refuse(0, case)


def refuse_on_one(rank: int) -> float:
    own = torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32)
    with pytest.raises(UnsupportedError, match=r"sync_base_operation \(at .*\): rank 1: mean of torch.int32"):
        sync_base_operation(own, "mean")
    return sync_base_operation(torch.tensor([1.0]), "sum").item()


def test_a_refusal_on_one_rank_is_raised_on_all_and_the_next_call_works(run_ranks):
    assert run_ranks(3, refuse_on_one) == [3.0] * 3


# ---------------------------------------------------------------- gathers


def special(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits at all, NaN included: what is gathered must be the same bytes."""
    count = torch.Size(shape).numel() * dtype.itemsize
    flat = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return flat.to(torch.uint8).view(dtype).reshape(shape)


def gather_one(rank: int, cases: list[list[Tensor]], variable: bool, on_cpu: bool) -> list[list[Tensor]]:
    return [sync_gather_tensors(tensors[rank], variable, on_cpu) for tensors in cases]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_gathered_tensors_have_the_bits_and_shapes_of_their_ranks(run_ranks, on_cpu):
    dtypes = [*FLOATS, *FLOAT8, *INTEGERS, torch.bool, torch.complex64, torch.uint16]
    equal = [[special(dtype, shape, rank) for rank in range(3)] for dtype in dtypes for shape in [(2, 5), (), (0,)]]
    ragged = [[special(dtype, ((), (3, 4), (0, 2))[rank], rank) for rank in range(3)] for dtype in dtypes]
    for cases, variable in ((equal, False), (equal, True), (ragged, True)):
        for found in run_ranks(3, gather_one, cases, variable, on_cpu):
            for tensors, row in zip(cases, found, strict=True):
                assert len(row) == 3 and all(map(same_bits, row, tensors))


def gather_shapes(rank: int, dtype_differs: bool) -> None:
    own = torch.ones(rank + 1, dtype=torch.float16 if dtype_differs and rank else torch.float32)
    sync_gather_tensors(own, variable_shapes=dtype_differs, name="x")


def test_unequal_shapes_need_variable_shapes_and_types_must_agree(run_ranks):
    for error in run_ranks.errors(2, gather_shapes, False):
        assert "sync_gather_tensors of 'x': shape (variable_shapes=True allows it) differs: [1] on rank 0" in str(error)
    for error in run_ranks.errors(2, gather_shapes, True):
        assert "dtype differs: torch.float32 on rank 0; torch.float16 on rank 1" in str(error)


def gather_lists(rank: int, lists: list[list[Tensor]], order: list[list[int]] | None) -> list[Tensor]:
    return sync_gather_tensor_lists(lists[rank], order=None if order is None else order[rank])


def test_lists_may_be_empty_uneven_and_mixed_and_come_rank_after_rank(run_ranks):
    lists = [
        [special(torch.float32, (2, 3), 0), special(torch.bool, (), 1)],
        [],
        [special(torch.bfloat16, (0,), 2), special(torch.int64, (1, 1, 2), 3), special(torch.float8_e4m3fn, (5,), 4)],
    ]
    flat = [one for row in lists for one in row]
    for found in run_ranks(3, gather_lists, lists, None):
        assert len(found) == len(flat) and all(map(same_bits, found, flat))
    assert run_ranks(2, gather_lists, [[], []], None) == [[], []]


def test_with_sample_numbers_a_list_is_what_one_device_would_hold(run_ranks):
    samples = [special(torch.float32, (i % 3, 2), i) for i in range(5)]
    dealt = [[0, 3], [1, 4], [2]]
    lists = [[samples[i] for i in own] for own in dealt]
    for found in run_ranks(3, gather_lists, lists, dealt):
        assert all(map(same_bits, found, samples))
    twice = [torch.tensor([1.0]), torch.tensor([2.0])]  # two tensors of sample 1, in the order they were made
    for found in run_ranks(2, gather_lists, [twice, [torch.tensor([0.0])]], [[1, 1], [0]]):
        assert [one.item() for one in found] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ([[0, 1], [1]], "sync_gather_tensor_lists: sample 1 is on ranks 0 and 1; deal each sample once"),
        ([[0, 1], None], "order differs: given on rank 0; not given on rank 1"),
        ([[0, 1], [2, 3]], "rank 1: order names 2 samples for 1 tensors"),
    ],
)
def test_an_order_that_cannot_be_is_refused_on_every_rank(run_ranks, order, text):
    for error in run_ranks.errors(2, gather_lists, [[torch.ones(1)] * 2, [torch.ones(1)]], order):
        assert text in str(error)


def gather_in_rounds(rank: int) -> list[bool]:
    from msmodelslim.distributed import wire

    wire._ROUND_BYTES = 64  # so that tensors are cut in the middle of an element
    lists = [[special(torch.float64, (7, 3), 0), special(torch.int8, (5,), 1)], [special(torch.float16, (101,), 2)]]
    found = sync_gather_tensor_lists(lists[rank])
    return [same_bits(one, two) for one, two in zip(found, lists[0] + lists[1], strict=True)]


def test_rounds_of_any_size_put_the_bytes_back_together(run_ranks):
    assert run_ranks(2, gather_in_rounds) == [[True] * 3] * 2


def long_names(rank: int) -> None:
    sync_base_operation(torch.ones(1), "max", name="m" * 2000 + str(rank))


def test_facts_longer_than_the_header_are_agreed_on_too(run_ranks):
    for error in run_ranks.errors(2, long_names):
        assert isinstance(error, RankMismatchError) and "mmm1 on rank 1" in str(error)


# ---------------------------------------------------------------- one rank


def test_without_a_process_group_a_rank_is_alone():
    own = torch.tensor([1.0, 2.0])
    assert sync_base_operation(own, "sum") is own and own.tolist() == [1.0, 2.0]
    (found,) = sync_gather_tensors(own)
    assert torch.equal(found, own) and found.data_ptr() != own.data_ptr()
    assert [one.item() for one in sync_gather_tensor_lists([own[0], own[1]], order=[5, 2])] == [2.0, 1.0]
    assert sync_gather_tensor_lists([]) == []


def test_a_group_without_initialisation_is_a_mistake():
    with pytest.raises(ValueError, match="sync_gather_tensors: a group is given, but there is no process group"):
        sync_gather_tensors(torch.ones(1), group=object())  # type: ignore[arg-type]


def alone(rank: int) -> bool:
    own = torch.tensor([3.0])
    return sync_base_operation(own, "mean") is own and len(sync_gather_tensors(own)) == 1


def test_a_group_of_one_rank_answers_for_itself(run_ranks):
    assert run_ranks(1, alone) == [True]
