from __future__ import annotations

import numpy as np
import torch

from classlens.report.hide import as_many_others, hide


def test_what_is_hidden_leaves_no_trace() -> None:
    images = torch.rand(2, 3, 20, 24)
    hidden = torch.zeros(2, 20, 24, dtype=torch.bool)
    hidden[:, 5:12, 6:15] = True
    other = torch.where(hidden[:, None], torch.rand_like(images), images)
    assert torch.equal(hide(images, hidden), hide(other, hidden))


def test_what_is_visible_stays_and_the_fill_is_of_its_colour() -> None:
    images = torch.full((1, 3, 20, 24), 0.25)
    images[:, 0] = 0.75
    hidden = torch.zeros(1, 20, 24, dtype=torch.bool)
    hidden[:, :, 3:22] = True  # most of it: its middle is out of the blur's reach
    noisy = torch.where(hidden[:, None], torch.rand_like(images), images)
    assert torch.allclose(hide(noisy, hidden), images, atol=1e-5)


def test_the_control_is_as_large_elsewhere_and_the_same_each_time() -> None:
    chosen = np.zeros((4, 4), bool)
    chosen[0] = True
    others = as_many_others(chosen, 0, "a")
    assert others.sum() == 4
    assert not (others & chosen).any()
    assert np.array_equal(others, as_many_others(chosen, 0, "a"))
    assert not np.array_equal(others, as_many_others(chosen, 0, "b"))
    most = ~others
    assert as_many_others(most, 0, "a").sum() == 4  # no more than there are
