"""The demo: one picture, two classes, one call.

    classlens demo

The picture combines two CC0 photographs; see `assets/README.md`.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from classlens import render
from classlens.explanation import explain
from classlens.models import load

CLASSES = ("Egyptian cat", "espresso")


def picture() -> bytes:
    """The demo picture as the bytes of a JPEG file: a cat behind a table with an espresso."""
    return (files("classlens") / "assets" / "demo.jpg").read_bytes()


def run(folder: str | os.PathLike[str] = "out") -> Path:
    """Explain both classes with the included network, write demo.png to a folder, and print what it shows.

    >>> run("out")
    PosixPath('out/demo.png')
    """
    explanation = explain(load(), picture(), targets=[list(CLASSES)])
    path = render.write_png(Path(folder) / "demo.png", render.figure(explanation))
    print(f"{path}: where {explanation.model} finds each of two classes in one picture")
    print(render.summary(explanation))
    print("Left: the picture. Then, for each class: red is evidence for it, blue is evidence against it.")
    print(f"One call of classlens.explain, method {explanation.method}, {explanation.report.seconds:.1f} s.")
    return path
