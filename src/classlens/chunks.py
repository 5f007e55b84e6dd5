"""Explains many classes and images within a memory budget: some at a time, with the results joined.

>>> result = run(METHODS["agf"], case, {}, whole=True)      # 1000 classes, some 20 at a time

Every method treats each class and each image on its own, so the parts give the maps of the whole, up to the rounding
of float32 (1e-5, relative). The budget depends on the machine alone and not on the memory that happens to be free: the
same call is split in the same way, and gives the same bits, every time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from classlens.core.capture import Picker, Tape, footprint, plain_logits, record, record_logits
from classlens.errors import ModelError, TargetError
from classlens.machine import MUCH_MEMORY, check_memory, memory
from classlens.methods import Balance, Case, LayerTrace, Method, Result
from classlens.progress import ticker

MOST = 8 * 2**30  # bytes: more is no faster
TOLERANCE = 1e-3  # between the logits of a batch and of its parts, relative; convolutions round differently
_AT_ONCE = 8  # images that methods send through the network together
_TERMS = 6  # tensors of a layer that a trace keeps
_ACTIVATIONS = 1000  # a forward pass keeps at most so many times the bytes of its input: below that nobody has to ask


def budget() -> int:
    """Bytes that an explanation may take: one half for forward passes, the other for what each class needs."""
    return min(MOST, memory() // 4)


def tape_of(chosen: Method, model: nn.Module, images: Tensor, output: Picker) -> tuple[Tape, bool]:
    """The recorded forward pass, and True; if it needs too much memory only its logits, and False."""
    if len(images) > 1 and images.nbytes * _ACTIVATIONS > budget() // 2:
        try:
            everything, largest = footprint(model, images[:1], output)
        except ModelError:  # it takes no single image, so its batch cannot be split
            everything, largest = 0, 0
        if len(images) * (everything + 8 * largest) > budget() // 2:
            return plain_logits(model, images, output), False
    return (record if chosen.layers else record_logits)(model, images, output), True


def run(chosen: Method, case: Case, options: Mapping[str, Any], whole: bool) -> Result:
    """Run a method on parts that fit into the budget; `whole`: the case holds the forward pass of all its images."""
    sizes = case.tape.sizes() if whole else footprint(case.model, case.images[:1], case.output)
    _check_result(case, sizes[0] if whole else sizes[0] * len(case.images))
    return _by_classes(chosen, case, options) if whole else _by_images(chosen, case, options)


# -------------------------------------------------------------------------------------------------- parts of the work


def _by_classes(chosen: Method, case: Case, options: Mapping[str, Any]) -> Result:
    one = held(chosen, case)
    if case.images.device.type == "cpu" and one > MUCH_MEMORY:
        size = " x ".join(map(str, case.images.shape))
        check_memory(one, f"{chosen.name} with input of {size}")
    at_once = max(1, int(budget() // 2 // one))
    parts = case.targets.split(at_once, 1)
    if len(parts) == 1:
        return chosen.run(case, **options)
    tick, results = ticker(case.targets.shape[1], f"classes by {chosen.name}"), []
    for number, targets in enumerate(parts):
        last = number + 1 == len(parts)  # only then may a method free the buffers of the forward pass
        results.append(chosen.run(replace(case, targets=targets, once=case.once and last), **options))
        for _ in range(targets.shape[1]):
            tick()
    return joined(results, classes=True)


def _by_images(chosen: Method, case: Case, options: Mapping[str, Any]) -> Result:
    everything, largest = footprint(case.model, case.images[:1], case.output)
    # A method shares much of its work among the classes of an image: a few of them at once are worth more than images.
    each = (everything + 8 * largest) * min(case.targets.shape[1], 4)
    at_once = max(1, budget() // 2 // each)
    tick, results = ticker(len(case.images), f"images by {chosen.name}"), []
    for part in _parts(case, at_once):
        tape = (record if chosen.layers else record_logits)(part.model, part.images, part.output)
        _check_independent(tape.logits, part.tape.logits, at_once)
        results.append(_by_classes(chosen, replace(part, tape=tape), options))
        for _ in range(len(part.images)):
            tick()
    return joined(results, classes=False)


def _parts(case: Case, size: int) -> Iterator[Case]:
    logits = case.tape.logits
    for rows in torch.arange(len(case.images)).split(size):
        some = slice(int(rows[0]), int(rows[-1]) + 1)
        output = replace(case.tape.output, kept=logits[some], shape=logits[some].shape)
        tape = Tape((), replace(case.tape.image, kept=case.images[some], shape=case.images[some].shape), output)
        yield replace(case, images=case.images[some], tape=tape, targets=case.targets[some])


def _check_independent(part: Tensor, whole: Tensor, size: int) -> None:
    """Refuse networks in which the images of a batch affect each other: their parts are another batch."""
    if (part - whole).abs().max() > TOLERANCE * whole.abs().max():
        raise ModelError(
            "in this network the images of a batch affect each other, and the whole batch needs too much memory; "
            f"give at most {size} images"
        )


# ------------------------------------------------------------------------------------------------------------- memory


def held(chosen: Method, case: Case) -> int:
    """An upper estimate of the bytes that a method needs for one class of all images.

    Measured: relevance methods keep gradients at most values, and up to eight tensors at the largest one. Gradient
    methods keep gradients at several inputs; `maps` methods only their maps.
    """
    size = case.images.element_size()
    if chosen.holds == "maps":
        return 4 * size * case.images[:, 0].numel()
    if chosen.holds == "inputs":
        return 4 * size * max(len(case.images), _AT_ONCE) * case.images[0].numel()
    everything, largest = case.tape.sizes()
    traced = _TERMS * everything if case.trace else 0
    return 3 * everything // 4 + 8 * largest + traced


def _check_result(case: Case, everything: int) -> None:
    """Refuse a result that no machine of this size can hold: it exists once in parts and once joined."""
    count, (channels, *sides) = case.targets.numel(), case.images.shape[1:]
    size = 2 * case.images.element_size() * count * math.prod(sides) * (1 + channels)
    what = "maps"
    if case.trace:
        size += 2 * _TERMS * everything * case.targets.shape[1]
        what = "traces"
    if size > memory():
        raise TargetError(
            f"the {what} of {count} targets need {size / 2**30:.0f} GB, and this machine has "
            f"{memory() / 2**30:.0f} GB; explain fewer classes or images at once"
        )


# ------------------------------------------------------------------------------------------------------------- joining


def joined(results: Sequence[Result], classes: bool) -> Result:
    """One result of those of parts: other classes of the same images, or other images.

    >>> joined([explain_some, explain_others], classes=True).maps.shape
    torch.Size([1, 1000, 224, 224])
    """
    first, axis = results[0], int(classes)
    balance = None
    if first.balance is not None:
        balances = [result.balance for result in results if result.balance is not None]
        columns = {f.name: torch.cat([getattr(b, f.name) for b in balances], axis) for f in fields(Balance)}
        balance = Balance(**columns)
    colours = [result.colours for result in results if result.colours is not None]
    return Result(
        torch.cat([result.maps for result in results], axis),
        balance,
        tuple(dict.fromkeys(note for result in results for note in result.notes)),
        _joined_traces([result.trace for result in results], 0 if classes else 1),
        torch.cat(colours, axis) if colours else None,
    )


def _joined_traces(traces: Sequence[Sequence[LayerTrace]], axis: int) -> tuple[LayerTrace, ...]:
    """Traces joined along the classes (0) or the images (1) of their terms (K,B,...)."""

    def join(terms: list[Tensor]) -> Tensor:
        dropped = all(term.numel() == 1 and not term.any() for term in terms)  # a single 0, whatever the classes
        return terms[0] if dropped else torch.cat(terms, axis)

    return tuple(
        LayerTrace(layers[0].name, layers[0].op, {t: join([x.terms[t] for x in layers]) for t in layers[0].terms})
        for layers in zip(*traces, strict=True)
    )
