"""The commands `classlens selfsup train` and `classlens selfsup probe`: read options, call the library, print."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from classlens.cli.bar import Bar
from classlens.cli.early import check_methods, check_out
from classlens.cli.options import Device, Layout, Seed, Threads, set_threads

if TYPE_CHECKING:
    from classlens.evaluate import Dataset
    from classlens.selfsup.layers import Scored
    from classlens.selfsup.probes import Probed
    from classlens.selfsup.train import Trained


class Recipe(StrEnum):
    """The self-supervised task."""

    rotnet = "rotnet"
    sela = "sela"
    scan = "scan"


class Network(StrEnum):
    """The networks that can be trained."""

    alexnet_96 = "alexnet-96"
    resnet_32 = "resnet-32"


def train(
    recipe: Annotated[
        Recipe,
        typer.Argument(
            metavar="RECIPE",
            help="`rotnet`: predict the rotation of an image. `sela`: its own labels, balanced by Sinkhorn-Knopp. "
            "`scan`: contrast of views, then clusters of nearest neighbours.",
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            "-d",
            metavar="DIR",
            help="Images, in any layout that `evaluate` knows; can be repeated. Labels are not used for training; if "
            "folders are classes, they are used to score the clusters.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="RUN", help="The folder of the run; rerun the same command to resume."),
    ],
    network: Annotated[
        Network | None,
        typer.Option(help="The network, for 96 or 32 px.  [default: alexnet-96 for rotnet, else resnet-32]"),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(min=2, help="Outputs of the head.  [default: 64 for sela, 10 for scan]")
    ] = None,
    epochs: Annotated[
        str,
        typer.Option(
            metavar="N|N,N", help="Number of epochs; for scan of both steps, as `30,10`.  [default: 30; 30,10 for scan]"
        ),
    ] = "",
    batch_size: Annotated[
        int | None, typer.Option(min=2, help="Images per batch.  [default: 32 for rotnet, else 128]")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Initial learning rate of Adam.  [default: 1e-3; 1e-4 for scan's clusters]")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most N training images (a deterministic subset).")
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train a small network without labels; minutes to hours on a CPU.

        classlens selfsup train rotnet --data VOCdevkit/VOC2012 --data oxford-pets --out runs/rotnet
        classlens selfsup train scan --data cifar10 --limit 10000 --out runs/scan

    Rerun the same command to resume, even after a kill; the final weights are the same. Writes RUN/card.json,
    model.safetensors, metrics.csv and metrics.png. Every command accepts RUN as --model.
    """
    check_out(out)
    set_threads(threads)
    from classlens.models.loading import pick_device
    from classlens.selfsup.recipes import Choices
    from classlens.selfsup.train import train_selfsup

    choices = Choices(
        recipe=recipe.value,
        data=tuple(data),
        network=network.value if network else None,
        clusters=clusters,
        epochs=_numbers(epochs, "--epochs") or None,
        batch_size=batch_size,
        learning_rate=learning_rate,
        limit=limit,
        seed=seed,
        device=pick_device(device),
    )
    with Bar() as bar:
        trained = train_selfsup(choices, out, bar)
    _say_trained(trained)


def _say_trained(trained: Trained) -> None:
    last = trained.history[-1]
    scores = ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}" if name != "clusters_used" else f"{value:.0f} clusters used"
        for name, value in last.scores.items()
    )
    typer.echo(f"{len(trained.history)} epochs, loss {last.loss:.3f}; {scores}" if scores else f"loss {last.loss:.3f}")
    if trained.skipped:
        typer.echo(f"{len(trained.skipped)} images were skipped, the first: {trained.skipped[0]}")
    for name in ("card.json", "model.safetensors", "metrics.csv", "metrics.png"):
        typer.echo(f"-> {trained.folder / name}")


