"""The colours of tests/worlds/world.py, in a network that a white picture kills, as a decoder with a bug would."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import world
from torch import Tensor

from classlens.models import LoadedModel


class Deadly(world.Colours):
    """Dies of a picture that is all white."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) and x.flatten(1).amin(1).max() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def make() -> LoadedModel:
    """For load("deadly:make")."""
    return replace(world.make(), model=Deadly().eval())
