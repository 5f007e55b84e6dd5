"""The command `classlens explain`: reads options, calls the library, prints."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from classlens.cli.bar import Bar
from classlens.cli.early import check_call
from classlens.cli.options import (
    AsJson,
    Classes,
    Device,
    ModelName,
    RatherThan,
    Weights,
    complain,
    load_for,
    rivals_of,
    targets_of,
)
from classlens.cli.questions import Boxes, Likes, Neurons, Regions, Texts, questions_of, refuse_several
from classlens.errors import ImageError, ModelError, TargetError

if TYPE_CHECKING:
    from classlens.explanation import Explanation
    from classlens.models import LoadedModel
    from classlens.trust import Trust


def explain(
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGE", help="Image files or scans, or folders of them (images recursively).", show_default=False
        ),
    ],
    model: ModelName = "efficientnet-lite0",
    weights: Weights = "default",
    classes: Classes = None,
    top: Annotated[
        int | None,
        typer.Option("--top", "-k", min=1, metavar="K", help="Explain the K most likely classes.  [default: 1]"),
    ] = None,
    rather_than: RatherThan = None,
    text: Texts = None,
    box: Boxes = None,
    region: Regions = None,
    like: Likes = None,
    neuron: Neurons = None,
    multilabel: Annotated[
        bool, typer.Option("--multilabel", help="Explain every class that a multi-label network predicts.")
    ] = False,
    threshold: Annotated[
        float,
        typer.Option(min=0.001, max=0.999, help="With --multilabel: the minimum probability of a predicted class."),
    ] = 0.5,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-M",
            metavar="NAME",
            help="The method; `classlens methods` lists them. Options in brackets: `agf-release(without=A)`. "
            "`auto`: the one that `classlens choose` stored for the network.",
        ),
    ] = "agf",
    device: Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Output folder; each image gets a subfolder.")
    ] = Path("out"),
    trace: Annotated[bool, typer.Option("--trace", help="Also draw the terms of each layer (AGF methods).")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Also test each map on the network, and say how far to trust it.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Threads that read images while the network computes.")] = 2,
    json: AsJson = False,
) -> None:
    """Show where a network finds each class: overlays, a figure, the raw maps and a report.

    Why did the network predict this class, and where is the evidence for another one?

        classlens explain photo.jpg
        classlens explain photo.jpg --class tabby --class espresso
        classlens explain photo.jpg --class tabby --rather-than "Egyptian cat"
        classlens explain photos/ --top 3 --model torchvision:resnet50 --out maps
        classlens explain photo.jpg --model runs/voc --multilabel
        classlens explain street.jpg --model my_package:detector --box 0 --box 1
        classlens explain street.jpg --model my_package:segmenter --region person --region car@40,60
        classlens explain scan.nii.gz --model nodules/card.json
        classlens explain photo.jpg --trust

    Writes OUT/photo/figure.png, an overlay for each class, maps.npz and report.json; with --multilabel also
    segmentation.png, the class with the most evidence at each pixel; with --trust also a card for each map. For a
    volume, each map is also a NIfTI file on the scan's own grid.
    """
    check_call(images, method, model, [*(classes or ()), *(rather_than or ())], out, folder=True, auto=True)
    import classlens
    from classlens.data.images import ahead

    questions = questions_of(text, box, region, like, neuron)
    refuse_several(multilabel, bool(questions), bool(classes or top or rather_than))
    several = classlens.above(threshold) if multilabel else targets_of(classes, top, default=1)
    targets = [questions] if questions else several
    loaded, method = load_for(model, weights, device, method)
    if multilabel:
        _check_multilabel(loaded)
    images = _inputs(loaded, images, out)
    jobs = zip(images, folders_for(images, out), ahead(loaded.preprocess, images, workers), strict=True)
    done: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    begun = time.monotonic()
    with Bar() as bar:
        for number, (image, folder, read) in enumerate(jobs):
            bar(image.name, number, len(images))
            try:
                asked: dict[str, Any] = {"rather_than": rivals_of(rather_than), "trace": trace}
                explanation = classlens.explain(loaded, read()[None], targets, method, **asked)
                cards = _cards(explanation, bar) if trust else []
                written = _save(explanation, folder, trace, multilabel, cards)
                written += _on_scan(explanation, loaded, image, folder)
            except (ImageError, TargetError) as error:
                if isinstance(error, TargetError) and not multilabel and (classes or not rather_than):
                    raise  # it would be repeated for every image
                with bar.aside():
                    complain(str(error))
                failed.append({"path": str(image), "error": str(error)})
                continue
            done.append(_document(explanation, image, written, cards))
            if not json:
                with bar.aside():
                    _show(explanation, image, folder, multilabel, cards)
    speed = len(done) / (time.monotonic() - begun)
    if json:
        about = {"model": model, "method": method, "images_per_second": speed, "images": done, "failed": failed}
        typer.echo(jsonlib.dumps({"classlens": classlens.__version__} | about, indent=2))
    elif len(done) > 1:
        typer.echo(f"{len(done)} images, {speed:.2f} images/s, including reading and writing files")
    if failed:
        raise typer.Exit(2)


def _check_multilabel(loaded: LoadedModel) -> None:
    if not loaded.multilabel:
        raise ModelError(
            f"{loaded.name} is not a multi-label network; train one with `classlens train multilabel`, or use --top"
        )


def _pictures(paths: Sequence[Path], out: Path) -> list[Path]:
    """The files, and the files anywhere in folders, sorted by name; not the figures of an earlier run in `out`."""
    from classlens.data.find import pictures_in

    found: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            own = out.resolve()
            inside = sorted(p for p in pictures_in(path, deep=True) if own not in p.resolve().parents)
        if not inside:
            raise ImageError(f"there are no images in {path}")
        found += inside
    return found


def _inputs(loaded: LoadedModel, paths: Sequence[Path], out: Path) -> list[Path]:
    """The pictures in files and folders or, for a network that reads scans, the scans."""
    from classlens.data.scans import scans_in
    from classlens.models import ScanPreprocess

    if isinstance(loaded.preprocess, ScanPreprocess):
        return [scan for path in paths for scan in scans_in(path)]
    return _pictures(paths, out)


def folders_for(images: Sequence[Path], out: Path) -> list[Path]:
    """A folder for each image, named after it; a/cat.jpg and b/cat.jpg become cat and cat-2.

    >>> folders_for([Path("a/cat.jpg"), Path("b/cat.jpg")], Path("out"))
    [PosixPath('out/cat'), PosixPath('out/cat-2')]
    """
    names: list[str] = []
    for image in images:
        stem = Path(image.name.removesuffix(".gz")).stem or "image"
        free = (name for name in (stem, *(f"{stem}-{i}" for i in range(2, len(images) + 2))) if name not in names)
        names.append(next(free))
    return [out / name for name in names]


def _cards(explanation: Explanation, bar: Bar) -> list[Trust]:
    """The trust card of every class of an image."""
    from classlens.progress import reporting

    with reporting(bar):
        return [explanation.trust(0, k) for k in range(explanation.targets.shape[1])]


def _save(explanation: Explanation, folder: Path, trace: bool, multilabel: bool, cards: Sequence[Trust]) -> list[Path]:
    from classlens import render

    written = render.save(explanation, folder, cards)
    if trace:
        for k, index in enumerate(explanation.targets[0].tolist()):
            picture = render.decomposition(explanation, k=k)
            written.append(render.write_png(folder / f"decomposition-{index}.png", picture))
    if multilabel:
        written.append(_save_segmentation(explanation, folder))
    return written


def _on_scan(explanation: Explanation, loaded: LoadedModel, image: Path, folder: Path) -> list[Path]:
    """Write the maps of a volume as NIfTI files on the scan's own grid, if the scan says where its voxels lie."""
    from classlens.data.scans import write_nifti
    from classlens.models import ScanPreprocess
    from classlens.render import stem

    if not isinstance(loaded.preprocess, ScanPreprocess) or loaded.preprocess.axes != 3:
        return []
    scan = loaded.preprocess.read(image)
    if scan.affine is None:
        return []
    maps = loaded.preprocess.back(explanation.maps[0], scan).numpy()
    return [write_nifti(folder / f"{stem(explanation, 0, k)}.nii.gz", one, scan.affine) for k, one in enumerate(maps)]


