"""Maps as masks in the COCO format, for annotation tools and pycocotools.

>>> write_coco("export", [classlens.explain(m, path, classlens.top(2)) for path in photos])
PosixPath('export/labels.json')

The folder holds the pictures as the network sees them (data/), the masks in their coordinates (labels.json), and the
raw maps (maps.npz): a mask fits its picture, whatever the preprocessing has cut off.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classlens import render
from classlens.errors import ClasslensError
from classlens.explanation import Explanation
from classlens.files import write_bytes, write_json

Mask = NDArray[np.bool_]


def strongest_part(evidence: Any, share: float = 0.5) -> Mask:
    """The smallest part of a map (H,W) that holds this share of its positive evidence.

    >>> strongest_part(np.array([[5.0, 3.0, 2.0, -9.0]]), share=0.75)
    array([[ True,  True, False, False]])
    """
    if not 0 < share <= 1:
        raise ClasslensError(f"share={share}: a mask holds a share of the evidence between 0 and 1")
    values = np.maximum(np.asarray(evidence, dtype=np.float64), 0)
    if not np.isfinite(values).all():
        raise ClasslensError("the map holds NaN or infinite values and has no mask; try float32 or another method")
    order = np.argsort(-values, axis=None, kind="stable")
    sums = np.cumsum(values.flat[order])
    mask = np.zeros(values.size, bool)
    if sums[-1] > 0:
        mask[order[: 1 + np.searchsorted(sums, share * sums[-1] * (1 - 1e-12))]] = True
    return mask.reshape(values.shape) & (values > 0)


def run_lengths(mask: Mask) -> dict[str, list[int]]:
    """A mask in COCO's uncompressed run-length encoding: lengths of runs down the columns, the first one of zeros.

    >>> run_lengths(np.array([[False, True], [True, True]]))
    {'size': [2, 2], 'counts': [1, 3]}
    """
    flat = mask.flatten(order="F").astype(np.int8)
    edges = np.flatnonzero(np.diff(flat, prepend=0)) if flat.size else np.array([], int)
    counts = np.diff([0, *edges, flat.size]).tolist()
    return {"size": list(mask.shape), "counts": counts}


def box_of(mask: Mask) -> list[float]:
    """The box around a mask: left, top, width, height."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    left, top = int(columns[0]), int(rows[0])
    return [float(left), float(top), float(columns[-1] - left + 1), float(rows[-1] - top + 1)]


def write_coco(
    folder: str | os.PathLike[str], explanations: Explanation | Iterable[Explanation], share: float = 0.5
) -> Path:
    """Write pictures, masks and maps of explanations of one network to a folder; returns the path of labels.json.

    A mask is the smallest part that holds `share` of the evidence for its class; a map without any has no mask.
    """
    where, images, annotations = Path(folder), list[dict[str, Any]](), list[dict[str, Any]]()
    maps: dict[str, Any] = {}
    categories: dict[int | str, tuple[int, str]] = {}  # by index: two classes may have the same name
    for explanation, row in _rows([explanations] if isinstance(explanations, Explanation) else explanations):
        image, (height, width) = len(images) + 1, explanation.maps.shape[-2:]
        name = f"{image:06d}.png"
        render.write_png(where / "data" / name, render.pixels_of(explanation.pictures[row]))
        images.append({"id": image, "file_name": name, "width": width, "height": height})
        for k, index in enumerate(explanation.targets[row].tolist()):
            label = explanation.name(row, k)
            category, _ = categories.setdefault(index if index >= 0 else label, (len(categories) + 1, label))
            maps[f"{image:06d}-{category}"] = explanation.maps[row, k].float().cpu().numpy()
            mask = strongest_part(explanation.maps[row, k].cpu(), share)
            if mask.any():
                about = {"id": len(annotations) + 1, "image_id": image, "category_id": category}
                annotations.append(about | outline(mask) | _score(explanation.probability(row, k)))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **maps)
    write_bytes(where / "maps.npz", buffer.getvalue())
    named = [{"id": number, "name": label, "supercategory": ""} for number, label in categories.values()]
    labels = {"info": {"description": "masks of evidence maps by classlens"}, "licenses": [], "categories": named}
    return write_json(where / "labels.json", labels | {"images": images, "annotations": annotations})


def _rows(explanations: Iterable[Explanation]) -> Iterator[tuple[Explanation, int]]:
    found = False
    for explanation in explanations:
        if explanation.maps.dim() != 4:
            raise ClasslensError("masks of volumes are not exported: COCO knows pictures only")
        for row in range(len(explanation.maps)):
            found = True
            yield explanation, row
    if not found:
        raise ClasslensError("there is no explanation to export: give at least one")


def _score(probability: float) -> dict[str, float]:
    return {} if np.isnan(probability) else {"score": probability}  # a question that is no class has none


def outline(mask: Mask) -> dict[str, Any]:
    """The fields of an annotation that say where a mask (with at least one pixel) lies."""
    return {"segmentation": run_lengths(mask), "bbox": box_of(mask), "area": float(mask.sum()), "iscrowd": 0}
