"""What is judged: one map of one image, with the network that it explains and the way to explain it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classlens.core.capture import Picker, Tape, home, logits_of, record
from classlens.core.targets import RIVALS, Asked, Class, Contrast, Number, Target
from classlens.errors import ClasslensError, MethodError
from classlens.explanation import Call, Explanation, prepare, run
from classlens.methods import resolve
from classlens.report.measure import Floats

# Between the logits of the explanation and now, relative: a batch and a single image round differently, and a network
# in half precision is explained in float32.
_SAME, _SAME_IN_HALF = 1e-3, 5e-2
_AT_ONCE = 8  # images of one forward pass
_AFFINE = 1e-2  # of the range of the input: the largest error of a picture that is turned back into an input


@dataclass(frozen=True, eq=False)
class Subject:
    """A map to judge. The functions are given, so that any map of any origin can be judged in the same way."""

    image: Tensor  # (1,3,H,W), the network's input
    picture: Tensor  # (1,3,H,W) in [0,1]
    evidence: Floats  # (H,W), signed
    network: nn.Module
    output: Picker
    scores: Callable[[Tensor], Floats]  # images -> how much of the target the network finds in each
    explain: Callable[[nn.Module, Tensor], Floats]  # (network, images) -> maps (n,H,W) by the same method and target
    other: Callable[[str], Floats]  # a map of the image by another method
    family: str  # of the method
    conservation: float  # NaN for methods that do not propagate relevance
    arrived: float

    def to_input(self, pictures: Tensor) -> Tensor:
        """Pictures (n,3,H,W) in [0,1] -> network inputs, by the same scaling as of the image."""
        scale, shift = _scaling(self.picture, self.image)
        return pictures.to(self.image) * scale + shift


def subject_of(explanation: Explanation, row: int = 0, k: int = 0) -> Subject:
    """The subject of one map of an explanation; refuses what cannot be judged."""
    call = _checked(explanation, row, k)
    network, image, loaded = prepare(call.model, call.images[row : row + 1].detach())
    target, method = explanation.target(row, k), explanation.method
    half = home(network, image)[1].itemsize < 4
    _refuse_changes(_forward(network, image, call)[0], explanation.logits[row], _SAME_IN_HALF if half else _SAME)
    tape: list[Tape] = []  # recorded when the first other method needs it

    def maps(module: nn.Module, images: Tensor, name: str, recorded: Tape | None, options: Any) -> Floats:
        # An altered copy has the same preprocessing and labels.
        model = module if loaded is None else replace(loaded, model=module)
        targets, rivals = _asked_again(target, len(images))
        asked = {"rather_than": rivals, "output": call.output, "multilabel": explanation.multilabel}
        _, result = run(model, images, targets, name, recorded=recorded, **asked, **options)
        if not torch.isfinite(result.maps).all():
            raise MethodError(f"the map by {name} holds NaN or infinite values")
        found: Floats = result.maps[:, 0].detach().double().cpu().numpy()
        return found

    def other(name: str) -> Floats:
        if not tape:
            tape.append(record(network, image, call.output))
        (found,) = maps(network, image, name, tape[0], {})
        return np.asarray(found, np.float64)

    return Subject(
        image=image,
        picture=explanation.pictures[row : row + 1].to(image),
        evidence=explanation.maps[row, k].double().cpu().numpy(),
        network=network,
        output=call.output,
        scores=lambda images: _scores(_forward(network, images, call), target, explanation.multilabel),
        explain=lambda module, images: maps(module, images, method, None, call.options),
        other=other,
        family=resolve(method)[0].family,
        conservation=float(explanation.report.conservation[row, k]),
        arrived=float(explanation.report.arrived_share[row, k]),
    )


# ------------------------------------------------------------------------------------------------------- refusals


def _checked(explanation: Explanation, row: int, k: int) -> Call:
    rows, classes = explanation.targets.shape
    if not (0 <= row < rows and 0 <= k < classes):
        raise ClasslensError(f"there is no map {k} of image {row}: the explanation has {rows} x {classes} maps")
    if explanation.call is None or type(explanation) is not Explanation:  # a contrast with a neighbour is its own kind
        raise ClasslensError("only maps made by classlens.explain can be judged; explain the image with it")
    if explanation.maps.dim() != 4:
        raise ClasslensError("trust judges maps of pictures, not of volumes; use classlens evaluate for many volumes")
    if explanation.call.images.shape[1] != 3:
        raise ClasslensError("trust changes pictures as a camera would, so it needs inputs with three channels")
    if isinstance(explanation.target(row, k), Asked):
        raise ClasslensError(
            f"trust judges maps of classes; {explanation.name(row, k)!r} is bound to this very picture, which trust "
            "shifts and flips"
        )
    return explanation.call


def _refuse_changes(now: Tensor, then: Tensor, tolerance: float) -> None:
    """Refuse a network or an image that is no longer what was explained: the verdict would be about another map."""
    then = then.detach().double().cpu()
    size = max(float(then.abs().max()), 1e-12)
    if now.shape != then.shape or float((now - then).abs().max()) > tolerance * size:
        raise ClasslensError("the network or the image has changed since it was explained; explain it again")


# ------------------------------------------------------------------------------------------------ running it again


@torch.no_grad()
def _forward(network: nn.Module, images: Tensor, call: Call) -> Tensor:
    """(n,C) float64 on the CPU."""
    device, dtype = home(network, images)
    parts = [logits_of(network, part.to(device, dtype), call.output) for part in images.split(_AT_ONCE)]
    return torch.cat(parts).double().cpu()


def _scores(logits: Tensor, target: Target, multilabel: bool) -> Floats:
    """The target's value at each image; the logit of a class less the mean of all, which softmax ignores."""
    found = torch.stack([target.value(row) for row in logits])
    if isinstance(target, Class) and not multilabel and logits.shape[1] > 1:
        found = found - logits.mean(1)
    return np.asarray(found.numpy(), np.float64)


def _asked_again(target: Target, images: int) -> tuple[Any, Any]:
    """The target as arguments of `explain`: targets and rather_than."""
    if isinstance(target, Class):
        return [[target.index]] * images, None
    if isinstance(target, Contrast):
        return [[target.index]] * images, RIVALS if target.rivals is None else list(target.rivals)
    if isinstance(target, Number):
        return target.function, None
    raise ClasslensError(f"trust cannot ask for a {type(target).__name__} again")


def _scaling(picture: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift (1,3,1,1) with image = scale * picture + shift, fitted for each channel."""
    x, y = picture.double().flatten(2), image.double().flatten(2)
    x0, y0 = x.mean(2, keepdim=True), y.mean(2, keepdim=True)
    varies = ((x - x0) ** 2).sum(2, keepdim=True)
    slope = ((x - x0) * (y - y0)).sum(2, keepdim=True) / varies.clamp(min=1e-12)
    known = varies > 1e-9  # a channel of one colour takes the scale of the others
    usual = slope[known].mean() if known.any() else slope.new_tensor(1.0)
    slope = torch.where(known, slope, usual)
    wrong = float((slope * (x - x0) + y0 - y).abs().max())
    if wrong > _AFFINE * max(float(y.max() - y.min()), 1e-12):
        raise ClasslensError("the picture does not determine the network's input; give preprocess= a Preprocess")
    return slope[..., None].to(image), (y0 - slope * x0)[..., None].to(image)
