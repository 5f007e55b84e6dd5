"""A small world: pictures of one coloured square on grey, and a network that knows the colours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[2] / "shared"

if str(HERE) not in sys.path:  # for `world`, and for load("world:make")
    sys.path.insert(0, str(HERE))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: starts a Ray cluster on this machine; half a minute")


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each class: red, green, blue; eight pictures each."""
    from world import draw_world

    return draw_world(tmp_path_factory.mktemp("world")) / "classes"


@pytest.fixture(scope="session")
def masked(labelled: Path) -> Path:
    """The same pictures as images/ with masks/."""
    return labelled.parent / "masked"


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the shared data are not at hand")
    return SHARED
