from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

if str(HERE) not in sys.path:  # for `tagged`, and for load("tagged:make_cheat")
    sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain/, classes/ and masked/ of the same twelve pictures."""
    from tagged import draw_world

    return draw_world(tmp_path_factory.mktemp("tagged"))
