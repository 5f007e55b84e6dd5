"""How good are the maps? Perturbation, segmentation, class specificity, sanity; resumable, here or on a cluster.

>>> from classlens.evaluate import Settings, run
>>> report = run(Settings(tests=("pointing",), data=("data/val",), methods=("agf", "gradcam")), "runs/first")
"""

from classlens.data.layouts import Dataset, open_dataset
from classlens.errors import DataError
from classlens.evaluate.report import Report
from classlens.evaluate.run import run
from classlens.evaluate.settings import TESTS, Settings, SettingsError

__all__ = [
    "TESTS", "DataError", "Dataset", "Report", "Settings", "SettingsError", "open_dataset", "run",
]  # fmt: skip
