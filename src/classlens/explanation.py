"""The entry point: `explain(model, images, targets)` returns an `Explanation`."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from classlens import chunks
from classlens.core.capture import Picker, Tape, autocast_off, of_labels, placed, record, unwrap
from classlens.core.targets import Class, Contrast, Models, RatherThan, Target, Targets
from classlens.core.targets.ask import ask, embedder
from classlens.data.batches import as_batch, pictures, stacked
from classlens.data.images import check_batch, rescaled
from classlens.errors import ImageError, MethodError, ModelError, NotFiniteError, TargetError
from classlens.machine import onednn_errors
from classlens.methods import METHODS, UNRELIABLE, Case, LayerTrace, Method, Result, check_options, resolve
from classlens.models.choice import Choice, named
from classlens.models.loaded import LoadedModel, described, probabilities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from classlens.trust import Trust


@dataclass(frozen=True)
class Report:
    """How exact a propagation was, and how long it took.

    Starting relevance either arrives at the image or is absorbed on the way, mostly by biases. `conservation` is the
    relevance that is unaccounted for, |arrived + absorbed - started| relative to the sum of magnitudes (at the top or
    over the image, whichever is larger): 0 means that nothing is unaccounted for, not that everything arrived.
    `arrived_share` is how much arrived. All are NaN for methods that do not propagate relevance.
    """

    conservation: Tensor  # (B,K) float64
    started: Tensor  # (B,K) starting relevance
    arrived: Tensor  # (B,K) sum of the relevance at the image
    absorbed: Tensor  # (B,K) relevance that stayed in biases, or was absorbed on purpose
    ops: dict[str, int]  # operations of the forward pass, and how often
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def arrived_share(self) -> Tensor:
        """(B,K) in [0,1]: arrived / (arrived + absorbed), how much of the accounted relevance is in the map.

        >>> explain(load(), "photo.jpg").report.arrived_share      # the rest stayed in the biases of fifty layers
        tensor([[8.8e-05]], dtype=torch.float64)

        NaN also where the two have different signs, so that neither is a share of the whole.
        """
        share = self.arrived / (self.arrived + self.absorbed)
        return torch.where(self.arrived * self.absorbed < 0, torch.nan, share)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes that say why the maps are unreliable; figures repeat that they are."""
        return tuple(note for note in self.notes if note.endswith(UNRELIABLE))

    def to_json(self) -> dict[str, Any]:
        numbers = {
            name: [[None if x != x else x for x in row] for row in getattr(self, name).tolist()]
            for name in ("conservation", "started", "arrived", "absorbed", "arrived_share")
        }
        return numbers | {"ops": self.ops, "seconds": self.seconds, "notes": list(self.notes)}


@dataclass(frozen=True, eq=False)
class Call:
    """What was explained and how, to explain it again: `Explanation.trust` does."""

    model: nn.Module | LoadedModel
    images: Tensor  # (B,C,H,W), the network's input
    output: Picker
    options: Mapping[str, Any]  # of the method


