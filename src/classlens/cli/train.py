"""The commands `classlens train` and `classlens data`: read options, call the library, print."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from classlens.cli.bar import Bar
from classlens.cli.early import check_out
from classlens.cli.options import Device, Layout, Seed, Threads, set_threads
from classlens.cli.plain import App

if TYPE_CHECKING:
    from classlens.training import Trained

train = App(help="Train a network on your own data.")
data = App(help="Create data sets.")


class Schedule(StrEnum):
    """The schedule of the learning rate."""

    cosine = "cosine"
    step = "step"


@train.callback()
def _train() -> None:
    """Train a network on your own data."""


@train.command(no_args_is_help=True)
def multilabel(
    folder: Annotated[Path, typer.Option("--data", "-d", metavar="DIR", help="The pictures.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="RUN", help="The folder of the run; rerun the same command to resume."),
    ],
    layout: Annotated[
        Layout,
        typer.Option(
            help="`voc`: JPEGImages, SegmentationClass, ImageSets. `csv`: labels.csv with image,labels[,split], labels "
            "separated by `;`. `folders`: one folder per class, or `cat+dog`; inside train/ and val/ if these exist."
        ),
    ] = Layout.voc,
    backbone: Annotated[
        str, typer.Option(help="The network: a name that `classlens models` lists, or a card.")
    ] = "efficientnet-lite0",
    weights: Annotated[
        str, typer.Option(help="Initial weights: `default`, `none`, or a file (the body alone is enough).")
    ] = "default",
    hidden: Annotated[
        str, typer.Option(metavar="N,N", help="Hidden layers of the head, as `512,512`.  [default: none]")
    ] = "",
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Train only the head, on cached features: minutes on a CPU.")
    ] = False,
    train_from: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCK",
            help="Train this module and all that follows, as `blocks.8` or `layer4`, on cached features of what "
            "precedes it.  [default: train everything]",
        ),
    ] = None,
    flip: Annotated[bool, typer.Option("--flip/--no-flip", help="Also train with mirror images.")] = True,
    delete_patches: Annotated[
        bool,
        typer.Option(
            "--delete-patches",
            help="Delete one of sixteen patches of half of the images, for `classlens evaluate idsds`.",
        ),
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs.")] = 60,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 32,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Initial learning rate of Adam.  [default: 1e-4; 1e-3 for a frozen linear head]"),
    ] = None,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of Adam.")] = 5e-4,
    schedule: Annotated[Schedule, typer.Option(help="`cosine` to 0, or `step`: divide by 5 every 20 epochs.")] = (
        Schedule.cosine
    ),
    patience: Annotated[int, typer.Option(min=1, help="Stop after N epochs without a better validation mAP.")] = 10,
    seed: Seed = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train a multi-label network, which predicts an independent probability for each class.

        classlens train multilabel --data VOCdevkit/VOC2012 --layout voc --freeze --out runs/voc
        classlens explain photo.jpg --model runs/voc --multilabel

    The head of the backbone is found and replaced. With masks, the labels of a random crop are the classes visible in
    it. Rerun the same command to resume, even after a kill; the final numbers are the same. Writes RUN/card.json and
    model.safetensors (the best epoch), metrics.csv and metrics.png. Every command accepts RUN as --model.
    """
    check_out(out)
    set_threads(threads)
    from classlens.models.loading import pick_device
    from classlens.training import Choices, Recipe, train_multilabel

    sizes = _sizes(hidden)
    usual = 1e-3 if freeze and not sizes else 1e-4
    choices = Choices(
        data=str(folder),
        layout=layout.value,
        backbone=backbone,
        weights=None if weights == "none" else weights,
        hidden=sizes,
        freeze=freeze,
        flip=flip,
        delete_patches=delete_patches,
        device=pick_device(device),
        train_from=train_from,
    )
    rate = usual if learning_rate is None else learning_rate
    recipe = Recipe(epochs, batch_size, rate, weight_decay, schedule.value, patience, seed)
    with Bar() as bar:
        trained = train_multilabel(choices, out, recipe, bar)
    best = trained.best
    _say(trained, f"validation mAP {100 * best.val_map:.1f} %, F1 {100 * best.val_f1:.1f} %")


