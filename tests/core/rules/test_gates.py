"""Gates, scales and weights that are computed: each on a tiny network, against values worked out by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classlens.core.capture import record
from classlens.core.rules import propagate, rule_for
from steps import back

# Two channels of two places, (1,2,1,2), and relevance for each.
X = torch.tensor([[[[1.0, 3.0]], [[-2.0, 4.0]]]])
R = torch.tensor([[[[5.0, 1.0]], [[-3.0, 2.0]]]])


def test_squeeze_excite_passes_relevance_through_the_gate() -> None:
    """y = x * sigmoid(W mean(x)): the signal keeps R unit by unit, the gate's own way back gets nothing."""
    w = torch.tensor([[1.0, -1.0], [0.5, 2.0]])

    def excited(x: Tensor) -> Tensor:
        gate = torch.sigmoid(F.linear(x.mean((2, 3)), w))
        return x * gate[:, :, None, None]

    assert torch.equal(back(excited, X, R), R)


def test_layer_scale_is_part_of_its_branch() -> None:
    """y = x + gamma * f(x) with f(x) = 2x: by |x| and |gamma 2x| R is shared, and both come back to x: R in all.

    Seen apart, the branch gets |gamma 2x| / (|x| + |gamma 2x|) = 1/3 for gamma = .25 and 1/2 for gamma = -.5.
    """
    gamma = torch.tensor([0.25, -0.5]).reshape(1, 2, 1, 1)
    assert torch.allclose(back(lambda x: x + gamma * (2 * x), X, R), R)

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1, groups=2, bias=False)
            nn.init.constant_(self.conv.weight, 2.0)

        def forward(self, x: Tensor) -> Tensor:
            return x + gamma * self.conv(x)

    tape = record(Branch().eval(), X)
    at_conv = next(node.outputs[0] for node in tape.nodes if node.op == "conv2d")
    arrived: dict[str, Tensor] = {}

    def watch(node: object, relevance: object, shares: object) -> None:
        if at_conv in node.outputs:  # type: ignore[attr-defined]
            arrived["branch"] = relevance[0]  # type: ignore[index]

    propagate(tape, {tape.output: R[None]}, rule_for, watch=watch)
    share = torch.tensor([1 / 3, 1 / 2]).reshape(1, 1, 2, 1, 1)
    assert torch.allclose(arrived["branch"], R[None] * share)


def test_global_response_norm_is_a_gate_over_places() -> None:
    """y = gamma (x n) + beta + x with n = |x|_2 / mean over channels: by hand, the summands |gamma n x| and |x|.

    n scales a channel as a whole, so it is a gate: what the scaled branch gets goes to x itself.
    """
    gamma, beta = torch.tensor([0.5, 2.0]).reshape(1, 2, 1, 1), torch.tensor([0.3, -0.2]).reshape(1, 2, 1, 1)

    def normed(x: Tensor) -> Tensor:
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        return gamma * (x * (size / (size.mean(1, keepdim=True) + 1e-6))) + beta + x

    assert torch.allclose(back(normed, X, R), R)
    as_written_elsewhere = back(
        lambda x: x + torch.addcmul(beta, gamma, x * (x.norm(p=2, dim=(2, 3), keepdim=True))), X, R
    )
    assert torch.allclose(as_written_elsewhere, R)


def test_standardised_weights_are_the_weights() -> None:
    """A convolution whose weight is standardised on the fly: |W'| counts, with W' = (W - mean) / std.

    One output of two inputs at one place: W = (1, 3) becomes (-1, 1), so x = (1, -2) gets R/3 and 2R/3.
    """

    class Standardised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            w = self.weight.flatten(1)
            w = (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True, unbiased=False)
            return F.conv2d(x, w.reshape(self.weight.shape))

    tape = record(Standardised().eval(), X[..., :1])
    found = propagate(tape, {tape.output: torch.full((1, 1, 1, 1, 1), 6.0)}, rule_for).relevance[0]
    assert torch.allclose(found.flatten(), torch.tensor([2.0, 4.0]))
