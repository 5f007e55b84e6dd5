"""The command `classlens report`: reads options, calls `classlens.report`, prints. Nothing is computed here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from classlens.report import Report

_QUIET = 30.0  # seconds between lines where there is no terminal


def report(
    data: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Pictures: a folder of them, a folder for each class, VOC, Oxford pets, images/ + masks/. "
            "The layout is recognised; or say it: `pets:DIR`.",
        ),
    ],
    model: Annotated[str, typer.Option(help="The network; `classlens models` lists names.")] = "efficientnet-lite0",
    out: Annotated[Path, typer.Option(metavar="HTML", help="The page.")] = Path("report.html"),
    weights: Annotated[str, typer.Option(help="`default`, `none` (random ones), or a file.")] = "default",
    method: Annotated[str, typer.Option(help="How maps are made; `classlens methods` lists them.")] = "agf",
    limit: Annotated[int, typer.Option(min=1, help="Pictures at most: a stable choice.")] = 200,
    seed: Annotated[int, typer.Option(help="Decides which pictures, and all that is drawn at random.")] = 0,
    top: Annotated[int, typer.Option(min=1, help="Entries of each section at most, up to 25.")] = 12,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes the fastest.")] = "auto",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Pictures at once.  [default: 4 on CPU, 32 on GPU]")
    ] = None,
) -> None:
    """Report on a model: where it finds its classes, what is odd about that, and what it confuses.

        classlens report --data photos/ --out report.html

        classlens report --data oxford-pets/ --model torchvision:resnet50 --limit 500

    Writes one self-contained page. Masks and labels are used where the data have them.
    """
    from classlens.models import load
    from classlens.models.loading import pick_device
    from classlens.report import report as make

    loaded = load(model, None if weights == "none" else weights, pick_device(device))
    with _Bar() as bar:
        made = make(
            loaded, data, out, method=method, limit=limit, seed=seed, top=top, batch_size=batch_size, progress=bar,
            command=["classlens", *sys.argv[1:]],
        )  # fmt: skip
    _print(made)


def _print(made: Report) -> None:
    console = Console(soft_wrap=True)
    for finding in made.findings:
        console.print(f"- {finding.text}", markup=False, highlight=False)
    for note in made.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(f"-> {made.path}", markup=False, highlight=False)


class _Bar:
    """Progress on stderr: a bar with images/s and the time left; without a terminal a line now and then."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(), TextColumn("left"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._console = console
        self._task = self._bar.add_task("", total=None, speed="")
        self._begun = self._said = time.monotonic()

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0:
            self._begun = self._said = now
            self._bar.reset(self._task, total=total, description=what)
        speed = f"{done / max(now - self._begun, 1e-9):.2f} images/s" if done else ""
        self._bar.update(self._task, completed=done, speed=speed)
        if not self._console.is_terminal and (done == total or now - self._said > _QUIET):
            self._said = now
            self._console.print(f"{what}: {done} of {total}, {speed}", markup=False, highlight=False)
