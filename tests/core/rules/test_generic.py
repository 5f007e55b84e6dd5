"""Division without infinities, adjoints of any operation, shares of what was broadcast: by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from classlens.core.capture import record
from classlens.core.rules.generic import divide, divide_released, magnitude, shared, transported, unbroadcast
from classlens.errors import CaptureError
from steps import Does, back

X = torch.tensor([[[[1.0, -2.0], [3.0, 4.0]]]])


@pytest.mark.parametrize(
    "b", [[2.0, 4.0], [-2.0, -4.0], [-2.0, 4.0], [0.0, 4.0], [0.0, -4.0], [-2.0, 0.0], [0.0, 0.0], []], ids=str
)
def test_division_gives_0_where_the_divisor_is_0(b: list[float]) -> None:
    a = [3.0, -5.0][: len(b)]
    expected = torch.tensor([x / y if y else 0.0 for x, y in zip(a, b, strict=True)])
    assert torch.equal(divide(torch.tensor(a), torch.tensor(b)), expected)
    room = torch.full_like(expected, 7.0)
    assert divide(torch.tensor(a), torch.tensor(b), room) is room
    assert torch.equal(room, expected)
    assert torch.allclose(divide_released(torch.tensor(a), torch.tensor(b)), expected)


def test_the_released_division_is_guarded() -> None:
    a, b = torch.tensor([1.0, 1.0, 1.0]).double(), torch.tensor([1e-9, -3e-9, 0.0]).double()
    assert torch.allclose(divide_released(a, b), torch.tensor([5e8, -5e8, 0.0]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_magnitudes_are_never_0_and_next_to_it_where_x_is(dtype: torch.dtype) -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=dtype)
    size = magnitude(x)
    assert torch.equal(size[[0, 2]], x.abs()[[0, 2]])
    assert 0 < size[1] < 1e-18
    assert size[1] ** 2 > 0  # products of two such shares do not vanish


def test_an_input_that_only_lends_its_shape_gets_nothing() -> None:
    r = torch.arange(4.0).reshape(X.shape)
    tape = record(Does(lambda x: x.mean((2, 3), keepdim=True).expand_as(x * 2)).eval(), X)
    node = next(n for n in tape.nodes if n.op == "expand_as")
    (to_mean,) = transported(node, [r[None]])
    assert torch.equal(to_mean.flatten(), torch.tensor([6.0]))


def test_what_cannot_be_differentiated_is_refused() -> None:
    with pytest.raises(CaptureError, match="cannot be differentiated"):
        shared(lambda x: [(x > 0).float()], [X], torch.ones(1, *X.shape))
    with pytest.raises(CaptureError, match="derivative for aten::heaviside is not implemented; use rise"):
        shared(lambda x: [torch.heaviside(x, torch.ones(()))], [X], torch.ones(1, *X.shape))
    with pytest.raises(RuntimeError, match="inplace operation") as other:  # other errors of torch keep their type
        shared(lambda x: [_overwritten(x)], [X], torch.ones(1, *X.shape))
    assert not isinstance(other.value, CaptureError)


def _overwritten(x: Tensor) -> Tensor:
    y = x.exp()
    z = y * 1
    y.zero_()
    return z + y


@pytest.mark.parametrize(
    "part", [lambda x: x.to(torch.complex64).abs(), lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real]
)
def test_complex_numbers_are_refused(part: Callable[[Tensor], Tensor]) -> None:
    tape = record(Does(part).eval(), X)
    for node in tape.nodes:
        if node.outputs[0].tensor.is_complex() or node.inputs[0].tensor.is_complex():
            with pytest.raises(CaptureError, match="complex numbers"):
                transported(node, [torch.ones(1, *node.outputs[0].shape)])


def test_shares_come_back_to_the_shape_that_was_broadcast() -> None:
    share = torch.arange(24.0).reshape(1, 2, 3, 4)  # one class, and an output of (2,3,4)
    for shape in ((2, 3, 4), (3, 4), (4,), (2, 1, 4), (1, 1), (1, 3, 1), (1, 3, 4)):
        ours = unbroadcast(share, shape)
        assert ours.shape == (1, *shape)
        slow = torch.zeros(shape)
        for place, value in zip(torch.cartesian_prod(*map(torch.arange, (2, 3, 4))), share.flatten(), strict=True):
            at = place[3 - len(shape) :].tolist()
            slow[tuple(0 if n == 1 else i for i, n in zip(at, shape, strict=True))] += value
        assert torch.equal(ours[0], slow)


def test_what_was_broadcast_over_images_gets_the_sum_of_its_shares() -> None:
    """x + m with m the mean over images: |x| and |m| share, and m hands on to each image by |x|."""
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    r = torch.tensor([[2.0, 3.0], [4.0, 5.0]])

    def do(x: Tensor) -> Tensor:
        return x + x.mean(0)

    m = x.mean(0)
    direct = x.abs() / (x.abs() + m.abs()) * r
    of_mean = (r - direct).sum(0)
    assert torch.allclose(back(do, x, r), direct + x.abs() / x.abs().sum(0) * of_mean)


def test_shares_of_a_pool_that_returns_places_too() -> None:
    """As when a network asks for `return_indices=True`."""
    plain = shared(lambda x: [torch.max_pool2d(x, 2)], [X], torch.tensor([[[[[8.0]]]]]))
    both = shared(lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True), [X], torch.tensor([[[[[8.0]]]]]))
    assert torch.equal(both[0], plain[0])
    assert plain[0].flatten().tolist() == [0.0, 0.0, 0.0, 8.0]
