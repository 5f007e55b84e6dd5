"""Algorithm 2, held to a network in which the neighbour is written down by hand."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from sorting import net, seeded
from torch import Tensor, nn

import classlens
import slow_agf
from classlens import selfsup
from classlens.errors import ClasslensError, MethodError, ModelError, TargetError
from classlens.models import LoadedModel, Preprocess
from classlens.selfsup.split import split
from quick import ANYWHERE, QUICK

BANK = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(3))
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(4))


class ByHand(nn.Module):
    """head(features(x) - c)."""

    def __init__(self, network: Any, constant: Tensor) -> None:
        super().__init__()
        self.network, self.constant = network, constant
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.network.head(self.network.features(images) - self.constant)


@torch.no_grad()
def nearest_by_hand(network: Any, images: Tensor = IMAGES, bank: Tensor = BANK) -> tuple[Tensor, Tensor]:
    """Which picture of the bank is nearest, and its latent."""
    latents, others = network.features(images), network.features(bank)
    indices = torch.stack([(others - latent).pow(2).sum(1).argmin() for latent in latents])
    return indices, others[indices]


@pytest.mark.parametrize("mode", ["difference", "sum"])
@pytest.mark.parametrize("method", ANYWHERE)
def test_every_method_explains_the_network_written_by_hand(method: str, mode: str) -> None:
    """All at once, as each image with its own neighbour alone."""
    network, options = seeded(), QUICK.get(method, {})
    indices, neighbours = nearest_by_hand(network)
    e = selfsup.explain(network, IMAGES, BANK, method, mode, both=False, **options)
    assert torch.equal(e.indices, indices)
    for row, neighbour in enumerate(neighbours):
        by_hand = ByHand(network, neighbour if mode == "difference" else -neighbour)
        expected = classlens.explain(by_hand, IMAGES[row : row + 1], method=method, **options)
        assert torch.equal(e.targets[row], expected.targets[0])
        torch.testing.assert_close(e.logits[row], expected.logits[0])
        scale = float(expected.maps.abs().max())
        torch.testing.assert_close(e.maps[row], expected.maps[0], rtol=1e-3, atol=2e-4 * scale)


def score_gradient(method: str, logits: Tensor, weight: Tensor, target: int) -> Tensor:
    """d score / d latent, at these logits: by autograd of Eq. 7, and of agf's own score by its slow derivation."""
    if method == "agf":
        y = logits.detach().double().requires_grad_()
        return torch.autograd.grad(slow_agf.above_rivals(y, target), y)[0].to(weight) @ weight
    y = logits.detach().requires_grad_()
    sigma = (y - y[target]).abs().max()
    yhat = (y[target] * torch.exp(-0.5 * ((y - y[target]) / sigma) ** 2)).softmax(0)[target]
    return torch.autograd.grad(yhat, y)[0] @ weight


@pytest.mark.parametrize("method", ["agf", "agf-paper"])
@pytest.mark.parametrize("reading", selfsup.READINGS)
def test_where_the_evidence_starts(reading: str, method: str) -> None:
    network = seeded()
    own, (_, neighbours) = network.features(IMAGES).detach(), nearest_by_hand(network)
    e = selfsup.explain(network, IMAGES, BANK, method, reading=reading, both=False)
    for row in range(3):
        s = own[row] - neighbours[row]
        logits = network.head(s) if reading != "logits" else network.head(own[row]) - network.head(neighbours[row])
        torch.testing.assert_close(e.logits[row], logits, rtol=1e-4, atol=1e-5)
        target = int(logits.argmax())
        assert int(e.targets[row, 0]) == target
        gradient = score_gradient(method, logits, network.head.weight, target)
        phi = (s if reading == "literal" else own[row]) * gradient
        torch.testing.assert_close(e.report.started[row, 0], phi.detach().sum().double(), rtol=1e-3, atol=1e-7)
        assert float(e.report.conservation[row, 0]) < 1e-4 or method == "agf-paper"


