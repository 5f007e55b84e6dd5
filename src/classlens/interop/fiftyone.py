"""Maps and masks as fields of a FiftyOne data set, to browse and filter in its App.

>>> photos = fiftyone.Dataset.from_images_dir("photos")
>>> add_maps(photos, classlens.load(), classlens.top(2))       # evidence_1, evidence_1_mask, evidence_2, ...
>>> fiftyone.launch_app(photos)

A map lies on the whole file, also if the network saw only its centre: FiftyOne enlarges it to the size of the picture.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from classlens.data.images import open_image
from classlens.errors import ClasslensError
from classlens.explanation import Explanation, explain
from classlens.interop.coco import strongest_part
from classlens.models.loaded import LoadedModel


def add_maps(
    samples: Any, model: LoadedModel, targets: Any = None, *, field: str = "evidence", share: float = 0.5, **how: Any
) -> None:
    """Explain every picture of a FiftyOne data set or view, and store the maps in its samples.

    The map of the k-th target is the `Heatmap` `{field}_{k}`, raw and signed, with the class as its `label` and the
    probability as its `confidence`. `{field}_{k}_mask` is a `Segmentation`: the smallest part that holds `share` of the
    evidence for the class, with class i as i + 1 and 0 elsewhere. `how` is passed to `classlens.explain`.

    Samples are saved as they are done. To go on after an interruption, pass those without a map:

    >>> add_maps(photos.exists("evidence_1", False), model, classlens.top(2))
    """
    fiftyone = _fiftyone()
    if not isinstance(model, LoadedModel):
        raise ClasslensError(
            "the maps are placed on files, so the preprocessing must be known: give a model of classlens.load, or "
            'LoadedModel("mine", model, Preprocess(...), labels)'
        )
    names: dict[str, dict[int, str]] = {}
    dataset = None  # of a view too; the view itself may be empty afterwards
    for sample in samples.iter_samples(progress=True, autosave=True):
        dataset, picture = sample.dataset, open_image(sample.filepath)
        found = explain(model, picture, targets, **how)
        whole = model.preprocess.unframe(found.maps[0].float().cpu(), picture.height, picture.width).numpy()
        for k, evidence in enumerate(whole):
            name, value = f"{field}_{k + 1}", _value(found, k)
            about = _about(found, k)
            sample[name] = fiftyone.Heatmap(map=evidence, range=_range(evidence, found.signed), **about)
            sample[f"{name}_mask"] = fiftyone.Segmentation(mask=_mask(evidence, share, value), **about)
            names.setdefault(f"{name}_mask", {})[value] = about["label"]
    if dataset is None:
        raise ClasslensError("there is no picture to explain: the data set or view is empty")
    _declare(dataset, names)


def _declare(dataset: Any, names: dict[str, dict[int, str]]) -> None:
    """Name the values of the masks, and make labels and confidences known, so that the App can filter by them."""
    targets = dataset.mask_targets
    dataset.mask_targets = targets | {field: targets.get(field, {}) | found for field, found in names.items()}
    dataset.add_dynamic_sample_fields([*names, *(field.removesuffix("_mask") for field in names)])


def _value(found: Explanation, k: int) -> int:
    """The value of a mask: after 0 come the classes, then questions that are not classes."""
    index = int(found.targets[0, k])
    return index + 1 if index >= 0 else found.logits.shape[1] + 1 + k


def _about(found: Explanation, k: int) -> dict[str, Any]:
    probability = found.probability(0, k)
    named: dict[str, Any] = {"label": found.name(0, k), "method": found.method}
    return named if np.isnan(probability) else named | {"confidence": probability}


def _range(evidence: Any, signed: bool) -> list[float]:
    """The values between which the App spreads its colours: 0 is in the middle of a signed map."""
    largest = float(np.abs(evidence).max()) or 1.0
    return [-largest if signed else 0.0, largest]


def _mask(evidence: Any, share: float, value: int) -> Any:
    return strongest_part(evidence, share).astype(np.min_scalar_type(value)) * np.min_scalar_type(value).type(value)


def _fiftyone() -> Any:
    try:
        import fiftyone
    except ImportError:
        raise ClasslensError("FiftyOne is not installed: pip install fiftyone") from None
    return fiftyone
