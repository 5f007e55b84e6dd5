"""Pseudo-labels: masks of classes made from maps, to train a segmentation network without drawn masks.

>>> from classlens.masks import make_masks
>>> make_masks(load("runs/voc"), "photos/", "pseudo", classes=["cat", "dog"]).folder
"""

from classlens.masks.run import Made, make_masks

__all__ = ["Made", "make_masks"]
