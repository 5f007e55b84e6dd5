"""Seeds: the maps of the classes in a picture, at several scales and mirrored, added and scaled to a maximum of 1.

This is how class activation maps become seeds in weakly supervised segmentation (Ahn and Kwak, CVPR 2018; Ahn, Cho,
Kwak, CVPR 2019): positive parts are added over scales and flips, and each class is divided by its maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from classlens.errors import ClasslensError, ModelError
from classlens.evaluate.scene import maps_of
from classlens.models.network import Network


def seeds(
    network: Network, image: Tensor, targets: Sequence[int], method: str, scales: Sequence[float] = (1.0,),
    flip: bool = True, seed: int = 0,
) -> Tensor:  # fmt: skip
    """(K,H,W) in [0,1]: how strongly each class is seen in an input (3,H,W); a class without positive values is 0."""
    size, asked = image.shape[1:], torch.tensor([list(targets)])
    summed = torch.zeros(len(targets), *size)
    for scale in scales:
        scaled = image[None] if scale == 1 else F.interpolate(image[None], size=_sides(size, scale), mode="bilinear")
        for mirrored in (False, True) if flip else (False,):
            shown = scaled.flip(-1) if mirrored else scaled
            try:
                tape = network.record(shown)
            except ClasslensError as error:
                if scale == 1:
                    raise
                raise ModelError(
                    f"{network.loaded.name} takes pictures of one size only: leave out --scales"
                ) from error
            maps = maps_of(network, tape, asked.to(tape.logits.device), method, seed)[0].float().clamp(min=0)
            maps = F.interpolate(maps[None], size=size, mode="bilinear")[0]
            summed += maps.flip(-1) if mirrored else maps
    return summed / summed.amax((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def _sides(size: Sequence[int], scale: float) -> tuple[int, int]:
    return round(size[0] * scale), round(size[1] * scale)
