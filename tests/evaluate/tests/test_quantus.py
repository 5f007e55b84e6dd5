from __future__ import annotations

from pathlib import Path

import pytest

from classlens.evaluate import Settings, options_of_tests, run
from classlens.evaluate.store import Store
from classlens.evaluate.tests.quantus import JUDGES


def test_quantus_judges_the_maps_of_a_run(masked: Path, tmp_path: Path) -> None:
    """All metrics are there, and those whose order is obvious have it: one map lies on the square, one does not."""
    settings = Settings(
        tests=("quantus",), data=(str(masked),), methods=("gradient-x-input", "centre"), model="world:make",
        options=options_of_tests(quantus_images=1), limit=3,
    )  # fmt: skip
    (table,) = run(settings, tmp_path).tables
    assert [metric.name for metric in table.metrics] == list(JUDGES)
    rows = {row["method"]: row for row in Store(tmp_path).read("quantus").to_pylist()}
    assert len(rows) == 2
    for row in rows.values():
        assert all(row[name.replace(" ", "_")] is not None for name in JUDGES)
    assert rows["gradient-x-input"]["mass_accuracy"] > rows["centre"]["mass_accuracy"]
    assert rows["gradient-x-input"]["sparseness"] > rows["centre"]["sparseness"]


def test_it_is_told_if_quantus_is_missing(masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from classlens.errors import DataError

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="Quantus is not installed: pip install quantus"):
        run(Settings(tests=("quantus",), data=(str(masked),), methods=("centre",), model="world:make"), tmp_path)
