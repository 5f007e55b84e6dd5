from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def masked(sortable: Path) -> Path:
    """Here the pictures are those that a network sorts."""
    return sortable


@pytest.fixture(scope="session")
def pictures(masked: Path) -> Path:
    return masked / "images"
