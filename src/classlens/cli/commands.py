"""The command `classlens`: reads options, calls the library, prints. Nothing is computed here.

torch and matplotlib take seconds to import, so each command imports what it needs.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from classlens.cli.declared import declared
from classlens.cli.evaluate import evaluate
from classlens.cli.report import report
from classlens.cli.selfsup import selfsup
from classlens.cli.train import data, train
from classlens.errors import ClasslensError, ImageError, ModelError, TargetError

if TYPE_CHECKING:
    from classlens.comparison import Comparison
    from classlens.core.targets import Targets
    from classlens.explanation import Explanation
    from classlens.models import LoadedModel

_PATIENCE = 2.0  # seconds before a progress bar appears
_DEBUG = "CLASSLENS_DEBUG"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # main() says in one line what went wrong
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Device(StrEnum):
    """Where to compute; auto takes the fastest there is."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


# Options that several commands have.
ModelName = Annotated[str, typer.Option(help="The network; `classlens models` lists the kinds of names.")]
Weights = Annotated[str, typer.Option(help="`default` (the published ones), `none` (random ones), or a file.")]
Classes = Annotated[
    list[str] | None, typer.Option("--class", metavar="NAME|INDEX", help="A class to explain; can be repeated.")
]
Where = Annotated[Device, typer.Option(help="Where to compute.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 a bug, 2 something the user can mend, 130 stopped with Ctrl-C."""
    try:
        app(arguments)
    except (ClasslensError, OSError) as error:
        if os.environ.get(_DEBUG):
            raise
        _complain(str(error))
        sys.exit(2)
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        _complain(f"{type(error).__name__}: {error} (a bug? `classlens --debug ...` shows where it happened)")
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"classlens {version('classlens')}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", envvar=_DEBUG, help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """See where a vision network finds each class."""
    if debug:
        os.environ[_DEBUG] = "1"


@app.command(no_args_is_help=True)
def explain(
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE", help="Picture files, or folders of them.", show_default=False)
    ],
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    classes: Classes = None,
    top: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Explain the K likeliest classes.  [default: 1]")
    ] = None,
    multilabel: Annotated[
        bool, typer.Option("--multilabel", help="Explain every class that a multi-label network finds.")
    ] = False,
    threshold: Annotated[
        float, typer.Option(min=0.001, max=0.999, help="With --multilabel: the probability from which a class counts.")
    ] = 0.5,
    method: Annotated[
        str, typer.Option(help="How; `classlens methods` lists them. Options go in brackets: `agf-release(without=A)`.")
    ] = "agf",
    device: Where = Device.auto,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Each image gets a folder in here.")] = Path("out"),
    trace: Annotated[bool, typer.Option("--trace", help="Also draw the terms of each layer (AGF methods).")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Threads that read pictures while the network computes.")] = 2,
    json: AsJson = False,
) -> None:
    """Show where a network finds each class: overlays, a figure, the raw maps and a report.

    Why did it say that, and where is the evidence for another class?

        classlens explain photo.jpg

        classlens explain photo.jpg --class tabby --class espresso

        classlens explain photos/ --top 3 --model torchvision:resnet50 --out maps

        classlens explain photo.jpg --model runs/voc --multilabel

    Writes OUT/photo/figure.png, an overlay for each class, maps.npz and report.json; with --multilabel also
    segmentation.png, where each class has most evidence.
    """
    import classlens
    from classlens.data.images import ahead

    images = _pictures(images)
    if multilabel and (classes or top):
        raise typer.BadParameter("--multilabel finds the classes by itself; give it without --class and --top")
    targets = classlens.above(threshold) if multilabel else _targets(classes, top, default=1)
    loaded = _load(model, weights, device)
    if multilabel and not loaded.multilabel:
        raise ModelError(
            f"{model} is no multi-label network; train one with `classlens train multilabel`, or use --top"
        )
    progress = _LateProgress(len(images))
    done: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    begun = time.monotonic()
    for image, folder, read in zip(
        images, _folders(images, out), ahead(loaded.preprocess, images, workers), strict=True
    ):
        try:
            with progress.step(image.name):
                explanation = classlens.explain(loaded, read()[None], targets, method, trace=trace)
                written = _save(explanation, folder, trace)
                if multilabel:
                    written.append(_save_segmentation(explanation, folder))
        except (ImageError, TargetError) as error:
            if isinstance(error, TargetError) and not multilabel:
                raise  # it would be said again of every image
            _complain(str(error))
            failed.append({"path": str(image), "error": str(error)})
            continue
        done.append(_document(explanation, image, written))
        if not json:
            _show(explanation, image, folder)
        if not json and multilabel:
            typer.echo(f"  -> {folder / 'segmentation.png'}")
    speed = len(done) / (time.monotonic() - begun)
    if json:
        about = {"classlens": version("classlens"), "model": model, "method": method, "images_per_second": speed}
        typer.echo(jsonlib.dumps(about | {"images": done, "failed": failed}, indent=2))
    elif len(done) > 1:
        typer.echo(f"{len(done)} images, {speed:.2f} images/s, pictures and files included")
    if failed:
        raise typer.Exit(2)


@app.command(no_args_is_help=True)
def compare(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="A picture file.", show_default=False)],
    methods: Annotated[
        str, typer.Option(help="Names with commas, or `all`; `classlens methods` lists them.")
    ] = "agf,agf-release,gradcam,fullgrad,lrp,clrp,integrated-gradients",
    classes: Classes = None,
    top: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Explain the K likeliest classes.  [default: 2]")
    ] = None,
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    device: Where = Device.auto,
    out: Annotated[Path, typer.Option(metavar="PNG", help="The figure.")] = Path("out/comparison.png"),
    json: AsJson = False,
) -> None:
    """Put several methods side by side: rows are classes, columns methods.

        classlens compare photo.jpg --class tabby --class espresso

        classlens compare photo.jpg --class tabby --class espresso --methods all

    The table says how alike each method's maps of the classes are (their correlation): near 1, it shows the same
    whatever is asked.
    """
    from classlens import render
    from classlens.comparison import Comparison, comparing
    from classlens.methods import method_names
    from classlens.methods.progress import reporting

    names = method_names(methods)
    targets = _targets(classes, top, default=2)
    loaded = _load(model, weights, device)
    progress = _LateProgress(len(names))
    found = Comparison({}, {})
    steps = comparing(loaded, image, targets, names)
    for name in names:
        with progress.step(name), reporting(progress.within):
            _, outcome = next(steps)
        if isinstance(outcome, ClasslensError):
            found.failures[name] = str(outcome)
        else:
            found.explanations[name] = outcome
    render.write_png(out, found.figure())
    if json:
        typer.echo(jsonlib.dumps(_comparison_document(found, image, out), indent=2))
    else:
        _show_comparison(found, out)


