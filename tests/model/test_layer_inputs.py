import weakref

import pytest
import torch
from torch import nn

from msmodelslim.errors import UnsupportedError
from msmodelslim.model.layer_inputs import TensorPool, record_calls


class Add(nn.Module):
    def forward(self, hidden_states, extra, *, scale=1):
        return hidden_states + extra * scale


class Toy(nn.Module):
    """Calls its layers in the order that it is given."""

    def __init__(self, order):
        super().__init__()
        self.layers = nn.ModuleList(Add() for _ in range(3))
        self.order = order

    def forward(self, x, by_name=False):
        for index in self.order:
            extra = torch.full_like(x, index)
            if by_name:
                x = self.layers[index](hidden_states=x, extra=extra, scale=10)
            else:
                x = self.layers[index](x, extra, scale=10)
        raise AssertionError("the head was reached")


def test_every_layer_is_recorded_with_its_own_arguments():
    model, x = Toy([0, 1, 2]), torch.ones(2)
    calls = record_calls(model, list(model.layers), {"x": x})
    assert [(args[1].tolist(), kwargs) for args, kwargs in calls] == [([i, i], {"scale": 10}) for i in range(3)]
    assert all(args[0] is x for args, _ in calls)


def test_hidden_states_given_by_name_come_first_in_args():
    model, x = Toy([0, 1, 2]), torch.ones(2)
    args, kwargs = record_calls(model, list(model.layers), {"x": x, "by_name": True})[1]
    assert args == (x,)
    assert kwargs.keys() == {"extra", "scale"}


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [0]])
def test_the_layers_forward_is_put_back(order):
    model = Toy(order)
    own = model.layers[1].forward
    model.layers[2].forward = mine = lambda x, extra, scale: x
    try:
        record_calls(model, list(model.layers), {"x": torch.ones(2)})
    except (UnsupportedError, AssertionError):
        assert order != [0, 1, 2]
    assert "forward" not in vars(model.layers[0])
    assert model.layers[1].forward == own
    assert model.layers[2].forward is mine


def test_a_model_that_calls_its_layers_out_of_order_is_refused():
    model = Toy([1, 0, 2])
    with pytest.raises(UnsupportedError, match=r"Toy calls decoder layer 1 as number 0; use a model that calls"):
        record_calls(model, list(model.layers), {"x": torch.ones(2)})


def test_a_model_that_leaves_layers_out_is_refused():
    class Short(Toy):
        def forward(self, x):
            return self.layers[0](x, x)

    model = Short([])
    with pytest.raises(UnsupportedError, match=r"Short calls 1 of its 3 decoder layers"):
        record_calls(model, list(model.layers), {"x": torch.ones(2)})


def test_equal_tensors_become_one_wherever_they_sit():
    pool = TensorPool()
    first = pool.shared({"mask": torch.ones(3), "tables": (torch.zeros(3), torch.ones(3)), "n": 1, "none": None})
    second = pool.shared({"mask": torch.ones(3), "tables": [torch.zeros(3), torch.full((3,), 2.0)], "n": 1})
    assert first["mask"] is first["tables"][1] is second["mask"]
    assert first["tables"][0] is second["tables"][0]
    assert second["tables"][1].tolist() == [2, 2, 2]
    assert (first["n"], first["none"]) == (1, None)


def test_equal_values_of_another_type_or_shape_stay_apart():
    pool = TensorPool()
    one = pool.shared(torch.ones(4))
    assert pool.shared(torch.ones(4, dtype=torch.int64)) is not one
    assert pool.shared(torch.ones(2, 2)).shape == (2, 2)


def test_the_pool_keeps_nothing_alive():
    pool = TensorPool()
    shared = pool.shared(torch.ones(4))
    seen = weakref.ref(shared)
    del shared
    assert seen() is None
    assert pool.shared(torch.ones(4)).tolist() == [1, 1, 1, 1]
