import operator

import pytest
import torch
import torch.nn.functional as F

from classlens.core.ops import arguments, canonical, is_mutating


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (F.relu, "relu"), (torch.relu, "relu"), (torch.relu_, "relu"), (torch.Tensor.relu_, "relu"),
        (torch.Tensor.__iadd__, "add"), (torch.Tensor.__radd__, "add"), (torch.add, "add"),
        (torch.Tensor.__truediv__, "div"), (torch.Tensor.__rtruediv__, "rdiv"), (torch.mm, "matmul"),
        (torch.Tensor.__getitem__, "getitem"), (torch.Tensor.__setitem__, "setitem"),
        (F.max_pool2d, "max_pool2d"), (F.conv2d, "conv2d"), (torch.Tensor.mT.__get__, "transpose_last"),
        (torch.Tensor.T.__get__, "transpose_all"), (torch.Tensor.data.__get__, "detach"), (torch.clip, "clamp"),
        (F.upsample, "interpolate"), (torch.Tensor.float, "to"), (torch.concat, "cat"),
    ],
)  # fmt: skip
def test_one_name_for_each_spelling(func: object, name: str) -> None:
    assert canonical(func) == name  # type: ignore[arg-type]


def test_mutating_calls() -> None:
    assert is_mutating(torch.Tensor.add_, (), {})
    assert is_mutating(torch.Tensor.__imul__, (), {})
    assert is_mutating(torch.Tensor.__setitem__, (), {})
    assert is_mutating(F.relu, (None,), {"inplace": True})
    assert is_mutating(F.relu, (None, True), {})
    assert is_mutating(F.leaky_relu, (None, 0.1, True), {})
    assert not is_mutating(F.leaky_relu, (None, True), {})
    assert not is_mutating(torch.Tensor.__invert__, (), {})
    assert not is_mutating(operator.add, (), {})
    assert not is_mutating(torch.Tensor.__index__, (), {})


def test_both_orders_of_batch_norm() -> None:
    assert arguments("batch_norm", F.batch_norm, (1, 2, 3, 4), {})["running_mean"] == 2
    assert arguments("batch_norm", torch.batch_norm, (1, 2, 3, 4), {})["running_mean"] == 4
    assert arguments("linear", F.linear, (1,), {"weight": 2})["weight"] == 2


def test_parameters_that_take_the_rest() -> None:
    assert arguments("einsum", torch.einsum, ("ab,bc->ac", 1, 2), {}) == {"equation": "ab,bc->ac", "operands": (1, 2)}
    x = torch.ones(6)
    assert arguments("view", torch.Tensor.view, (x, 2, 3), {}) == {"input": x, "size": (2, 3)}


def test_inplace_by_position_is_found_in_the_signature() -> None:
    """Before, there was a list, and it lacked some."""
    assert is_mutating(F.dropout1d, (None, 0.5, False, True), {})
    assert is_mutating(F.feature_alpha_dropout, (None, 0.5, False, True), {})
    assert not is_mutating(torch.rrelu, (None, 0.1, 0.3, False, True), {})
