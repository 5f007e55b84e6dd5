"""IDSDS: the sums of a map in sixteen patches should rank how far the logit falls without each patch.

In-domain single deletion score of Hesse, Schaub-Meyer and Roth (NeurIPS 2024). The image is cut into 4x4 patches. Each
is deleted on its own: set to 0 in the normalised input. The score of an image is the Spearman correlation of the map's
sums in the patches with the falls of the labelled class's logit.

A network usually has never seen an image with a hole, so its answer may be about the hole. Here it should be trained on
images with single deleted patches first:

    classlens train multilabel --data photos/ --layout folders --delete-patches --out runs/deleted
    classlens evaluate idsds --data folders:photos/ --model runs/deleted --methods agf,gradcam,random --out runs/idsds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from classlens.errors import DataError
from classlens.evaluate.metrics import Metric, floats, mean
from classlens.evaluate.registry import Classes, Config, NoOptions, Subject, Test, Values, register
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.tests.sanity import rank_correlation
from classlens.models.network import images_per_forward

SIDE = 4  # patches along each side


def patch(number: int, height: int, width: int) -> tuple[slice, slice]:
    """The rows and columns of one of the sixteen patches, counted row by row.

    >>> patch(6, 224, 224)
    (slice(56, 112, None), slice(112, 168, None))
    """
    row, column = divmod(number, SIDE)
    return _part(row, height), _part(column, width)


def without(images: Tensor, number: int) -> Tensor:
    """Normalised images (...,H,W) with one patch set to 0, the mean colour."""
    changed = images.clone()
    changed[(..., *patch(number, *images.shape[-2:]))] = 0
    return changed


def sums(maps: Tensor) -> Tensor:
    """Maps (B,H,W) -> their sums in the patches (B,16)."""
    parts = [maps[(..., *patch(number, *maps.shape[-2:]))] for number in range(SIDE**2)]
    return torch.stack([part.double().sum((1, 2)) for part in parts], 1)


def falls(scene: Scene, classes: Tensor) -> Tensor:
    """(B,16): how far the logit of a class (B,) falls without each patch."""
    images = scene.network.placed(scene.images)
    at_once = images_per_forward(scene.tape, None)
    clean = _of(scene.tape.logits.detach(), classes)
    left = [
        torch.cat([scene.forward(part) for part in without(images, number).split(at_once)]) for number in range(SIDE**2)
    ]
    return torch.stack([clean - _of(logits, classes) for logits in left], 1)


def _part(index: int, size: int) -> slice:
    return slice(index * size // SIDE, (index + 1) * size // SIDE)


def _of(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.double().cpu().gather(1, classes.cpu()[:, None])[:, 0]


# ---------------------------------------------------------------------------------------------------------- the test


def _variants(options: NoOptions, subject: Subject) -> list[Values]:
    if "classes" in subject.offers and all(subject.label(item) is None for item in subject.dataset.items):
        raise DataError(f"idsds needs labels that are classes of the model, and {subject.dataset.name} has none")
    return [{}]


def _classes(scene: Scene, config: Config) -> Mapping[str, Classes]:
    return {"label": torch.tensor([seen.label for seen in scene.seen if seen.label is not None])}


def _score(scene: Scene, config: Config, found: Mapping[str, Explained]) -> Iterator[tuple[str, list[Values]]]:
    fallen = falls(scene, scene.asked.targets[:, scene.asked.columns["label"]])
    for method, maps in found.items():
        evidence = sums(maps.of("label"))
        values = {
            "explained": maps.explained("label"),
            "correlation": rank_correlation(evidence, fallen).tolist(),
            "sums": evidence.tolist(),
            "falls": fallen.tolist(),
        }
        yield method, [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


register(
    Test(
        name="idsds",
        question="do the sums of a map in sixteen patches rank how far the logit falls without each?",
        columns={"explained": "int32", "correlation": "float64", "sums": "list<float64>", "falls": "list<float64>"},
        metrics=lambda config: (
            Metric("rank correlation", +1, lambda rows: mean(floats(rows, "correlation")), scale=1),
        ),
        title=lambda config: "IDSDS",
        remark=lambda config: (
            "Spearman correlation of the map's sums in 4x4 patches with the fall of the labelled class's logit when a "
            "patch is deleted. 1 is the same order, 0 none; a map without any order counts as 0. It is meant for a "
            "network that was trained with --delete-patches: to another one, an image with a hole is foreign."
        ),
        needs=frozenset({"classes", "labels"}),
        variants=_variants,
        constants={"patches": SIDE**2},
        classes=_classes,
        score_together=_score,
        picture_score=lambda rows: (1 + floats(rows, "correlation")) / 2,
        picture_score_name="how well the map ranks the patches",
        place=11,
    )
)
