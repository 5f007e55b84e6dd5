"""Controls: maps that do not depend on the network, as baselines that a method must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from classlens.methods.inputs import above_zero, generator, whole
from classlens.methods.places import enlarged, filtered_along
from classlens.methods.registry import Case, Result, method


def _for_each_class(case: Case, maps: Tensor) -> Result:
    """(B or 1,*size) -> (B,K,*size): the same map for every class."""
    return Result(maps[:, None].expand(*case.targets.shape, *maps.shape[1:]).to(case.images).clone())


@method(
    "random", family="controls", summary="seeded normal noise, the same for every image and class",
    class_specific=False, signed=True, conserves=False, scalars=True, layers=False, holds="maps",
    paper="a control, not published",
)  # fmt: skip
def random(case: Case, cells: int | None = None, seed: int = 0) -> Result:
    """White noise; with `cells=7`, noise on a 7x7 grid, enlarged: as smooth as a class activation map."""
    size = case.images.shape[2:]
    source = generator(seed)
    if cells is None:
        return _for_each_class(case, torch.randn(1, *size, generator=source))
    whole(1, cells=cells)
    return _for_each_class(case, enlarged(torch.randn(1, 1, *[cells] * len(size), generator=source), size)[0])


@method(
    "centre", family="controls", summary="a Gaussian at the centre of the image, where most objects are",
    class_specific=False, signed=False, conserves=False, scalars=True, layers=False, holds="maps",
    paper="a control, not published",
)  # fmt: skip
def centre(case: Case, sigma: float = 0.25) -> Result:
    """exp(-(u^2 + v^2) / (2 sigma^2)), with u and v from -1/2 to 1/2 across the image; of a volume, three axes."""
    above_zero(sigma=sigma)
    bumps = [
        torch.exp(-(((torch.arange(side, dtype=torch.float64) + 0.5) / side - 0.5) ** 2) / (2 * sigma**2))
        for side in case.images.shape[2:]
    ]
    return _for_each_class(case, torch.stack(torch.meshgrid(*bumps, indexing="ij")).prod(0)[None])


@method(
    "sobel", family="controls", summary="edges of the image, which many maps resemble",
    class_specific=False, signed=False, conserves=False, scalars=True, layers=False, holds="maps",
    paper="Adebayo et al.: Sanity Checks for Saliency Maps, NeurIPS 2018",
)  # fmt: skip
def sobel(case: Case) -> Result:
    """Length of the Sobel gradient over all colours; the border is replicated, so that it is not an edge."""
    images = case.images.detach()
    smooth, slope = images.new_tensor([1.0, 2.0, 1.0]) / 4, images.new_tensor([-1.0, 0.0, 1.0]) / 2
    axes = range(images.dim() - 2)
    edges = [
        filtered_along(images, [slope if other == axis else smooth for other in axes], "replicate") for axis in axes
    ]
    return _for_each_class(case, torch.cat(edges, 1).square().sum(1).sqrt())