@app.command()
def models() -> None:
    """List the networks that come along, and the other kinds of names that --model takes."""
    from classlens.models import KINDS, MODELS

    table = Table("name", "what it is, and what to install for it", "input", box=None, pad_edge=False)
    for name, info in (MODELS | KINDS).items():
        about = escape(info.description) + (f"\n[dim]{escape(info.install)}[/]" if info.install else "")
        table.add_row(escape(name), about, f"{info.size}×{info.size}" if info.size else "")
    Console().print(table)


@app.command()
def methods() -> None:
    """List the explanation methods and what to expect of each."""
    table = Table("name", "what it is", "per class", "signed", "conserves", box=None, pad_edge=False)
    for entry in declared():
        about = f"{escape(entry['summary'])}\n[dim]{escape(entry['paper'])}[/]"
        marks = ("yes" if entry[mark] else "–" for mark in ("class_specific", "signed", "conserves"))
        table.add_row(escape(entry["name"]), about, *marks)
    Console().print(table)


app.command(no_args_is_help=True)(evaluate)
app.add_typer(train, name="train")
app.add_typer(data, name="data")
app.add_typer(selfsup, name="selfsup")
app.command(no_args_is_help=True)(report)


@app.command()
def ops(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The network; `classlens models` lists names.")],
    weights: Weights = "default",
) -> None:
    """List the operations that a network uses, how often, and the rule each gets.

    classlens ops efficientnet-lite0

    classlens ops torchvision:convnext_tiny --weights none
    """
    from classlens.core.rules import RULES
    from classlens.explanation import operations

    table = Table("operation", "times", "rule", "what it does", box=None, pad_edge=False)
    for op, times in operations(_load(model, weights, Device.cpu)).items():
        rule = RULES.get(op)
        about = (rule.__doc__ or "").strip().splitlines()[0] if rule else "[red]none: relevance methods refuse it[/]"
        table.add_row(op, str(times), getattr(rule, "__name__", "–"), escape(about) if rule else about)
    Console().print(table)


