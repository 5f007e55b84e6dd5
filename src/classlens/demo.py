"""The first thing to look at: one picture, two classes, one call.

    classlens demo

The picture is made of two CC0 photographs; `assets/README.md` says which and how.
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
    """The demo picture as a JPEG file's content: a cat behind a table with an espresso."""
    return (files("classlens") / "assets" / "demo.jpg").read_bytes()


def run(folder: str | os.PathLike[str] = "out") -> Path:
    """Explain both classes with the embedded model, write demo.png into a folder, and say what it shows.

    >>> run("out")
    PosixPath('out/demo.png')
    """
    explanation = explain(load(), picture(), targets=[list(CLASSES)])
    path = render.write_png(Path(folder) / "demo.png", render.figure(explanation))
    print(f"{path}: where {explanation.model} finds each of two classes in one picture")
    print(render.summary(explanation))
    print("Left: the picture. Then, for each class: red speaks for it, blue against it, grey says nothing.")
    print(f"One call of classlens.explain, method {explanation.method}, {explanation.report.seconds:.1f} s.")
    return path
