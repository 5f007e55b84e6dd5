"""Run a command in children that are killed over and over, until one finishes. Started by test_run.py.

The parent never computes anything, so that its children can be forked from it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "worlds"))

from classlens.evaluate import Settings, options_of_tests, report, run, store


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_write(count: int, inside: bool) -> None:
    """Before the n-th part is written, or when it is written but does not yet stand in its place."""
    seen = 0
    original = os.replace

    def replace(source: str, target: Path) -> None:
        nonlocal seen
        if Path(target).suffix == ".parquet":
            seen += 1
            if seen == count and inside:
                die()
            if seen == count:
                original(source, target)
                die()
        original(source, target)

    store.os.replace = replace


def child(settings: Settings, out: Path, how: str, number: int) -> None:
    if how == "at random":
        threading.Timer(random.Random(number).uniform(0.02, 0.6), die).start()
    else:
        die_at_write(2 + number % 5, inside=how == "in a write")
    report.gallery.slowest_ops = lambda *_: {}  # takes long, and is not what is tested
    report.gallery.show = lambda *_: None
    run(settings, out)


def main() -> None:
    labelled, masked, out = sys.argv[1:4]
    settings = Settings(
        tests=("perturbation", "segmentation", "pointing", "sanity"), everything=True,
        methods=("agf-release", "gradcam", "random"), data=(labelled, masked), model="world:make", batch_size=3,
        threads=1, limit=7, options=options_of_tests(sanity_images=4, shapes=("2x1", "3x1")),
    )  # fmt: skip
    kills = dict.fromkeys(("at a write", "in a write", "at random"), 0)
    for number in range(200):
        how = list(kills)[number % 3]
        pid = os.fork()
        if pid == 0:
            child(settings, Path(out), how, number)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, how
            break
        kills[how] += 1
    sys.stdout.write(json.dumps(kills) + "\n")


main()
