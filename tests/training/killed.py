"""Train in children that are killed over and over, until one finishes. Started by test_multilabel.py.

The parent never computes anything, so that its children can be forked from it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "worlds"))

import matplotlib.figure  # noqa: F401  these two are imported late: once here, not in every child
import torch._dynamo  # noqa: F401

from classlens.training import Choices, Recipe, train_multilabel


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(count: int, after: bool) -> None:
    """Before or after the n-th file takes its place: weights, card, metrics, state, cached features alike."""
    seen = 0
    original = Path.replace

    def replace(source: Path, target: Path) -> Path:
        nonlocal seen
        seen += 1
        if seen == count and not after:
            die()
        done = original(source, target)
        if seen == count:
            die()
        return done

    Path.replace = replace  # type: ignore[method-assign]


def main() -> None:
    data, out, freeze = sys.argv[1], sys.argv[2], sys.argv[3] == "freeze"
    choices = Choices(data=data, layout="voc", backbone="squares:net", freeze=freeze, hidden=(10,))
    recipe = Recipe(epochs=4, batch_size=8, learning_rate=3e-3, patience=4)
    kills = 0
    for number in range(30):
        pid = os.fork()
        if pid == 0:
            import torch

            torch.set_num_threads(1)
            if number == 2:
                threading.Timer(0.4, die).start()  # anywhere
            else:
                die_at(6 + number % 3, after=bool(number % 2))
            train_multilabel(choices, out, recipe)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        kills += 1
    sys.stdout.write(json.dumps(kills) + "\n")


main()
