"""The two streams of AGF: the gradients of a score, and the relevance that starts from them.

Every variant opens the streams, sweeps once with its own rules, and returns the result:

    streams = open_streams(case, tape, top=head_layers(tape), full=deep, score=terms.above_rivals)
    sweep = propagate(tape, streams.start, rules.choose, ledger=streams.ledger, watch=streams.watch)
    return streams.result(sweep, sweep.relevance)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from classlens.core.capture import Node, Point, Tape, Value
from classlens.core.rules.generic import Shares
from classlens.core.rules.propagate import Ledger, Sweep, Watch, forgetting
from classlens.core.targets import OfClass, picked
from classlens.errors import TargetError
from classlens.methods.layers import evidence_at, gradient_points, own_gradient
from classlens.methods.registry import Case, LayerTrace, Result, balance, of_colours

PAPER = "Gur, Ali, Wolf: Visualization of Supervised and Self-Supervised Neural Networks via AGF, AAAI 2021"
FAMILY = "attribution-guided factorisation"
_SATURATED = (
    "a score is saturated: it has no gradient at such large logits, so its map is 0; explain a mean instead of a sum, "
    "or use agf, whose score does not saturate"
)


@dataclass(frozen=True)
class Streams:
    """The two streams at the top of the network, and the records that the sweep writes."""

    tape: Tape
    gradients: dict[Point, Tensor]  # of the score, at the layers that need them
    start: dict[Value, Tensor]  # the initial relevance, x * gradient at the input of the head
    ledger: Ledger
    trace: dict[Node, dict[str, Tensor]] | None  # the terms of each layer; None: not requested
    notes: tuple[str, ...] = ()
    done: Callable[[Node], None] | None = None  # called by the sweep after each node

    def gradient(self, node: Node) -> Tensor:
        """The gradient at the input of a layer, through that layer."""
        return own_gradient(self.tape, node, self.gradients)

    def note(self, node: Node, **terms: Tensor) -> None:
        """Keep a layer's terms for the trace."""
        if self.trace is not None:
            self.trace.setdefault(node, {}).update(terms)

    @property
    def watch(self) -> Watch | None:
        """The callback of the sweep after each step: keeps the relevance that left the node."""
        return None if self.trace is None else self._note_shares

    def _note_shares(self, node: Node, arrived: Sequence[Tensor | None], shares: Shares) -> None:
        for value, share in zip(node.inputs, shares, strict=True):
            if share is not None:
                at = node.inputs.index(value)
                self.note(node, **{f"Phi_{at}" if at else "Phi": share})

    def result(self, sweep: Sweep, relevance: Tensor) -> Result:
        """Relevance (K,B,C,H,W), summed over colours, with the sweep's balance, its notes and the trace."""
        packed = of_colours(relevance, balance(sweep, self.start))
        layers = tuple(LayerTrace(node.module, node.op, terms) for node, terms in (self.trace or {}).items())
        return replace(packed, notes=(*self.notes, *sweep.notes), trace=layers)


def open_streams(case: Case, tape: Tape, top: list[Node], full: Iterable[Node], score: OfClass) -> Streams:
    """The score, evidence at the inputs of `top`, and gradients at `top` and `full`: one backward pass per class."""
    logits = tape.logits.detach().requires_grad_()
    alone = logits.shape[1] == 1  # no other class to compare with: the logit itself is the score
    if not alone:
        _refuse_equal(logits, (case.targets >= 0).any(1))
    with torch.enable_grad():
        scores = case.scores(logits, picked if alone else score)  # for a callable, its value
        cotangents = torch.stack([torch.autograd.grad(s.sum(), logits, retain_graph=True)[0] for s in scores.unbind(1)])
    gradients = tape.gradients(cotangents, gradient_points(tape, [*top, *full]), keep=not case.once)
    start = evidence_at(tape, top, gradients)
    notes = (_SATURATED,) if not cotangents.flatten(2).any(2).all() else ()
    done = forgetting(case.tape, gradients) if case.once else None
    return Streams(tape, gradients, start, Ledger(len(case.images)), {} if case.trace else None, notes, done)


def _refuse_equal(logits: Tensor, asked: Tensor) -> None:
    """Refuse images that were asked for a class, though the network does not tell classes apart in them."""
    equal = (logits == logits[:, :1]).all(1) & asked.to(logits.device)
    if equal.any():
        row = int(equal.nonzero()[0])
        raise TargetError(f"the logits of image {row} are all equal: the model finds no class, so there is no evidence")
