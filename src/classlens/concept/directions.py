"""The concepts of a class at a layer: directions of its features, found by factorising its relevance.

    relevance for and against a class, over pictures (n,2,C,h,w) -> directions of each

Relevance is features times their relevance per activation, so its rows are the relevance-weighted features of places.
Relevance for the class is factorised into concepts for it, relevance against it into concepts against it. A concept
gets its part of the relevance of each unit, and what no concept explains is the rest: the parts and the rest sum to the
relevance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from classlens.concept.factorise import amounts_of, factorise
from classlens.methods.tail import Tail

COUNTS = (3, 4, 5, 6, 8, 10)  # how many concepts for the class may be found; fewer would not divide it
ENOUGH = 0.95  # the fewest concepts that carry this share of what the most would carry are chosen
_MOST_ROWS = 2000  # places that are factorised: those with the most relevance


@dataclass(frozen=True, eq=False)
class Directions:
    """Directions (M,C) for a class, and against it."""

    support: Tensor
    against: Tensor

    def parts(self, relevance: Tensor) -> Tensor:
        """(M,n,C,h,w): the part of each concept of relevance (n,2,C,h,w), those for the class first."""
        support, against = _sides(relevance)
        return torch.cat([parts(support, self.support), -parts(against, self.against)])

    @property
    def signs(self) -> tuple[int, ...]:
        """+1 for each concept for the class, -1 for each against it."""
        return (1,) * len(self.support) + (-1,) * len(self.against)


def fitted(relevance: Tensor, count: int) -> Directions:
    """The directions of the relevance (n,2,C,h,w) of n pictures: `count` for the class, half as many against it."""
    return Directions(supporting(relevance, count), _side(_sides(relevance)[1], (count + 1) // 2))


def supporting(relevance: Tensor, count: int) -> Tensor:
    """(M,C): those for the class alone."""
    return _side(_sides(relevance)[0], count)


def _sides(relevance: Tensor) -> tuple[Tensor, Tensor]:
    """The evidence for the class and the evidence against it, each (n,C,h,w) and not below 0."""
    return relevance[:, 0].clamp(min=0), (-relevance[:, 1]).clamp(min=0)


def _side(relevance: Tensor, count: int) -> Tensor:
    rows = _rows(_evenly(relevance))
    rows = rows[rows.sum(1).topk(min(len(rows), _MOST_ROWS)).indices]
    if not rows.any():
        return relevance.new_zeros(0, relevance.shape[1])
    amounts, directions = factorise(rows, min(count, *rows.shape))
    order = amounts.sum(0).argsort(descending=True)
    order = order[amounts.sum(0)[order] > 0]
    return directions[order].to(relevance)


def parts(relevance: Tensor, directions: Tensor) -> Tensor:
    """(M,n,C,h,w): for each direction, u w (1 or R / reconstruction, if that is less), where R >= 0."""
    n, channels, *places = relevance.shape
    rows = _rows(relevance)
    amounts = amounts_of(rows, directions).to(rows)
    found = amounts.T[:, :, None] * directions[:, None, :].to(rows)
    whole = found.sum(0)
    found = found * torch.where(whole > rows, rows / whole.clamp(min=torch.finfo(rows.dtype).tiny), 1)
    return found.reshape(len(directions), n, *places, channels).movedim(-1, 2)


def _rows(relevance: Tensor) -> Tensor:
    """(n,C,h,w) -> (n h w, C): one row for each place."""
    return relevance.movedim(1, -1).flatten(0, -2)


def _evenly(relevance: Tensor) -> Tensor:
    """Each picture counts the same: its relevance sums to 1."""
    total = relevance.flatten(1).sum(1).clamp(min=torch.finfo(relevance.dtype).tiny)
    return relevance / total.reshape(-1, *[1] * (relevance.dim() - 1))


# ---------------------------------------------------------------------------------------- how well, and how many


def carried(
    tail: Tail, remove: Callable[[Tensor], Tensor], relevance: Tensor, support: Tensor, target: int
) -> tuple[float, float]:
    """The shares of a class's logit that the concepts for it carry, in one picture: kept alone, and removed.

    `remove` takes weights (C,h,w) to the value of the layer with its features times them. 1: the concepts alone give
    the whole logit, and without them nothing of it is left. 0: they are of no use. The logit is measured from that of
    the layer without any features.
    """
    positive = _sides(relevance[None])[0][0]
    held = parts(positive[None], support).sum(0)[0]
    share = torch.where(positive > 0, held / positive.clamp(min=torch.finfo(held.dtype).tiny), 0)
    weights = torch.stack([torch.ones_like(share), torch.zeros_like(share), share, 1 - share])
    with torch.no_grad():
        whole, nothing, kept, removed = (float(tail(remove(one))[0, target]) for one in weights)
    if whole == nothing:
        return 0.0, 0.0
    alone, without = (kept - nothing) / (whole - nothing), (whole - removed) / (whole - nothing)
    return min(max(alone, 0.0), 1.0), min(max(without, 0.0), 1.0)


def likeness(first: Tensor, second: Tensor) -> float:
    """How alike the directions (M,C) of two halves of the pictures are, 0 to 1: the mean cosine of the pairs."""
    a, b = (torch.nn.functional.normalize(one.double(), dim=1) for one in (first, second))
    cosines, found = a @ b.T, []
    for _ in range(min(cosines.shape)):
        row, column = divmod(int(cosines.argmax()), cosines.shape[1])
        found.append(float(cosines[row, column]))
        cosines[row], cosines[:, column] = -1, -1
    return sum(found) / len(found) if found else 0.0