def probe(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="The network: a folder of `selfsup train`, or any name that `load` accepts.",
        ),
    ],
    data: Annotated[Path, typer.Option("--data", "-d", metavar="DIR", help="Labelled images.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PROBES", help="The folder of the probes.")],
    layout: Annotated[
        Layout,
        typer.Option(
            help="`voc`: JPEGImages, SegmentationClass, ImageSets. `csv`: labels.csv with image,labels[,split]. "
            "`folders`: one folder for each class; inside train/ and val/ if these exist."
        ),
    ] = Layout.voc,
    weights: Annotated[
        str, typer.Option(help="`default`, `none` (random weights, as a baseline), or a file.")
    ] = "default",
    stages: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME",
            help="Modules to probe.  [default: each convolution; in a deep network the last map of each resolution]",
        ),
    ] = "",
    pool: Annotated[int, typer.Option(min=1, help="Average features over an N x N grid.")] = 1,
    masks: Annotated[
        str | None, typer.Option(metavar="DIR|none", help="Masks to score maps with.  [default: those of --data]")
    ] = None,
    methods: Annotated[
        str, typer.Option("--methods", "-M", help="Methods, separated by commas; the first is drawn.")
    ] = "agf",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most N images with masks (a deterministic subset).")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, max=40, help="Images in the figure of maps.")] = 6,
    seed: Seed = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train a linear probe on each stage of a frozen network, and explain it.

        classlens selfsup probe --model runs/rotnet --data VOCdevkit/VOC2012 --out runs/rotnet-probes

    Shows how well each stage predicts the labels of held-out images, and how well its maps lie on the objects. Features
    are cached in PROBES; rerun the same command to resume. Writes probes.csv, segmentation.csv, layers.png, maps.png
    and a weight file for each probe.
    """
    check_methods(methods)
    check_out(out)
    set_threads(threads)
    from classlens.files import write_text
    from classlens.methods import split_names
    from classlens.models.loading import pick_device
    from classlens.render import write_png
    from classlens.selfsup.layers import layers_figure, maps_figure, segmentation_by_stage, segmentation_table
    from classlens.selfsup.probes import probe_stages

    chosen = split_names(methods)
    with Bar() as bar:
        probed = probe_stages(
            model, data, layout.value, out, weights=None if weights == "none" else weights,
            stages=split_names(stages) if stages else (), pool=pool, seed=seed, device=pick_device(device),
            progress=bar,
        )  # fmt: skip
        files = ["probes.csv", "layers.png", "maps.png"]
        dataset = _masks(masks, probed)
        scored = segmentation_by_stage(probed, dataset, chosen, limit, seed, bar) if dataset is not None else ()
        if scored:
            write_text(out / "segmentation.csv", segmentation_table(scored))
            files.insert(1, "segmentation.csv")
        write_png(out / "layers.png", layers_figure(probed, scored))
        write_png(out / "maps.png", maps_figure(probed, chosen[0], examples))
    _say_probed(probed, scored)
    for name in files:
        typer.echo(f"-> {out / name}")


def _masks(masks: str | None, probed: Probed) -> Dataset | None:
    """The data set with the masks that maps are scored against, if there is one."""
    from classlens.evaluate import open_dataset

    if masks is not None:
        return None if masks == "none" else open_dataset(masks)
    own = probed.data.dataset
    return open_dataset(own.root) if own.has_masks else None


def _say_probed(probed: Probed, scored: Sequence[Scored]) -> None:
    from rich.table import Table

    from classlens.evaluate.tests.segmentation import METRICS

    methods = list(dict.fromkeys(row.method for row in scored))
    for method in methods or [""]:
        table = Table(box=None, pad_edge=False, title=method or None, title_justify="left")
        heads = ["stage", "shape", f"{probed.score_name} %", *(metric.name for metric in METRICS if method)]
        for head in heads:
            table.add_column(head, justify="left" if head == "stage" else "right")
        for found in probed.stages:
            row = next((r for r in scored if (r.stage, r.method) == (found.stage.name, method)), None)
            cells = [f"{e.value:.1f}" for e in row.scores] if row else []
            shape = "x".join(map(str, found.stage.shape))
            table.add_row(escape(found.stage.name), shape, f"{100 * found.score:.1f}", *cells)
        Console(width=None if Console().is_terminal else 120).print(table)
    typer.echo(f"chance: {probed.score_name} {100 * probed.chance:.1f} %")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} must be written as 30 or 30,10, not {text!r}")
    return tuple(int(part) for part in parts)
