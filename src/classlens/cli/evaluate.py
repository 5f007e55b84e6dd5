"""The command `classlens evaluate`: reads options, calls `classlens.evaluate`, prints. Nothing is computed here."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from classlens.evaluate import Report
    from classlens.evaluate.worker import Result

_QUIET = 30.0  # seconds between lines where there is no terminal


class Test(StrEnum):
    """What to measure."""

    perturbation = "perturbation"
    segmentation = "segmentation"
    pointing = "pointing"
    sanity = "sanity"
    all = "all"


def evaluate(
    test: Annotated[Test, typer.Argument(metavar="TEST", help="perturbation, segmentation, pointing, sanity or all.")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="DIR",
            help="A data set; can be repeated. Its layout is recognised: a folder for each class (wnid), VOC, Oxford "
            "pets, images/ + masks/, gtsegs_ijcv.mat; or say it: `pets:DIR`.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The folder of the run; the same command goes on there.")],
    methods: Annotated[str, typer.Option(help="Names with commas; `classlens methods` lists them.")] = "agf,gradcam",
    model: Annotated[str, typer.Option(help="The network; `classlens models` lists names.")] = "efficientnet-lite0",
    weights: Annotated[str, typer.Option(help="`default`, `none` (random ones), or a file.")] = "default",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes the fastest.")] = "auto",
    explain: Annotated[
        str, typer.Option(help="Perturbation: explain the `predicted` or the `target` class.")
    ] = "predicted",
    fill: Annotated[str, typer.Option(help="Perturbation: removed pixels are black, blur, mean (commas).")] = "black",
    threshold: Annotated[
        float, typer.Option(help="Segmentation with a multi-label network: probability from which a class counts.")
    ] = 0.5,
    shapes: Annotated[str, typer.Option(help="Pointing: grids, columns x rows (commas).")] = "2x1,2x2,3x3",
    cells: Annotated[
        str, typer.Option(help="Pointing: `fit` the grid into one input, or `full` cells of that size.")
    ] = "fit",
    confidence: Annotated[float, typer.Option(help="Pointing: least probability of a picture's class.")] = 0.5,
    max_grids: Annotated[int, typer.Option(min=1, help="Pointing: grids of each shape at most.")] = 500,
    sanity_images: Annotated[int, typer.Option(min=1, help="Sanity: pictures at most.")] = 50,
    frame: Annotated[
        str, typer.Option(help="`model`: its own crop; `whole`: the picture squashed, as in the paper.")
    ] = "model",
    split: Annotated[str, typer.Option(help="VOC: which list of pictures.")] = "val",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Pictures of each data set at most: a stable choice.")
    ] = None,
    half: Annotated[
        str | None,
        typer.Option(metavar="A|B", help="Half of the pictures, by their names' hash: choose on A, report on B."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Also each other method less this one, on the same pictures.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which pictures, and all that is drawn at random.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Pictures at once.  [default: 4 on CPU, 32 on GPU]")
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="GB", help="Perturbation: memory of one forward of perturbed pictures."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a worker.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS|local", help="Run on Ray: an address, or `local`.")
    ] = None,
) -> None:
    """Measure how good the maps are, and write tables, curves and a report.

        classlens evaluate all --data imagenet/val --data oxford-pets --methods agf,gradcam --out runs/first

        classlens evaluate perturbation --data imagenet/val --explain target --limit 500 --out runs/target

    Stopped, even killed, the same command goes on where it was. Writes RUN/table.md, table.csv, curves.png,
    report.html, the rows (Parquet) and a manifest.
    """
    from classlens.evaluate import TESTS, Settings, run
    from classlens.methods import split_names
    from classlens.models.loading import pick_device

    everything = test is Test.all
    settings = Settings(
        tests=TESTS if everything else (test.value,),
        everything=everything,
        data=tuple(data),
        methods=tuple(split_names(methods)),
        model=model,
        weights=None if weights == "none" else weights,
        device=pick_device(device),
        explain=explain,
        fills=tuple(split_names(fill)),
        threshold=threshold,
        shapes=tuple(split_names(shapes)),
        cells=cells,
        confidence=confidence,
        max_grids=max_grids,
        sanity_images=sanity_images,
        frame=frame,
        split=split,
        limit=limit,
        half=half,
        against=against,
        seed=seed,
        batch_size=batch_size,
        memory_limit=memory_limit,
        threads=threads,
    )
    with _Bar(len(settings.methods)) as bar:
        report = run(settings, out, cluster, bar, ["classlens", *sys.argv[1:]])
    _print(report)


def _print(report: Report) -> None:
    from classlens.evaluate.tables import terminal

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has room
    for table in report.tables:
        console.print(terminal(table))
        console.print()
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for file in report.files:
        console.print(f"-> {file}", markup=False, highlight=False)


class _Bar:
    """Progress on stderr: a bar with images/s and the time left; without a terminal a line now and then."""

    def __init__(self, methods: int) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("scores"),
            TextColumn("{task.fields[speed]}"), TimeRemainingColumn(), TextColumn("left"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._console = console
        self._methods = methods
        self._reset("", 0)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str, units: int) -> None:
        """A new stage of the run."""
        self._reset(what, units)
        if units:
            self._task = self._bar.add_task(what, total=units, speed="")
            self._say()

    def advance(self, result: Result) -> None:
        """Some rows have come."""
        self._done += result.units
        self._read += 0 if result.method else result.images
        self._maps += result.images if result.method else 0
        self._bar.update(
            self._task, completed=self._done, description=f"{self._what} {result.method}", speed=self._speed()
        )
        if self._done >= self._units or time.monotonic() - self._said > _QUIET:
            self._say()

    def _reset(self, what: str, units: int) -> None:
        self._what, self._units, self._done, self._read, self._maps = what, units, 0, 0, 0
        self._begun = self._said = time.monotonic()

    def _speed(self) -> str:
        # An image is done when every method has explained it; where none has to, when it is classified.
        images = self._maps / self._methods if self._maps else self._read
        return f"{images / max(time.monotonic() - self._begun, 1e-9):.2f} images/s"

    def _say(self) -> None:
        self._said = time.monotonic()
        if self._console.is_terminal:
            return
        line = f"{self._what}: {self._done} of {self._units} scores"
        if self._done:
            left = (self._said - self._begun) * (self._units / self._done - 1)
            line += f", {self._speed()}, {left:.0f} s left"
        self._console.print(line, markup=False, highlight=False)
