"""int4 groups inside int8 channels: against every scale and offset there is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msmodelslim.ir.quantize import quantize_weight
from msmodelslim.ir.scheme import QScheme
from msmodelslim.weight.base import Gram
from msmodelslim.weight.ssz import Ssz
from tests.weight.weights import GROUP, INT4, generator, lost, normal_weight, odd_weights, squares

SCHEMES = [QScheme(INT4, GROUP, symmetric, 16, two_level=True) for symmetric in (True, False)]
ASYM = SCHEMES[1]


def ssz(**options: object) -> Ssz:
    return Ssz(Ssz.Ext(**options))


def group_losses(weight: Tensor, codes: object, scheme: QScheme) -> np.ndarray:
    return (lost(weight, codes, scheme) ** 2).reshape(len(weight), -1, 16).sum(2)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=40, deadline=None)
@given(weight=odd_weights(), scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_group_is_worse_than_min_max(scheme: QScheme, weight: Tensor, scale_dtype: torch.dtype) -> None:
    rounded = ssz().quantize(weight, scheme, scale_dtype=scale_dtype)
    plain = quantize_weight(weight, scheme, scale_dtype=scale_dtype)
    largest = (weight.double().numpy() ** 2).reshape(len(weight), -1, 16).sum(2)
    found, expected = (group_losses(weight, codes, scheme) for codes in (rounded.codes, plain))
    assert (found <= expected * (1 + 1e-5) + 1e-10 * largest).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_hardly_any_other_scale_or_offset_is_better(scheme: QScheme) -> None:
    weight = torch.randn(16, 64, generator=generator(1)) ** 3
    rounded = ssz().quantize(weight, scheme)
    found = group_losses(weight, rounded.codes, scheme)
    best = np.full_like(found, np.inf)
    inner = (weight.double() / rounded.codes.scale.double()).numpy().reshape(16, 4, 16)
    for second in range(1, 20):
        for offset in range(-8, 8) if not scheme.symmetric else (0,):
            steps = np.arange(-8, 8) - offset
            values = steps[np.abs(steps * second) <= 127] * second
            error = (np.abs(inner[..., None] - values).min(-1) ** 2).sum(2)
            best = np.minimum(best, error * rounded.codes.scale.double().numpy() ** 2)
    assert found.sum() <= 1.05 * best.sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_and_their_int8_half_stay_in_range(scheme: QScheme) -> None:
    weight = torch.randn(64, 64, generator=generator(2)) ** 3
    codes = ssz().quantize(weight, scheme).codes
    assert codes.scale_second is not None and codes.offset_second is not None
    assert codes.codes_OI.min() >= -8 and codes.codes_OI.max() <= 7
    for whole in (codes.scale_second, codes.offset_second):
        assert torch.equal(whole, whole.round())
    assert codes.scale_second.min() >= 1
    steps = codes.codes_OI.unflatten(1, (-1, 16)) - codes.offset_second.unsqueeze(2)
    assert (steps * codes.scale_second.unsqueeze(2)).abs().max() <= 127


def test_it_loses_less_than_min_max_on_normal_weights() -> None:
    weight = torch.randn(64, 256, generator=generator(3))
    scheme = QScheme(INT4, GROUP, False, 128, two_level=True)
    record = ssz().quantize(weight, scheme).record
    assert record["objective"] < 0.93 * record["objective_minmax"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_record_states_the_losses(scheme: QScheme) -> None:
    weight = normal_weight()
    rounded, plain = ssz().quantize(weight, scheme), quantize_weight(weight, scheme)
    assert np.isclose(rounded.record["objective"], squares(weight, rounded.codes, scheme), rtol=1e-4)
    assert np.isclose(rounded.record["objective_minmax"], squares(weight, plain, scheme), rtol=1e-4)


def test_importance_lowers_the_weighted_loss() -> None:
    weight, diagonal = torch.randn(32, 64, generator=generator(3)), torch.logspace(-2, 2, 64)
    plain = ssz().quantize(weight, ASYM).codes
    weighted = ssz(importance=True).quantize(weight, ASYM, gram=Gram(diagonal, 3)).codes
    assert squares(weight, weighted, ASYM, diagonal) < squares(weight, plain, ASYM, diagonal)


def test_the_order_of_rows_and_the_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, order = normal_weight(20), torch.randperm(20, generator=generator(2))
    straight = ssz().quantize(weight, ASYM).codes
    monkeypatch.setattr("msmodelslim.weight.two_level._CHUNK_ELEMENTS", 3 * 64)
    mixed = ssz().quantize(weight[order], ASYM).codes
    assert torch.equal(straight.codes_OI[order], mixed.codes_OI)
    assert straight.scale_second is not None and mixed.scale_second is not None
    assert torch.equal(straight.scale_second[order], mixed.scale_second)