@app.command()
def coverage(
    library: Annotated[str, typer.Option(help="`torchvision` (all classifiers) or `timm` (one of every family).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Rows and table.md go here; the same command goes on.")],
    only: Annotated[str, typer.Option(help="Only networks with this in their name.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for a network.")] = 180,
    memory: Annotated[float, typer.Option(min=1, metavar="GB", help="Memory for a network.")] = 12,
) -> None:
    """Try every classifier of a library: recorded, finite, conserved, batch = single, model untouched.

    classlens coverage --library torchvision --out coverage
    """
    from classlens.evaluate.coverage import cover, table
    from classlens.files import write_text

    rows = []
    for done, total, row in cover(library, out, timeout, memory, only):
        rows.append(row)
        typer.echo(f"{done}/{total} {row.name}: {'good' if row.good else row.reason or 'not good'}", err=True)
    write_text(out / "table.md", table(rows))
    typer.echo(f"{sum(row.good for row in rows)} of {len(rows)} networks are good -> {out / 'table.md'}")


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A network of the page; can be repeated.  [default: efficientnet-lite0]", show_default=False),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 opens the page to others.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7860,
    device: Where = Device.auto,
) -> None:
    """Show a page in the browser: drop a picture, click a class, see where it is found.

        classlens serve

        classlens serve --model efficientnet-lite0 --model torchvision:resnet50 --port 8000

    Nothing is fetched from elsewhere and no picture is kept. Ctrl-C stops it.
    """
    from classlens.app.server import serve as run
    from classlens.models.loading import pick_device

    run(model or ["efficientnet-lite0"], host, port, pick_device(device.value))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where demo.png goes.")] = Path("out"),
) -> None:
    """Explain two classes of one picture with the embedded network."""
    from classlens.demo import run

    run(out)


def _targets(classes: list[str] | None, top: int | None, default: int) -> Targets:
    if classes and top:
        raise typer.BadParameter("give --class or --top, not both")
    import classlens

    return [classes] if classes else classlens.top(top or default)


def _load(model: str, weights: str, device: Device) -> LoadedModel:
    import classlens
    from classlens.models.loading import pick_device

    return classlens.load(model, None if weights == "none" else weights, pick_device(device.value))


def _pictures(paths: Sequence[Path]) -> list[Path]:
    """The files, and those in folders by name."""
    from classlens.data.layouts import pictures_in

    found: list[Path] = []
    for path in paths:
        inside = sorted(pictures_in(path)) if path.is_dir() else [path]
        if not inside:
            raise ImageError(f"there is no picture in {path}")
        found += inside
    return found


