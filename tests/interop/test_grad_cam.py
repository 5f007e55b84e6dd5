"""Our maps in pytorch-grad-cam's pictures."""

from __future__ import annotations

import numpy as np
import torch
from pytorch_grad_cam.utils.image import show_cam_on_image

import classlens
from classlens.interop.grad_cam import cam_on_image
from networks import build, pictures


def test_a_signed_map_shows_what_speaks_for_the_class() -> None:
    e = classlens.explain(build("plain"), pictures(2), [[0, 1], [1, 0]], "gradient-x-input")  # signs of both kinds
    k = int(e.maps[1].sum((1, 2)).argmax())  # of the two, the class that more speaks for
    picture, heat = cam_on_image(e, row=1, k=k)
    np.testing.assert_array_equal(picture, e.pictures[1].permute(1, 2, 0).numpy())
    assert heat.dtype == np.float32
    assert (heat.min(), heat.max()) == (0, 1)
    assert np.array_equal(heat > 0, e.maps[1, k].numpy() > 0)
    shown = show_cam_on_image(picture, heat, use_rgb=True)
    assert shown.shape == (32, 32, 3)
    # Their colours run from blue to red.
    strongest, nothing = shown[heat == 1].mean(0), shown[heat == 0].mean(0)
    assert strongest[0] - strongest[2] > nothing[0] - nothing[2]


def test_an_unsigned_map_and_an_empty_one() -> None:
    e = classlens.explain(build("plain"), pictures(1), 0, "gradient")
    heat = cam_on_image(e)[1]
    order = torch.from_numpy(heat).flatten().argsort(stable=True)
    assert e.maps.flatten()[order].diff().min() >= -1e-12 or heat.max() == 1
    against = classlens.explain(build("plain"), pictures(1), 2)
    assert against.maps.max() <= 0
    picture, heat = cam_on_image(against)
    assert not heat.any()
    assert show_cam_on_image(picture, heat, use_rgb=True).shape == (32, 32, 3)
