"""Small worlds that several rooms share: pictures drawn once a run, and networks that know what is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from classlens.machine import avoid_amx

pytest_plugins = ["skips"]

avoid_amx()  # before the first convolution; processes that tests start inherit it
# Two busy threads a process are slower than one on a shared machine, and the tests' tensors are small.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # and for processes that tests start


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers each time, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each class: red, green, blue; eight pictures each, of one coloured square on grey."""
    from world import draw_world

    return draw_world(tmp_path_factory.mktemp("world")) / "classes"


@pytest.fixture(scope="session")
def masked(labelled: Path) -> Path:
    """The same pictures as images/ with masks/."""
    return labelled.parent / "masked"


@pytest.fixture(scope="session")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGImages, SegmentationClass, ImageSets and labels.txt: 24 pictures to train, 12 to validate with."""
    from squares import draw_voc

    return draw_voc(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain/, classes/ and masked/ of the same twelve pictures, some with a tag that gives the class away."""
    from tagged import draw_world

    return draw_world(tmp_path_factory.mktemp("tagged"))


@pytest.fixture(scope="session")
def sortable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """images/ and masks/, nine pictures, for a network that sorts them."""
    from sorting import draw

    return draw(tmp_path_factory.mktemp("sortable"))
