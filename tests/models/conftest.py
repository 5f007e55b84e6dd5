"""What several tests of models share."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
