"""A small world for training: coloured squares, one to three a picture, and a network that can learn the colours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

if str(HERE) not in sys.path:  # for `squares`, and for load("squares:net")
    sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGImages, SegmentationClass, ImageSets and labels.txt: 24 pictures to train, 12 to validate with."""
    from squares import draw_voc

    return draw_voc(tmp_path_factory.mktemp("squares"))