def test_the_sum_of_logits() -> None:
    network = seeded()
    _, neighbours = nearest_by_hand(network)
    e = selfsup.explain(network, IMAGES, BANK, "lrp", "sum", reading="logits", both=False)
    torch.testing.assert_close(e.logits, (network(IMAGES) + network.head(neighbours)).detach())


def test_the_released_rules_let_the_neighbour_draw_nothing() -> None:
    """Their rule for a sum would hand the constant a share."""
    e = selfsup.explain(seeded(), IMAGES, BANK, "lrp(variant=release)", both=False)
    by_hand = [
        classlens.explain(ByHand(seeded(), n), IMAGES[i : i + 1], method="lrp(variant=release)")
        for i, n in enumerate(nearest_by_hand(seeded())[1])
    ]
    torch.testing.assert_close(e.maps, torch.cat([one.maps for one in by_hand]), rtol=1e-3, atol=1e-6)


def test_without_the_neighbour_it_is_an_ordinary_explanation() -> None:
    plain = classlens.explain(seeded(), IMAGES)
    e = selfsup.explain(seeded(), IMAGES, BANK)
    alone = selfsup.explain(seeded(), IMAGES, BANK, mode="none")
    assert e.without is not None
    for found in (e.without, alone):
        torch.testing.assert_close(found.maps, plain.maps, rtol=1e-4, atol=1e-5 * float(plain.maps.abs().max()))
    assert alone.without is None


def test_the_predicted_class_and_given_ones() -> None:
    network = seeded()
    predicted = network(IMAGES).argmax(1, keepdim=True)
    assert torch.equal(selfsup.explain(network, IMAGES, BANK, targets="predicted", both=False).targets, predicted)
    # "rise" goes image by image: each must keep its own target.
    for method, options in (("lrp", {}), ("rise", {"n_masks": 2})):
        e = selfsup.explain(network, IMAGES, BANK, method, targets=[4, 0, 2], both=False, **options)
        assert e.targets[:, 0].tolist() == [4, 0, 2]


def test_a_head_of_several_layers_can_be_named() -> None:
    network = nn.Sequential()
    network.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.top = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    network.eval()
    latents, others = network.body(IMAGES), network.body(BANK)
    neighbours = others[torch.cdist(latents, others).argmin(1)]
    for reading in ("literal", "image"):
        e = selfsup.explain(network, IMAGES, BANK, "lrp", head="top", reading=reading, both=False)
        torch.testing.assert_close(e.logits, network.top(latents - neighbours).detach())
    assert split(network, IMAGES[:1]).head.name == "top.2"
    with pytest.raises(ClasslensError, match=r"needs a head that is the last layer; behind top\.0 are more"):
        selfsup.explain(network, IMAGES, BANK, head="top", reading="logits")