@train.command(no_args_is_help=True)
def segmentation(
    folder: Annotated[Path, typer.Option("--data", metavar="DIR", help="The pictures and their masks.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The folder of the run; rerun the same command to resume.")],
    layout: Annotated[
        Layout, typer.Option(help="`voc`: JPEGImages, SegmentationClass, ImageSets. Every picture needs a mask.")
    ] = Layout.voc,
    backbone: Annotated[str, typer.Option(help="The network; `classlens models` lists names.")] = "efficientnet-lite0",
    weights: Annotated[str, typer.Option(help="Weights of the body: `default`, `none`, or a file.")] = "default",
    flip: Annotated[bool, typer.Option("--flip/--no-flip", help="Also train with mirror images.")] = True,
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs.")] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Initial learning rate of Adam.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of Adam.")] = 5e-4,
    patience: Annotated[int, typer.Option(min=1, help="Stop after N epochs without a better validation mIoU.")] = 10,
    seed: Seed = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train a segmentation head, which predicts the class of every pixel, on a body that stays as it is.

        classlens train segmentation --data VOCdevkit/VOC2012 --out runs/voc-segmentation
        classlens explain photo.jpg --model runs/voc-segmentation --region person

    The head reads three feature maps of the body (a feature pyramid), computed once: minutes on a CPU. Rerun the same
    command to resume, even after a kill; the final numbers are the same. Writes RUN/card.json and model.safetensors
    (the best epoch), metrics.csv and metrics.png. Every command accepts RUN as --model.
    """
    set_threads(threads)
    from classlens.models.loading import pick_device
    from classlens.training import DenseChoices, Recipe, train_segmentation

    initial = None if weights == "none" else weights
    choices = DenseChoices(str(folder), layout.value, backbone, initial, flip, pick_device(device))
    recipe = Recipe(epochs, batch_size, learning_rate, weight_decay, Schedule.cosine.value, patience, seed)
    with Bar() as bar:
        trained = train_segmentation(choices, out, recipe, bar)
    best = trained.best
    _say(trained, f"validation mIoU {100 * best.val_miou:.1f} %, pixel accuracy {100 * best.val_accuracy:.1f} %")


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"--hidden must be written as 512 or 512,512, not {text!r}")
    return tuple(int(part) for part in parts)


def _say(trained: Trained, scores: str) -> None:
    typer.echo(f"best of {len(trained.history)} epochs: {trained.best.epoch + 1}, {scores}")
    typer.echo(f"pictures: {trained.remark}")
    for name in ("card.json", "model.safetensors", "metrics.csv", "metrics.png"):
        typer.echo(f"-> {trained.folder / name}")


@data.callback()
def _data() -> None:
    """Create data sets."""


@data.command(no_args_is_help=True)
def compose(
    pets: Annotated[
        Path, typer.Option("--data", "-d", metavar="DIR", help="Oxford-IIIT Pet: images, annotations/trimaps.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="A new folder for the scenes.")],
    train_scenes: Annotated[int, typer.Option("--train", min=1, help="Number of training scenes.")] = 600,
    val_scenes: Annotated[
        int, typer.Option("--val", min=1, help="Number of validation scenes, with other animals.")
    ] = 150,
    side: Annotated[int, typer.Option(min=64, max=1024, help="Height and width of a scene.")] = 320,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the scenes.")] = 0,
) -> None:
    """Paste two animals of different breeds into one scene, with a mask for each: class-specific ground truth.

        classlens data compose --data oxford-pets --out two-pets
        classlens train multilabel --data two-pets --freeze --out runs/two-pets
        classlens evaluate segmentation --data two-pets --model runs/two-pets --out runs/two-pets-seg

    The animals differ in scale and may overlap; the one in front covers the other. The folder has the VOC layout, with
    the breeds in labels.txt. The same seed gives the same files.
    """
    check_out(out)
    from classlens.data.scenes import compose_scenes

    with Bar() as bar:
        made = compose_scenes(pets, out, train_scenes, val_scenes, side, seed, bar)
    typer.echo(f"{made.train} + {made.val} scenes of {made.classes} breeds, {made.remark}")
    typer.echo(f"-> {out}")
