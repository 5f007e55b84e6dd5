"""The contributions of pixels in networks set by hand, derived a second time: from coalitions of pixels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from classlens.evaluate.known import BUILDS, CLASSES, PIXELS, SHAPES, Picture, build, draw, template

TOGETHER = {"both": ("yellow", "cyan"), "any": ("blue",)}  # objects that a class does not just add up

NETWORK = build("plain")


def groups(picture: Picture, name: str) -> list[Tensor]:
    """(64,64) masks: the pixels of objects whose contributions are not independent."""
    joint = [thing.mask for thing in picture.things if thing.colour in TOGETHER.get(name, ())]
    single = [thing.mask for thing in picture.things if thing.colour not in TOGETHER.get(name, ())]
    return single + ([torch.stack(joint).any(0)] if joint else [])


@torch.no_grad()
def values(picture: Picture, coalitions: Tensor) -> Tensor:
    """(n,64,64) -> (n,classes): the logits of what is left of a picture, less those of black."""
    net = NETWORK
    logits = net(picture.image * coalitions[:, None])
    return logits - net(torch.zeros(1, *picture.image.shape))


def test_contributions_are_shapley_values() -> None:
    """Additivity over groups, symmetry within a group, dummies and efficiency: together they allow one answer."""
    picture, generator = draw(7), torch.Generator().manual_seed(7)
    lit = picture.image.sum(0) > 0
    for k, name in enumerate(CLASSES):
        parts, truth = groups(picture, name), picture.truth[k]
        kept = lit & (torch.rand(3, *lit.shape, generator=generator) < torch.rand(3, 1, 1, generator=generator))
        alone = sum(values(picture, kept & part)[:, k] for part in parts)
        assert torch.allclose(values(picture, kept)[:, k], torch.as_tensor(alone), atol=1e-4), name
        for part in parts:
            assert values(picture, part[None])[0, k] == pytest.approx(float(truth[part].sum()), abs=1e-4)
            (only,) = truth[part].unique().tolist()  # every pixel of a group contributes the same
            pixels = part.nonzero()
            first, second = pixels[torch.randperm(len(pixels), generator=generator)[:2]].tolist()
            coalitions = kept[None].repeat(3, 1, 1, 1)  # with neither of two pixels, with the first, with the second
            coalitions[:, :, [first[0], second[0]], [first[1], second[1]]] = False
            coalitions[1, :, first[0], first[1]] = coalitions[2, :, second[0], second[1]] = True
            neither, one, other = values(picture, coalitions.flatten(0, 1))[:, k].view(3, -1)
            assert torch.allclose(one, other, atol=1e-4), name
            if only == 0:
                assert torch.allclose(one, neither, atol=1e-4), name


@pytest.mark.parametrize("name", BUILDS)
def test_all_networks_compute_the_same_function(name: str) -> None:
    pictures = [draw(seed) for seed in range(20)]
    logits = build(name)(torch.stack([picture.image for picture in pictures])).double()
    assert torch.allclose(logits, torch.stack([picture.truth.sum((1, 2)) for picture in pictures]), atol=1e-4)


def test_shapes_have_nine_pixels_and_lie_in_cells_of_their_own() -> None:
    assert [int(template(shape).sum()) for shape in SHAPES] == [PIXELS, PIXELS, PIXELS, 4]
    for seed in range(20):
        cells = [(thing.top // 8, thing.left // 8) for thing in draw(seed).things]
        assert len(cells) == len(set(cells))
        assert all(thing.top % 8 + 5 <= 8 and thing.left % 8 + 5 <= 8 for thing in draw(seed).things)
        assert (draw(seed).truth.abs().sum((1, 2)) > 0).all()
