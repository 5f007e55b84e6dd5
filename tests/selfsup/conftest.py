"""Small pictures, and a network that sorts them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

if str(HERE) not in sys.path:  # for `sorting`, and for load("sorting:net")
    sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """images/ and masks/, nine pictures."""
    from sorting import draw

    return draw(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="session")
def pictures(masked: Path) -> Path:
    return masked / "images"
