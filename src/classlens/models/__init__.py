"""Networks by name: `load("efficientnet-lite0")` gives the model, its preprocessing and its labels."""

from classlens.models.cards import write_card
from classlens.models.choice import Choice
from classlens.models.loaded import LoadedModel
from classlens.models.loading import DEFAULT, KINDS, MODELS, load
from classlens.models.preprocess import Preprocess
from classlens.models.scans import ScanPreprocess
from classlens.models.sources import ModelInfo

__all__ = [
    "DEFAULT", "KINDS", "MODELS", "Choice", "LoadedModel", "ModelInfo", "Preprocess", "ScanPreprocess", "load",
    "write_card",
]  # fmt: skip
