from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from classlens.core.capture import record
from classlens.evaluate.tests import sanity
from networks import Plain, Residual


def smooth(seed: int, count: int = 2) -> torch.Tensor:
    noise = torch.randn(count, 1, 64, 80, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return sanity.unit(nn.functional.avg_pool2d(noise, 9, 1, 4)[:, 0])


def test_structural_similarity_as_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    a, b = smooth(0), 0.6 * smooth(0) + 0.4 * smooth(1)
    theirs = []
    for one, other in zip(a.numpy(), b.numpy(), strict=True):
        _, image = metrics.structural_similarity(one, other, data_range=2.0, win_size=7, full=True)
        theirs.append(image[3:-3, 3:-3].mean())
    np.testing.assert_allclose(sanity.ssim(a, b)[0], theirs, rtol=1e-9)
    np.testing.assert_allclose(sanity.ssim(a, -b)[1], theirs, rtol=1e-9)
    assert sanity.ssim(a, a)[0].tolist() == pytest.approx([1, 1])


def test_rank_correlation_as_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = smooth(0).round(decimals=1), (smooth(0) + smooth(1)).round(decimals=1)  # many equal values
    theirs = [
        stats.spearmanr(one.ravel(), other.ravel()).statistic for one, other in zip(a.numpy(), b.numpy(), strict=True)
    ]
    np.testing.assert_allclose(sanity.rank_correlation(a, b), theirs, rtol=1e-9)
    assert sanity.rank_correlation(a, torch.zeros_like(a)).tolist() == [0, 0]


def test_histograms_of_gradients_as_scikit_image() -> None:
    feature = pytest.importorskip("skimage.feature")
    maps = smooth(3)
    ours = sanity.hog(maps)
    for one, found in zip(maps.numpy(), ours, strict=True):
        theirs = feature.hog(
            one, orientations=9, pixels_per_cell=(16, 16), cells_per_block=(1, 1), block_norm="L1", feature_vector=False
        )[:, :, 0, 0]
        np.testing.assert_allclose(found / (found.sum(2, keepdim=True) + 1e-5), theirs, rtol=1e-5, atol=1e-6)


def test_maps_are_compared_up_to_size_and_sign() -> None:
    a = smooth(5)
    np.testing.assert_allclose(sanity.similarities(a, 7 * a), 1, rtol=1e-5)
    np.testing.assert_allclose(sanity.similarities(a, -a), 1, rtol=1e-5)
    unlike = sanity.similarities(a, smooth(6))
    assert unlike.max() < 0.5


@pytest.mark.parametrize("network", [Plain, Residual])
def test_layers_come_in_the_order_of_the_forward_pass(network: type[nn.Module]) -> None:
    model = network().eval()
    names = sanity.layers(model, record(model, torch.randn(1, 3, 32, 32)))
    with_weights = [n for n, m in model.named_modules() if list(m.parameters(recurse=False))]
    assert sorted(names) == sorted(with_weights)
    assert names[-1] in ("head.3", "fc")
    assert names[0] in ("features.0", "stem")


def test_layers_lose_what_they_learnt_from_the_top() -> None:
    model = Plain().eval()
    before = copy.deepcopy(model.state_dict())
    names = sanity.layers(model, record(model, torch.randn(1, 3, 32, 32)))
    changed = []
    for network in sanity.cascade(model, names, seed=0, stages=(0.0, 0.5, 1.0)):
        state = network.state_dict()
        for key, value in state.items():  # the same values in another order
            assert torch.equal(value.flatten().sort().values, before[key].flatten().sort().values)
        changed.append({k.rpartition(".")[0] for k in state if not torch.equal(state[k], before[k])})
    assert changed[0] == {names[-1]}
    assert changed[1] < changed[2]
    assert {names[0], names[-1]} <= changed[2]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_same_seed_gives_the_same_networks() -> None:
    model = Plain().eval()
    names = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    states = [[n.head[3].weight.clone() for n in sanity.cascade(model, names, seed=s)][-1] for s in (1, 1, 2)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