def _folders(images: Sequence[Path], out: Path) -> list[Path]:
    """A folder for each image, named after it; a/cat.jpg and b/cat.jpg become cat and cat-2.

    >>> _folders([Path("a/cat.jpg"), Path("b/cat.jpg")], Path("out"))
    [PosixPath('out/cat'), PosixPath('out/cat-2')]
    """
    names: list[str] = []
    for image in images:
        stem = image.stem or "image"
        free = (name for name in (stem, *(f"{stem}-{i}" for i in range(2, len(images) + 2))) if name not in names)
        names.append(next(free))
    return [out / name for name in names]


def _save(explanation: Explanation, folder: Path, trace: bool) -> list[Path]:
    from classlens import render

    written = explanation.save(folder)
    if trace:
        for k, index in enumerate(explanation.targets[0].tolist()):
            picture = render.decomposition(explanation, k=k)
            written.append(render.write_png(folder / f"decomposition-{index}.png", picture))
    return written


def _save_segmentation(explanation: Explanation, folder: Path) -> Path:
    from classlens import render
    from classlens.evaluate.segmentation import label_map

    labels = label_map(explanation.maps[0].float().cpu().numpy(), explanation.signed)
    return render.write_png(folder / "segmentation.png", render.segmentation(explanation, labels))


def _document(explanation: Explanation, image: Path, written: Sequence[Path]) -> dict[str, Any]:
    from classlens import render

    return {
        "path": str(image),
        "classes": render.describe(explanation),
        "report": explanation.report.to_json(),
        "files": [str(path) for path in written],
    }


def _show(explanation: Explanation, image: Path, folder: Path) -> None:
    from classlens import render

    typer.echo(f"{image}  ({explanation.model}, {explanation.method}, {explanation.report.seconds:.1f} s)")
    typer.echo(render.summary(explanation))
    for note in explanation.report.notes:
        typer.echo(f"  note: {note}")
    typer.echo(f"  -> {folder / 'figure.png'}")


def _comparison_document(found: Comparison, image: Path, out: Path) -> dict[str, Any]:
    from classlens import render

    methods = {
        name: {"seconds": e.report.seconds, "likeness": found.likeness(name), "classes": render.describe(e)}
        for name, e in found.explanations.items()
    }
    return {"path": str(image), "methods": methods, "failed": found.failures, "files": [str(out)]}


def _show_comparison(found: Comparison, out: Path) -> None:
    from classlens import render
    from classlens.comparison import ALIKE

    table = Table("method", "s", "classes alike", "class", "evidence for it", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for name, e in found.explanations.items():
        alike = found.likeness(name)
        verdict = "" if alike is None else f"{alike:.2f}" + (" (not told apart)" if alike > ALIKE else "")
        for k, about in enumerate(render.describe(e)):
            lead = (escape(name), f"{e.report.seconds:.1f}", verdict) if k == 0 else ("", "", "")
            table.add_row(*lead, escape(about["name"]), about["where"])
    for name, reason in found.failures.items():
        table.add_row(escape(name), "–", "", "", f"[dim]{escape(reason)}[/]")
    Console().print(table)
    typer.echo(f"-> {out}")


def _complain(text: str) -> None:
    """One line on stderr, whatever the text."""
    typer.echo(f"error: {' '.join(text.split())}", err=True)


class _LateProgress:
    """A bar on stderr that appears once a run has taken a while, and steps aside while results are printed."""

    def __init__(self, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # stdout is left alone: results may be piped into a file while the bar is shown on the terminal.
        self._bar = Progress(
            *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("", total=total)
        self._due = time.monotonic() + _PATIENCE

    def within(self, label: str, done: int, total: int) -> None:
        """A long step tells how far it is."""
        self._bar.update(self._task, description=escape(f"{label} {done}/{total}"))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Around the work on one image."""
        if not self._bar.console.is_terminal:
            yield
            return
        self._bar.update(self._task, description=escape(name))
        timer = threading.Timer(max(0.0, self._due - time.monotonic()), self._bar.start)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self._bar.stop()
            self._bar.advance(self._task)
