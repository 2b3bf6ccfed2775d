"""Plain rounding as a weight method, the registry, and what every method shares."""

import re

import pytest
import torch
from pydantic import ValidationError

from msmodelslim import registry
from msmodelslim.errors import UnsupportedError
from msmodelslim.ir.quantize import quantize_weight
from msmodelslim.ir.scheme import FLOAT, QScheme, QScope
from msmodelslim.weight.base import Gram, WeightMethod
from msmodelslim.weight.minmax import MinMax
from tests.weight.weights import BLOCK, CHANNEL, FP8, GROUP, INT4, INT8, MXFP4, MXFP8, integer_schemes, normal_weight

SCHEMES = [
    *integer_schemes(),
    QScheme(INT4, GROUP, False, 16, two_level=True),
    QScheme(FP8, CHANNEL),
    QScheme(FP8, BLOCK, block=(128, 128)),
    QScheme(MXFP8, BLOCK),
    QScheme(MXFP4, BLOCK),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_minmax_is_the_plain_rounding_of_ir(scheme: QScheme) -> None:
    assert MinMax.supports(scheme)
    found = MinMax(MinMax.Ext()).quantize(normal_weight(), scheme, scale_dtype=torch.bfloat16).codes
    expected = quantize_weight(normal_weight(), scheme, scale_dtype=torch.bfloat16)
    assert torch.equal(found.codes_OI.view(torch.uint8), expected.codes_OI.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("scheme", [FLOAT, QScheme(INT8, QScope.PER_TOKEN), QScheme(MXFP4, CHANNEL)], ids=str)
def test_minmax_has_no_scheme_that_ir_has_not(scheme: QScheme) -> None:
    assert not MinMax.supports(scheme)
    with pytest.raises(
        UnsupportedError, match=re.escape(f"m: weight method minmax has no {scheme}; use method minmax")
    ):
        MinMax(MinMax.Ext()).quantize(normal_weight(), scheme, name="m")


def test_the_registry_knows_the_methods_by_their_recipe_names() -> None:
    known = registry.names("weight")
    assert {"minmax", "ssz", "awq_clip", "mx_search", "mse_round", "ceil_x", "fouroversix"} <= set(known)
    for name in known:
        method = registry.lookup("weight", name)
        assert issubclass(method, WeightMethod)
        assert method.registered_name == name
        assert isinstance(method(method.Ext()).needs_gram, bool)
        assert method(method.Ext()).cost(4096, 4096) > 0


def test_a_name_that_no_method_has_offers_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match="'sz' is not a weight; write 'ssz'"):
        registry.lookup("weight", "sz")


@pytest.mark.parametrize("name", registry.names("weight"))
def test_options_are_closed_and_hold_the_group_size(name: str) -> None:
    ext = registry.lookup("weight", name).Ext
    assert ext(group_size=64, two_level=False).group_size == 64
    with pytest.raises(ValidationError, match="group_szie"):
        ext(group_szie=64)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        ext(group_size=0)


def test_the_diagonal_of_a_gram_is_itself_or_its_diagonal() -> None:
    matrix = torch.arange(9.0).reshape(3, 3)
    assert Gram(matrix, 1).diagonal().tolist() == [0, 4, 8]
    assert Gram(matrix.diagonal(), 1).diagonal().tolist() == [0, 4, 8]