class Two(nn.Module):
    """Two heads, of which `output` picks one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = seeded(), nn.Linear(12, 3)
        self.eval()

    def forward(self, images: Tensor) -> list[Tensor]:
        latent = self.net.features(images)
        return [self.net.head(latent), self.other(latent)]


def test_one_of_several_outputs() -> None:
    model = Two()
    e = selfsup.explain(model, IMAGES, BANK, output=1)
    assert e.logits.shape == (3, 3)
    difference = model.net.features(IMAGES) - nearest_by_hand(model.net)[1]
    torch.testing.assert_close(e.logits, model.other(difference).detach())


# ----------------------------------------------------------------------------------------------------- without a head


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded()
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.net.features(images)


@pytest.mark.parametrize(("mode", "sign"), [("difference", -1), ("sum", 1), ("none", 0)])
def test_a_backbone_is_explained_along_a_direction(mode: str, sign: int) -> None:
    own, (indices, neighbours) = seeded().features(IMAGES).detach(), nearest_by_hand(seeded())
    e = selfsup.explain(Backbone(), IMAGES, BANK, "agf", mode, head="none", both=False)
    unit = nn.functional.normalize(own + sign * neighbours)
    assert torch.equal(e.indices, indices)
    torch.testing.assert_close(e.report.started[:, 0], (own * unit).sum(1).double(), rtol=1e-4, atol=1e-6)
    assert float(e.report.conservation.max()) < 1e-4
    assert e.name() == "latent"


def test_a_backbone_likeness_to_the_neighbour() -> None:
    own, (_, neighbours) = seeded().features(IMAGES).detach(), nearest_by_hand(seeded())
    e = selfsup.explain(Backbone(), IMAGES, BANK, "gradient-x-input", head="none", targets="cosine")
    assert e.without is None  # there is no likeness without a neighbour
    leaf = IMAGES.clone().requires_grad_()
    score = nn.functional.cosine_similarity(seeded().features(leaf), neighbours).sum()
    expected = (leaf * torch.autograd.grad(score, leaf)[0]).sum(1).detach()
    torch.testing.assert_close(e.maps[:, 0], expected, rtol=1e-3, atol=1e-7)
    assert own.shape == e.logits.shape


def test_a_backbone_has_no_classes() -> None:
    with pytest.raises(TargetError, match="has no classes"):
        selfsup.explain(Backbone(), IMAGES, BANK, head="none", targets=3)
    with pytest.raises(MethodError, match="clrp contrasts a class"):
        selfsup.explain(Backbone(), IMAGES, BANK, "clrp", head="none")


# -------------------------------------------------------------------------------------------------- files and figure


def test_files_and_a_folder(pictures: Path, tmp_path: Path) -> None:
    files = sorted(pictures.iterdir())
    e = selfsup.explain(net(), [files[0], files[3]], bank=pictures)
    listed = selfsup.explain(net(), [files[0], files[3]], bank=files)
    assert torch.equal(e.indices, listed.indices)
    assert e.neighbours[0] != files[0].name
    assert [p is not None and p.shape == (3, 32, 32) for p in e.neighbour_pictures] == [True, True]
    torch.testing.assert_close(
        e.neighbour_pictures[0], net().preprocess.restore(net().preprocess(pictures / e.neighbours[0]))
    )
    written = {path.name for path in e.save(tmp_path)}
    assert {"neighbours.png", "figure.png", "maps.npz", "report.json"} <= written


def test_the_figure_has_image_neighbour_and_both_maps() -> None:
    with_both = selfsup.explain(seeded(), IMAGES, BANK).figure()
    alone = selfsup.explain(seeded(), IMAGES, BANK, mode="sum", both=False).figure()
    assert len(with_both.axes) == 3 * 4 + 1  # and the bar of colours
    assert len(alone.axes) == 3 * 3 + 1
    titles = [axes.get_title(loc="left") for axes in with_both.axes[:4]]
    assert titles[:2] == ["image", "nearest neighbour"]
    assert titles[2].startswith("alone: class")
    assert titles[3].startswith("differs: class")


# ------------------------------------------------------------------------------------------------------ leaves no trace


def test_the_model_is_as_it_was_and_serves_two_threads() -> None:
    network = seeded()
    before, attributes = copy.deepcopy(network.state_dict()), set(vars(network.head))
    expected = selfsup.explain(network, IMAGES, BANK).maps
    with pytest.raises(ClasslensError):
        selfsup.explain(network, IMAGES, BANK, "agf", targets=99)
    found: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(selfsup.explain(network, IMAGES, BANK).maps)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(maps, expected) for maps in found)
    assert len(found) == 2
    assert set(vars(network.head)) == attributes
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("reading", selfsup.READINGS)
def test_the_callers_mode_does_not_matter(reading: str) -> None:
    network = seeded()
    expected = selfsup.explain(network, IMAGES, BANK, reading=reading).maps
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            found = selfsup.explain(network, IMAGES + 0, BANK + 0, reading=reading)
        assert torch.equal(found.maps, expected)


# ----------------------------------------------------------------------------------------------------- what is wrong


def test_a_model_without_a_linear_head() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.raises(ModelError, match=r"no linear head: its last layer is conv2d in 0; give .* head='none'"):
        selfsup.explain(model, IMAGES, BANK)
    with pytest.raises(ModelError, match="no linear layer in 'fc'; its linear layers: head"):
        selfsup.explain(seeded(), IMAGES, BANK, head="fc")
    with pytest.raises(ModelError, match="reads a tensor of shape"):
        selfsup.explain(nn.Sequential(nn.Linear(32, 4), nn.Flatten()).eval(), IMAGES, BANK, head="0")


def test_a_head_that_cannot_be_recognised() -> None:
    network = seeded()
    nn.utils.parametrizations.weight_norm(network.head).eval()
    with pytest.raises(ModelError, match="recomputed in every forward pass"):
        selfsup.explain(network, IMAGES, BANK)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.square = seeded(), nn.Linear(12, 12)

        def forward(self, images: Tensor) -> Tensor:
            return self.square(self.square(self.net.features(images)))

    with pytest.raises(ModelError, match="used 2 times"):
        selfsup.explain(Twice().eval(), IMAGES, BANK)


@pytest.mark.parametrize(("options", "words"), [
    ({"mode": "other"}, "unknown mode 'other'; choose from difference, sum, none"),
    ({"reading": "other"}, "unknown reading 'other'; choose from literal, image, logits"),
    ({"metric": "other"}, "unknown metric 'other'; choose from euclidean, cosine"),
])  # fmt: skip
def test_unknown_words(options: dict[str, str], words: str) -> None:
    with pytest.raises(ClasslensError, match=words):
        selfsup.explain(seeded(), IMAGES, BANK, **options)


def test_banks_that_cannot_serve(pictures: Path) -> None:
    with pytest.raises(selfsup.BankError, match="the bank is empty"):
        selfsup.explain(seeded(), IMAGES, BANK[:0])
    with pytest.raises(selfsup.BankError, match="the bank is empty"):
        selfsup.explain(net(), IMAGES, [])
    with pytest.raises(selfsup.BankError, match="no image other than image 1 itself"):
        selfsup.explain(seeded(), IMAGES, IMAGES[1:2])
    with pytest.raises(selfsup.BankError, match="needs a loaded model"):
        selfsup.explain(seeded(), IMAGES, pictures)
    other = selfsup.Bank.of_images(BANK, split(seeded(1), IMAGES[:1]))
    with pytest.raises(selfsup.BankError, match="made with another model"):
        selfsup.explain(seeded(), IMAGES, other)


def test_labels_and_precision_of_a_loaded_model() -> None:
    loaded = LoadedModel("mine", seeded().double(), Preprocess(resize=32, crop=32), ("a", "b", "c", "d", "e"))
    e = selfsup.explain(loaded, IMAGES, BANK)
    assert e.maps.dtype == torch.float64
    assert e.model == "mine"
    assert e.label(int(e.targets[0, 0])) in "abcde"
    torch.testing.assert_close(e.maps.float(), selfsup.explain(seeded(), IMAGES, BANK).maps, rtol=1e-2, atol=1e-6)


def test_a_class_can_be_set_against_others_in_what_differs_from_the_neighbour() -> None:
    e = selfsup.explain(seeded(), IMAGES, BANK, targets=1, rather_than=2)
    assert e.name() == "class 1 rather than class 2"
    assert len(e.asked) == len(IMAGES)
    assert not torch.equal(e.maps, selfsup.explain(seeded(), IMAGES, BANK, targets=1).maps)
    with pytest.raises(TargetError, match="rather_than works only with classes"):
        selfsup.explain(Backbone(), IMAGES, BANK, head="none", rather_than=1)