@dataclass(frozen=True, repr=False)
class Explanation:
    """Signed evidence maps with everything needed to interpret them. In a notebook it shows its figure.

    >>> e = explain(model, images, targets=top(2))
    >>> e.maps.shape, e.targets.shape
    (torch.Size([1, 2, 224, 224]), torch.Size([1, 2]))
    """

    maps: Tensor  # (B,K,H,W), raw: positive for the class, negative against it
    targets: Tensor  # (B,K) class indices; negative if the target is not a class
    logits: Tensor  # (B,C)
    pictures: Tensor  # (B,3,H,W) in [0,1]: what the network saw
    labels: tuple[str, ...] | None
    method: str
    signed: bool
    report: Report
    trace: tuple[LayerTrace, ...] = ()
    model: str = ""
    asked: tuple[tuple[Target, ...], ...] = ()  # K targets for each image; if empty, the classes in `targets`
    multilabel: bool = False  # an independent probability for each class (sigmoid)
    call: Call | None = field(default=None, compare=False)  # None: not made by `explain`

    def label(self, class_index: int) -> str:
        """The name of a class, or `class 7` if the model has no names."""
        return self.labels[class_index] if self.labels else f"class {class_index}"

    def target(self, row: int = 0, k: int = 0) -> Target:
        """The target of a map, an object of `classlens.core.targets`."""
        return self.asked[row][k] if self.asked else Class(int(self.targets[row, k]))

    def name(self, row: int = 0, k: int = 0) -> str:
        """The target in words: "tabby", "tabby rather than Egyptian cat", or the name of a callable."""
        return self.target(row, k).words(self.label)

    def question(self, row: int = 0, k: int = 0) -> str:
        """The question that a map answers.

        >>> explain(m, "photo.jpg", "tabby", rather_than="Egyptian cat").question()
        'evidence for tabby rather than Egyptian cat'
        """
        return f"evidence for {self.name(row, k)}"

    def probability(self, row: int, k: int) -> float:
        """The probability of the k-th explained class of an image; NaN if the target is a callable.

        For a multi-label network it is the sigmoid, for others the softmax.
        """
        if self.targets[row, k] < 0:
            return float("nan")
        return float(probabilities(self.logits[row], self.multilabel)[self.targets[row, k]])

    def likeliest_rival(self, row: int, k: int) -> tuple[int, float] | None:
        """The most likely rival of the k-th target, and its probability; None if it has no rivals."""
        target = self.target(row, k)
        if not isinstance(target, Contrast):
            return None
        found = probabilities(self.logits[row], self.multilabel)
        rival = max(target.among(len(found)), key=found.tolist().__getitem__)
        return rival, float(found[rival])

    def figure(self, scale: str | float = "own") -> Figure:
        """A figure of the images and overlays: `e.figure().savefig("e.png")`.

        `scale="shared"` draws all maps on one scale, with numbers on the colour bar, so that amounts can be compared.
        """
        from classlens import render

        return render.figure(self, scale)

    def trust(self, row: int = 0, k: int = 0, *, seed: int = 0) -> Trust:
        """How far to trust a map: a verdict with its reasons, from tests on the network itself.

        >>> explain(m, "photo.jpg").trust().verdict
        'trust'
        """
        import classlens  # `classlens.trust` explains the image again, so it imports this module

        return classlens.trust.judge(self, row, k, seed=seed)

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write overlays and figure (PNG), maps (npz) and report (JSON) to a folder; returns the paths."""
        from classlens import render

        return render.save(self, folder)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        from classlens import render

        return render.notebook_png(self.figure())

    def __repr__(self) -> str:
        batch, classes = self.targets.shape
        names = ", ".join(dict.fromkeys(self.name(row, k) for row in range(batch) for k in range(classes)))
        return f"<Explanation by {self.method} of {self.model}: maps {tuple(self.maps.shape)} for {names}>"


def explain(
    model: nn.Module | LoadedModel,
    images: Any,
    targets: Targets = None,
    method: str | Choice = "agf",
    *,
    rather_than: RatherThan = None,
    trace: bool = False,
    output: Picker = None,
    multilabel: bool | None = None,
    preprocess: Callable[..., Any] | None = None,
    labels: Sequence[str] | None = None,
    **options: Any,
) -> Explanation:
    """Show where a network finds each class.

    >>> m = classlens.load("efficientnet-lite0")
    >>> e = classlens.explain(m, "photo.jpg", targets=["tabby", "espresso"])
    >>> e.figure().savefig("two-classes.png")
    >>> e = classlens.explain(m, "photo.jpg", "tabby", rather_than="Egyptian cat")      # another question

    `model` is any `nn.Module` in eval mode, which is left unchanged, or a loaded model. `images` is a preprocessed
    tensor (B,3,H,W), array or batch of a processor. With a loaded model, or with `preprocess` (any function of an
    image, such as `weights.transforms()`), also file paths, PIL images or arrays of pixels. `targets`: None (the
    most likely class) | index | name | list | tensor (B,) or (B,K) | `classlens.top(k)` | a callable that computes a
    number from one image's logits, such as `lambda y: y[281:286].logsumexp(0)` or a target of pytorch-grad-cam |
    a question to another kind of network: `classlens.region`, `detection`, `box`, `like`, `text`, `neuron`.
    `method` is a name from `classlens.METHODS`; pass its options as keywords or in brackets,
    "agf-release(without=A)"; "auto" is the one that `classlens choose` stored for this network. `output` selects the
    logits if the model returns a dict or a tuple. `multilabel=True`: each class has an independent probability
    (sigmoid); a loaded model, or one that ends with a sigmoid, sets this itself. `trace=True` keeps the terms of every
    layer.

    A map shows the evidence for the class, even where it is also evidence for other classes. `rather_than` asks for
    the evidence for the class over its rivals: an index, a name, a list of them, or "rivals" for all other classes.
    """
    begun = time.perf_counter()
    model = described(model, preprocess, labels)
    method = named(method, model)
    asked: dict[str, Any] = {"rather_than": rather_than, "trace": trace, "output": output, "multilabel": multilabel}
    case, result = run(model, images, targets, method, **asked, **options)
    report = _report(result, case.tape, time.perf_counter() - begun)
    return _packed(case, result, method, report, Call(model, case.images, output, options))


def _packed(case: Case, result: Result, method: str, report: Report, call: Call) -> Explanation:
    loaded = call.model if isinstance(call.model, LoadedModel) else None
    return Explanation(
        maps=result.maps.detach(),
        targets=_classes(case),
        logits=case.tape.logits,
        pictures=pictures_of(case.images, loaded),
        labels=None if loaded is None else loaded.labels,
        method=method,
        signed=resolve(method)[0].signed,
        report=report,
        trace=result.trace,
        model=loaded.name if loaded is not None else type(case.model).__name__,
        asked=_asked(case),
        multilabel=case.multilabel,
        call=call,
    )


def run(
    model: nn.Module | LoadedModel, images: Any, targets: Targets, method: str, *, rather_than: RatherThan = None,
    trace: bool = False, output: Picker = None, multilabel: bool | None = None, recorded: Tape | None = None,
    **options: Any,
) -> tuple[Case, Result]:  # fmt: skip
    """Run a method without packing an `Explanation`: returns the case and the method's result; for adapters.

    `recorded` is the tape of a forward pass of these images, to share it among several methods. Then maps that are not
    finite are returned too, so that one bad image does not affect the others.
    """
    chosen, written = resolve(method)
    options = written | options
    check_options(chosen, options)
    network, batch, loaded = prepare(model, images)
    # Methods need gradients, which the caller's inference mode would forbid.
    with onednn_errors(), torch.inference_mode(False):
        embed = embedder(network, lambda image: prepare(loaded or network, image)[1], output)
        models = Models() if loaded is None else Models(loaded.labels, embed_text=loaded.embed_text)
        taped = functools.partial(chunks.tape_of, chosen, network, batch)
        found = ask(network, batch, targets, replace(models, embed=embed), output, rather_than, taped, recorded)
        if not chosen.scalars:
            _check_for_classes_alone(chosen, found.tape.logits.shape[1], found.scalars)
        if multilabel is None:
            multilabel = of_labels(found.tape.ends, found.tape.logits) or (loaded is not None and loaded.multilabel)
        case = Case(
            unwrap(network), batch, found.tape, found.targets, found.output, trace, found.scalars, multilabel,
            once=recorded is None,
        )  # fmt: skip
        with autocast_off(batch.device):
            result = chunks.run(chosen, case, options, found.whole)
    if recorded is None:
        _check_maps(result.maps, batch, chosen.name)
    return case, replace(result, notes=(*result.notes, *_empty(case, result, chosen)))


def _empty(case: Case, result: Result, chosen: Method) -> tuple[str, ...]:
    """A note if a map is 0 everywhere: nothing is drawn, which must not be read as an answer."""
    nothing = ~result.maps.flatten(2).any(2)  # (B,K)
    if not nothing.any() or not case.images.any():
        return ()
    count = f"{int(nothing.sum())} of {nothing.numel()} maps are" if nothing.numel() > 1 else "the map is"
    why = "" if chosen.signed else f" ({chosen.name} shows only what speaks for the target)"
    return (f"{count} 0 everywhere: {chosen.name} finds no evidence{why}; try another method, such as agf",)


def _check_for_classes_alone(chosen: Method, outputs: int, scalars: tuple[Target, ...]) -> None:
    """Refuse targets that a method cannot explain because it contrasts a class with the others by construction."""
    if outputs == 1 and not scalars:
        raise TargetError(f"{chosen.name} contrasts a class with the others, but this network has only one output")
    if not scalars:
        return
    if isinstance(scalars[0], Contrast):
        others = ", ".join([name for name, method in METHODS.items() if method.scalars and method.class_specific][:5])
        raise MethodError(
            f"{chosen.name} chooses the rivals of a class itself: omit rather_than, or use a method that accepts it, "
            f"such as {others}"
        )
    raise MethodError(
        f"{chosen.name} contrasts a class with the others: give an index, a name, or a callable that returns one logit "
        f"unchanged; {scalars[0].words(str)!r} computes something else"
    )


def _asked(case: Case) -> tuple[tuple[Target, ...], ...]:
    return tuple(tuple(Class(t) if t >= 0 else case.scalars[-1 - t] for t in row) for row in case.targets.tolist())


def _classes(case: Case) -> Tensor:
    """(B,K): the class of each target; for a callable, the negative number that stands for it."""
    found = case.targets.clone()
    for number, target in enumerate(case.scalars):
        if isinstance(target, Contrast):
            found[case.targets == -1 - number] = target.index
    return found


def operations(model: LoadedModel) -> dict[str, int]:
    """The operations of a loaded network's forward pass, most frequent first.

    >>> operations(load("efficientnet-lite0"))
    {'conv2d': 49, 'batch_norm': 49, 'hardtanh': 33, ...}
    """
    weight = next(model.model.parameters())
    found = record(model.model, torch.zeros(1, *model.preprocess.shape).to(weight)).ops()
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def prepare(model: nn.Module | LoadedModel, images: Any) -> tuple[nn.Module, Tensor, LoadedModel | None]:
    """The network, its input on its device, and the loaded model if one was given."""
    loaded = model if isinstance(model, LoadedModel) else None
    network = model.model if isinstance(model, LoadedModel) else model
    if type(network).__name__ == "ExportedProgram":
        raise ModelError("the model is an exported program; give program.module(), the nn.Module in it")
    if not isinstance(network, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; give an nn.Module, or the result of classlens.load()")
    batch = as_batch(images)
    if batch is None:
        if loaded is None:
            raise ImageError("files and pictures need preprocessing: give preprocess=, or a model of classlens.load()")
        batch = stacked([loaded.preprocess(source)[None] for source in pictures(images)])
    batch = check_batch(batch)
    with torch.inference_mode(False):
        return network, placed(network, batch.clone() if batch.is_inference() else batch), loaded


def _check_maps(maps: Tensor, batch: Tensor, method: str) -> None:
    """Refuse maps that are not finite: an overflow in the network may leave the logits finite but not the map."""
    finite = torch.isfinite(maps).flatten(1).all(1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        low, high = batch[row].aminmax()
        raise NotFiniteError(
            f"the map of image {row} by {method} holds NaN or infinite values; its input spans {float(low):.3g} to "
            f"{float(high):.3g}: check the preprocessing and the weights"
        )


def pictures_of(batch: Tensor, loaded: LoadedModel | None) -> Tensor:
    """The images to draw under the maps; if the preprocessing is unknown, the input rescaled to [0,1]."""
    if loaded is not None:
        return loaded.preprocess.restore(batch.float())
    return rescaled(batch.float())


def _report(result: Result, tape: Tape, seconds: float) -> Report:
    b, ops, notes = result.balance, tape.ops(), (*result.notes, *tape.notes)
    if b is None:
        nothing = torch.full(result.maps.shape[:2], torch.nan, dtype=torch.float64)
        return Report(nothing, nothing, nothing, nothing, ops, seconds, notes)
    return Report(b.error(), b.started, b.arrived, b.absorbed, ops, seconds, (*notes, *b.notes()))
