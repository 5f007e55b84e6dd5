"""Trains multi-label classifiers, with or without masks, and segmentation heads; resumable, on CPU or GPU.

>>> from classlens.training import Choices, train_multilabel
>>> train_multilabel(Choices(data="data/voc", layout="voc", freeze=True), "runs/voc")
"""

from classlens.training.data import LAYOUTS, Data, open_data
from classlens.training.loop import SCHEDULES, Epoch, Recipe, TrainingError
from classlens.training.multilabel import Choices, Trained, train_multilabel
from classlens.training.segmentation import DenseChoices, train_segmentation

__all__ = [
    "LAYOUTS", "SCHEDULES", "Choices", "Data", "DenseChoices", "Epoch", "Recipe", "Trained", "TrainingError",
    "open_data", "train_multilabel", "train_segmentation",
]  # fmt: skip
