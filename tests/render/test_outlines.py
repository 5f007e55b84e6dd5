from __future__ import annotations

import numpy as np
import torch

from classlens.core.targets import Box
from classlens.render.outlines import edge, outlined


def test_the_edge_of_a_mask() -> None:
    inside = np.zeros((6, 7), bool)
    inside[1:5, 2:6] = True
    expected = inside.copy()
    expected[2:4, 3:5] = False
    assert (edge(inside) == expected).all()
    assert edge(np.ones((3, 3), bool)).sum() == 8


def test_boxes_and_masks_are_drawn_and_the_rest_stays() -> None:
    pixels = np.full((20, 30, 3), 7, np.uint8)
    mask = torch.zeros(20, 30, dtype=torch.bool)
    mask[15:18, 20:25] = True
    drawn = outlined(pixels, [Box(2.2, 3.0, 11.9, 12.0), mask])
    changed = (drawn != pixels).any(2)
    assert changed[3, 2:12].all()
    assert changed[11, 2:12].all()
    assert not changed[4:11, 3:11].any()
    assert changed[15:18, 20].all()
    assert not changed[16, 21:24].any()
    assert (pixels == 7).all()


def test_a_pixel_is_drawn_large_enough_to_see() -> None:
    drawn = outlined(np.zeros((20, 30, 3), np.uint8), [Box(10, 10, 11, 11)])
    rows, columns = drawn.any(2).nonzero()
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (7, 13, 7, 13)
