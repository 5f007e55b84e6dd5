"""Other inputs of a network besides the image: baselines, blurred copies, seeded noise; and runs on them.

Every image of a batch gets the same noise, drawn from a separate generator: a result depends neither on the batch nor
on the global random state, and does not change that state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from classlens.core.capture import GradientsStayOn, Reading, outputs_at
from classlens.core.capture.backward import gradients
from classlens.errors import MethodError
from classlens.methods.places import filtered_along, shortest_side
from classlens.methods.registry import Case

Baseline = str | float | Tensor


def logits_at(case: Case, points: Tensor) -> Tensor:
    """The logits (N,classes) at other inputs (N,C,H,W), with gradients if the caller enabled them."""
    refuse_one_pass(case)
    with GradientsStayOn(case.tape.obeys):  # some networks write into their input
        return outputs_at(case.model, points.clone(), case.output, case.tape)


def refuse_one_pass(case: Case) -> None:
    """Refuse to run the network on other images if the target means something on this image alone."""
    if isinstance(case.output, Reading) and case.output.one_pass:
        raise MethodError(
            "this detector chooses its candidates from the image, so this box has no counterpart on the other images "
            "that the method runs; use a method with one forward pass, such as agf, lrp or gradcam"
        )


def gradients_at(case: Case, points: Tensor) -> Tensor:
    """Gradients (K,B,C,H,W) of the K target scores at one point for each image: one forward pass, K backward passes.

    Their dtype is suitable for summing.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = points.detach().clone().requires_grad_()
        logits = logits_at(case, leaf)
        starts = case.directions(logits)
        case.tape.check_gradients()
        with case.tape.differentiating():
            found = [
                gradients([logits], [leaf], [start], case.tape.odd, retain_graph=k + 1 < len(starts))[0]
                for k, start in enumerate(starts)
            ]
    return torch.stack(found).to(precise(points))


def precise(images: Tensor) -> torch.dtype:
    """The dtype for sums: that of the network, but at least float32."""
    return torch.promote_types(images.dtype, torch.float32)


def asked(case: Case, logits: Tensor) -> Tensor:
    """The target scores (B,K), float64 on the CPU: some devices have no float64."""
    return case.scores(logits.detach()).cpu().double()


# ------------------------------------------------------------------------------------------------------- randomness


def generator(seed: int) -> torch.Generator:
    """A generator on the CPU, so that a seed gives the same numbers on every device."""
    whole(0, seed=seed)
    return torch.Generator().manual_seed(seed)


def normal_noise(images: Tensor, source: torch.Generator) -> Tensor:
    """(1,C,H,W) standard normal noise, the same for each image of the batch."""
    return torch.randn(images.shape[1:], generator=source)[None].to(images)


# --------------------------------------------------------------------------------------------------------- pictures


def gaussian_blur(pictures: Tensor, sigma: float) -> Tensor:
    """(B,C,*size) smoothed by a Gaussian of `sigma` pixels; the border is replicated."""
    if sigma <= 0:
        return pictures
    radius = math.ceil(3 * sigma)
    places = torch.arange(-radius, radius + 1, dtype=torch.float64)
    return filtered(pictures, torch.softmax(-(places**2) / (2 * sigma**2), 0).to(pictures), "replicate")


def filtered(pictures: Tensor, kernel: Tensor, border: str) -> Tensor:
    """(B,C,*size) filtered by an odd `kernel` along each axis; `border` is a mode of `torch.nn.functional.pad`.

    >>> filtered(pictures, torch.tensor([0.25, 0.5, 0.25]), "reflect")
    """
    return filtered_along(pictures, [kernel] * (pictures.dim() - 2), border)


def _sides(images: Tensor) -> tuple[int, ...]:
    return tuple(range(2, images.dim()))


def _zero(images: Tensor, _: int) -> Tensor:
    return torch.zeros_like(images)


def _dark(images: Tensor, _: int) -> Tensor:
    return images.amin(_sides(images), keepdim=True).expand_as(images)


def _blur(images: Tensor, _: int) -> Tensor:
    return gaussian_blur(images, shortest_side(images) / 8)


def _noise(images: Tensor, seed: int) -> Tensor:
    low, high = images.amin(_sides(images), keepdim=True), images.amax(_sides(images), keepdim=True)
    return low + (high - low) * torch.rand(images.shape[1:], generator=generator(seed)).to(images)


_BASELINES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "zero": _zero,  # 0 in the network's units: the mean colour with the usual preprocessing
    "dark": _dark,  # each colour at the darkest value of the image; black is unknown here
    "blur": _blur,  # the image without its details
    "noise": _noise,  # uniform noise over the image's range of each colour
}


def baseline(images: Tensor, which: Baseline, seed: int = 0) -> Tensor:
    """The input (B,C,H,W) that represents "nothing": from a name, a number, or a tensor that broadcasts."""
    images = images.detach()
    if isinstance(which, str):
        if which not in _BASELINES:
            raise MethodError(
                f"there is no baseline {which!r}; choose one of {', '.join(_BASELINES)}, a number or a tensor"
            )
        return _BASELINES[which](images, seed)
    try:
        return torch.as_tensor(which).detach().to(images).expand_as(images)
    except RuntimeError:
        shape = tuple(torch.as_tensor(which).shape)
        raise MethodError(f"a baseline of shape {shape} does not fit images {tuple(images.shape)}") from None


def baselines(images: Tensor, which: str | Sequence[Baseline], seed: int = 0) -> list[Tensor]:
    """Several baselines: "zero+dark+blur+noise", or a sequence of names, numbers and tensors."""
    parts = which.split("+") if isinstance(which, str) else list(which)
    if not parts:
        raise MethodError("no baseline was given; give at least one")
    return [baseline(images, part.strip() if isinstance(part, str) else part, seed) for part in parts]


def whole(least: int, **numbers: int) -> None:
    """Refuse options such as `steps=0`, by name."""
    for name, number in numbers.items():
        if not isinstance(number, int) or number < least:
            raise MethodError(f"{name}={number!r} is not possible; give an integer from {least}")


def above_zero(**numbers: float) -> None:
    """Refuse options such as `sigma=0`, by name."""
    for name, number in numbers.items():
        if not isinstance(number, int | float) or not number > 0:
            raise MethodError(f"{name}={number!r} is not possible; give a number above 0")
