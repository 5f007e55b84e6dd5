"""Every method as a captum class: `AGF(model).attribute(images, target=281)`.

    >>> from classlens.interop.captum import AGF, GradCAM, LRPEpsilonPlusFlat
    >>> AGF(model).attribute(images, target=281)                                        # (B,C,H,W), like the images
    >>> NoiseTunnel(AGF(model)).attribute(images, target=281, nt_samples=8, stdevs=0.1)
    >>> sensitivity_max(AGF(model).attribute, images, target=281)
    >>> visualize_image_attr(*image_attr(explanation), method="blended_heat_map", sign="all")

The classes are generated from `classlens.METHODS`: every registered method has a class here, "agf-release" is
`AGFRelease`. `dir(classlens.interop.captum)` lists them.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classlens.core.capture import Picker, pick_output
from classlens.core.rules.generic import divide
from classlens.core.targets import Targets
from classlens.errors import ImageError, MissingPackage, ModelError, TargetError
from classlens.explanation import Explanation, run
from classlens.methods import METHODS, check_options
from classlens.models.loaded import LoadedModel

try:
    from captum.attr import Attribution
    from captum.log import log_usage
except ImportError:
    raise MissingPackage("methods as captum classes need captum: pip install 'classlens[captum]'") from None

# Parts of method names that are not simply capitalised.
_SPELLED = {
    word.lower(): word
    for word in ("AB", "AGF", "BP", "CAM", "CLRP", "DeepLift", "FullGrad", "GradCAM", "LRP", "LayerCAM", "RAP", "RISE",
                 "SGLRP", "SHAP", "SmoothGrad")
}  # fmt: skip


class MethodAttribution(Attribution):  # type: ignore[misc]  # captum has no types
    """A method of classlens with captum's interface; the base class of `AGF`, `GradCAM` and the others.

    >>> agf = AGFRelease(model, without="A")        # pass options of the method here, or to `attribute`
    >>> agf.attribute(images, target=[281, 207])
    """

    method: ClassVar[str]

    def __init__(self, forward_func: nn.Module | LoadedModel, **options: Any) -> None:
        check_options(METHODS[self.method], options)
        super().__init__(forward_func.model if isinstance(forward_func, LoadedModel) else forward_func)
        self.options = options

    @log_usage()  # type: ignore[untyped-decorator]  # captum's own tools call what it wraps
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Attributions with the shape of the inputs (B,C,H,W), raw and signed.

        `target`, as in captum: an int; a tensor or list with one entry for each image; a tuple, or a list of tuples,
        for outputs with more dimensions (flattened, each output is a class of its own); None for a model with one
        output. Other targets of `explain` work too if they mean one class per image, such as a callable.

        A method that attributes to single channels (propagation, gradients) gives each channel its own share. For one
        map (activation maps, perturbation), every channel gets an equal part. Either way the sum over the channels
        is the map of `explain`, so captum's visualisations, which sum over channels, show it.
        """
        images = _single(inputs, additional_forward_args)
        output, targets = _captum_target(self.forward_func, images, target)
        _, result = run(self.forward_func, images, targets, self.method, output=output, **(self.options | options))
        if result.maps.shape[1] != 1:
            raise TargetError("captum explains one class for each image; for several classes use classlens.explain")
        shares = result.maps[:, :, None].expand(-1, -1, images.shape[1], -1, -1) / images.shape[1]
        attributions = (shares if result.colours is None else result.colours)[:, 0].detach().to(images)
        return (attributions,) if isinstance(inputs, tuple) else attributions


def class_name(method: str) -> str:
    """The name of a method's class.

    >>> class_name("agf-release"), class_name("gradcam"), class_name("integrated-gradients")
    ('AGFRelease', 'GradCAM', 'IntegratedGradients')
    """
    return "".join(_SPELLED.get(word, word.capitalize()) for word in method.split("-"))


def image_attr(explanation: Explanation, row: int = 0, k: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """A map (H,W,1) and its image (H,W,3), as captum's `visualize_image_attr` expects them.

    >>> visualize_image_attr(*image_attr(e), method="blended_heat_map", sign="all", show_colorbar=True)

    The map is divided by its largest magnitude, because captum treats values below 1e-5 as zero, and a logit spread
    over all pixels may be as small.
    """
    picture = explanation.pictures[row].detach().float().cpu().permute(1, 2, 0).numpy()
    values = explanation.maps[row, k].detach().double().cpu()
    return divide(values, values.abs().max()).float().numpy()[..., None], picture


def _single(inputs: Any, others: Any) -> Tensor:
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if len(tensors) != 1 or others is not None:
        raise ModelError("only models with one input, the images, can be explained; bind other arguments in a module")
    if not isinstance(tensors[0], Tensor):
        raise ImageError(f"the inputs must be a tensor (B,C,H,W), not a {type(tensors[0]).__name__}")
    return tensors[0]


def _captum_target(model: Any, images: Tensor, target: Any) -> tuple[Picker, Targets]:
    """How to read the model's output as (B,classes), and the class for each image."""
    if target is None:
        return _only_output, None
    if isinstance(target, Tensor) and target.numel() == 1:
        return None, int(target)
    if isinstance(target, tuple):
        target = [target] * len(images)
    if isinstance(target, list) and target and all(isinstance(t, tuple) for t in target):
        with torch.no_grad():
            shape = tuple(pick_output(model(images), None).shape[1:])
        return _flattened, [[_place(t, shape)] for t in target]
    # A list has one entry for each image, even for a single image; `explain` would read it as several classes.
    return None, [[t] for t in target] if isinstance(target, list) else target


def _only_output(result: Any) -> Tensor:
    logits = _flattened(result)
    if logits.shape[1] != 1:
        raise TargetError(f"the model has {logits.shape[1]} outputs: choose one with target=")
    return logits


def _flattened(result: Any) -> Tensor:
    logits = pick_output(result, None)
    return logits if logits.dim() == 2 else logits.reshape(len(logits), -1)


def _place(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The index of an output after flattening."""
    if len(index) != len(shape) or not all(0 <= i < size for i, size in zip(index, shape, strict=False)):
        raise TargetError(f"target {index} is outside the output, which has shape {shape} for each image")
    return sum(i * math.prod(shape[axis + 1 :]) for axis, i in enumerate(index))


_classes: dict[str, type[MethodAttribution]] = {}


def __getattr__(name: str) -> type[MethodAttribution]:
    if name not in _classes:
        method = next((method for method in METHODS if class_name(method) == name), None)
        if method is None:
            raise AttributeError(f"module {__name__!r} has no class {name!r}; it has {', '.join(_names())}")
        entry = METHODS[method]
        about = f"{entry.summary[0].upper()}{entry.summary[1:]}; {entry.paper}.\n\nOptions: {entry.options or 'none'}."
        _classes[name] = type(name, (MethodAttribution,), {"method": method, "__doc__": about, "__module__": __name__})
    return _classes[name]


def _names() -> list[str]:
    return [class_name(method) for method in METHODS]


def __dir__() -> list[str]:
    return sorted({*globals(), *_names()})