def _save_segmentation(explanation: Explanation, folder: Path) -> Path:
    from classlens import render
    from classlens.evaluate.tests.segmentation import label_map

    if explanation.maps.dim() != 4:
        raise ImageError("a volume has no segmentation figure; explain it without --multilabel, with --class or --top")
    labels = label_map(explanation.maps[0].float().cpu().numpy(), explanation.signed)
    return render.write_png(folder / "segmentation.png", render.segmentation(explanation, labels))


def _document(explanation: Explanation, image: Path, written: Sequence[Path], cards: Sequence[Trust]) -> dict[str, Any]:
    from classlens import render

    return {
        "path": str(image),
        "classes": render.describe(explanation),
        "report": explanation.report.to_json(),
        "files": [str(path) for path in written],
    } | ({"trust": [card.to_json() for card in cards]} if cards else {})


def _show(explanation: Explanation, image: Path, folder: Path, multilabel: bool, cards: Sequence[Trust]) -> None:
    from classlens import render

    run = f"{explanation.model}, {explanation.method}, {explanation.report.seconds:.1f} s"
    typer.echo(f"{image}  {render.question_text(explanation)}  ({run})")
    typer.echo(render.summary(explanation))
    if arrived := render.arrival_text(explanation):
        typer.echo(f"  {arrived}")
    for note in explanation.report.notes:
        typer.echo(f"  note: {note}")
    for card in cards:
        typer.echo("\n".join(f"  {line}" for line in str(card).splitlines()))
    typer.echo(f"  -> {folder / 'figure.png'}")
    if multilabel:
        typer.echo(f"  -> {folder / 'segmentation.png'}")
