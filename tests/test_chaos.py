"""A small part of `make chaos`: one round of attacks that take a few seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parents[1] / "tools" / "chaos"


@pytest.mark.parametrize("attack", ["the page", "disk full: evaluate", "bank building", "kills the process"])
def test_nothing_is_silently_wrong(attack: str) -> None:
    command = [sys.executable, str(CHAOS), "--seconds", "0", "--only", attack]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (row,) = [line for line in done.stdout.splitlines() if attack in line]
    assert int(row.split("|")[2]) >= 1
