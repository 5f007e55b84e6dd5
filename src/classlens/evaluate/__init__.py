"""How good are the maps? `TESTS` measure it over a data set; resumable, here or on a cluster.

>>> from classlens.evaluate import Settings, run
>>> report = run(Settings(tests=("pointing",), data=("data/val",), methods=("agf", "gradcam")), "runs/first")
"""

from classlens.data.layouts import Dataset, open_dataset
from classlens.errors import DataError
from classlens.evaluate import tests  # noqa: F401 - fills TESTS
from classlens.evaluate.registry import TESTS, SettingsError
from classlens.evaluate.report import Report
from classlens.evaluate.runner import run
from classlens.evaluate.settings import Settings, options_of_tests

__all__ = [
    "TESTS", "DataError", "Dataset", "Report", "Settings", "SettingsError", "open_dataset", "options_of_tests", "run",
]  # fmt: skip
