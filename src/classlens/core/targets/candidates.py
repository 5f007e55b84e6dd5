"""The detections in what a detector returns, with the class logit of each before any selection.

A detector scores candidates and keeps a few of them. Keeping is selection, not arithmetic: the kept box is one
candidate, and its evidence is that of the candidate's own class logit. Known results:

| result | where the logit is |
|---|---|
| a list of dicts with boxes, labels and scores | behind the score: followed back to the layer that gives it |
| a dict with `logits` (B,N,C) and `pred_boxes` (B,N,4) | `logits` |
| boxes and scores in one tensor, (B,4+C,N) or (B,N,5+C) | behind the score |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from classlens.core.capture import Node, Pick, described, last_linear
from classlens.core.capture.backward import gradients
from classlens.core.capture.reading import before, chosen_values, last_of_calls
from classlens.core.targets.answers import Answers
from classlens.core.targets.questions import Box
from classlens.errors import TargetError

OVERLAP, LEAST_SCORE, MOST = 0.5, 0.05, 300  # of the detections that are kept


@dataclass(frozen=True, eq=False)
class Detection:
    """One detected object."""

    box: Box
    label: int
    score: float
    logit: Pick | Tensor  # where its class logit is, or its live score, from which the logit is found
    corners: Tensor  # (4,), live: left, top, right, bottom


def detections(answers: Answers, image: int) -> list[Detection]:
    """The detections of an image, the highest score first."""
    result = answers.result
    if not has_boxes(answers):
        raise TargetError(
            "boxes need a detector: a list of dicts with boxes, labels and scores, a dict with logits and pred_boxes, "
            f"or one tensor (B,4+classes,candidates); this network returns {described(result)}"
        )
    if isinstance(result, dict):
        return _of_queries(answers, result["logits"], result["pred_boxes"][image], image)
    if not isinstance(result, Tensor) and isinstance(result[image], dict):
        return _kept_by_the_network(result[image])
    return _in_one_tensor(answers, (result if isinstance(result, Tensor) else result[0])[image])


def has_boxes(answers: Answers) -> bool:
    """Whether the network answers as a detector does, in one of the three ways."""
    result = answers.result
    if isinstance(result, dict):
        return {"logits", "pred_boxes"} <= result.keys()
    first = result[0] if isinstance(result, tuple | list) and result else result
    if isinstance(first, dict):
        return len(result) == answers.images and {"boxes", "labels", "scores"} <= first.keys()
    return isinstance(first, Tensor) and first.dim() == 3 and first.shape[0] == answers.images


def _kept_by_the_network(one: dict[str, Any]) -> list[Detection]:
    scores, boxes, labels = (one[name].detach() for name in ("scores", "boxes", "labels"))
    return [
        Detection(Box(*boxes[i].tolist()), int(labels[i]), float(scores[i]), one["scores"][i], one["boxes"][i])
        for i in scores.argsort(descending=True).tolist()
    ]


def _of_queries(answers: Answers, of_all: Tensor, boxes: Tensor, image: int) -> list[Detection]:
    """Boxes are (centre x, centre y, width, height), relative to the image. A last class may mean "no object"."""
    logits = of_all[image]
    labels, classes = answers.models.labels, logits.shape[1]
    if labels is None or len(labels) not in (classes, classes - 1):
        raise TargetError(
            f"the detector has {classes} outputs for each box: give its labels, without which it is unknown whether "
            "the last output means that there is no object"
        )
    values = logits.detach().double()
    chances = values.softmax(1)[:, :-1] if len(labels) == classes - 1 else values.sigmoid()
    height, width = answers.size
    corners = _corners(boxes) * boxes.new_tensor([width, height, width, height])
    scores, best = chances.max(1)
    chosen = answers.recorder.values.get(id(of_all)) in chosen_values(answers.recorder.nodes)

    def logit(i: int) -> Pick:
        return Pick(("logits",), index=(i, int(best[i])), chosen=chosen)

    return [
        Detection(Box(*corners[i].tolist()), int(best[i]), float(scores[i]), logit(i), corners[i])
        for i in scores.argsort(descending=True).tolist()
        if scores[i] >= LEAST_SCORE
    ]


def _in_one_tensor(answers: Answers, rows: Tensor) -> list[Detection]:
    """Boxes (centre x, centre y, width, height) in pixels, then a probability for each class.

    (4+C,N) has a candidate in each column; (N,5+C) has one in each row, with a probability of any object before the
    classes.
    """
    if rows.shape[0] < rows.shape[1]:
        boxes, classes, chances = rows[:4].T, rows[4:].T, rows[4:].T
    else:
        boxes, classes, chances = rows[:, :4], rows[:, 5:], rows[:, 5:] * rows[:, 4:5]
    if rows.shape[1] == 6 < rows.shape[0] and torch.equal(rows[:, 5].detach(), rows[:, 5].detach().round()):
        raise TargetError(
            f"the output {tuple(rows.shape)} of one image seems to hold boxes that were selected already, with a score "
            "and a class number each; give the output before the selection with output="
        )
    low, high = chances.detach().aminmax()
    if low < 0 or high > 1 or (boxes[:, 2:] < 0).any():
        raise TargetError(f"the output {tuple(rows.shape)} of one image does not hold boxes and probabilities")
    scores, best = chances.detach().max(1)
    kept = suppressed(_corners(boxes.detach()), scores, best)
    corners = [_corners(boxes[i : i + 1])[0] for i in kept]
    return [
        Detection(Box(*box.tolist()), int(best[i]), float(scores[i]), classes[i, best[i]], box)
        for i, box in zip(kept, corners, strict=True)
    ]


def _corners(boxes: Tensor) -> Tensor:
    centre, size = boxes[:, :2], boxes[:, 2:]
    return torch.cat([centre - size / 2, centre + size / 2], 1)


def suppressed(boxes: Tensor, scores: Tensor, labels: Tensor) -> list[int]:
    """Non-maximum suppression: indices of the boxes without a better one of the same class on the same place."""
    kept: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if scores[i] < LEAST_SCORE or len(kept) == MOST:
            break
        rivals = [j for j in kept if labels[j] == labels[i]]
        if not rivals or overlap(boxes[i : i + 1], boxes[rivals]).max() <= OVERLAP:
            kept.append(i)
    return kept


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes (n,4) and (m,4) as (n,m).

    >>> overlap(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[0.0, 0, 2, 2], [1, 0, 3, 2]]))
    tensor([[1.0000, 0.3333]])
    """
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    both = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (a, b)]
    return both / (areas[0][:, None] + areas[1][None] - both).clamp(min=torch.finfo(a.dtype).tiny)


# ------------------------------------------------------------------------------------------------- the logit of a box


def logit_of(answers: Answers, detection: Detection, image: int, number: int) -> Pick:
    """Where the class logit of a detection is.

    A live score is a squashed logit that was selected. Its gradient at the outputs of the last weight layers is
    positive at its own class logit: that one is taken, in the head with most outputs (the others may hold how
    centred a box is).
    """
    if isinstance(detection.logit, Pick):
        return detection.logit
    found = last_gradients(answers, detection.logit)
    reached = {node: gradient for node, gradient in found.items() if (gradient > 0).any()}
    if not reached:
        raise TargetError(
            f"the score of box {number} has no gradient at any layer (it is saturated at {detection.score:.6g}); ask "
            "for another box"
        )
    node = _of_classes(answers.recorder.nodes, reached)
    return pick_at(answers, node, reached[node].argmax(), reached[node].shape)


def last_gradients(answers: Answers, number: Tensor) -> dict[Node, Tensor]:
    """The gradient of a live number of the result at the outputs of the last weight layers before it."""
    recorder = answers.recorder
    nodes = last_linear(recorder.nodes, _recorded(answers, number))
    edges: Any = [node.outputs[0].edge for node in nodes]
    found = gradients([number], edges, [torch.ones_like(number)], recorder.odd, retain_graph=True, allow_unused=True)
    return {node: gradient for node, gradient in zip(nodes, found, strict=True) if gradient is not None}


def pick_at(answers: Answers, node: Node, place: Tensor, shape: torch.Size) -> Pick:
    """Where one number of a layer's output is, by its place in the flattened output."""
    nodes = answers.recorder.nodes
    index = tuple(int(i) for i in torch.unravel_index(place, shape))
    call = last_of_calls(nodes, node.module).index(node)
    if shape[0] == answers.images:
        return Pick(layer=node.module, call=call, index=index[1:], chosen=node.outputs[0] in chosen_values(nodes))
    if answers.images > 1:
        raise TargetError("this detector chooses its candidates from the images; ask about one image at a time")
    return Pick(layer=node.module, call=call, index=index, rows=True)


def heads_of(nodes: Sequence[Node], reached: Iterable[Node]) -> list[Node]:
    """The layers with no other of them after them: a result also reaches the layers before the heads."""
    reached = list(reached)
    return [node for node in reached if not any(node in before(nodes, other) for other in reached if other != node)]


def _of_classes(nodes: Sequence[Node], reached: dict[Node, Tensor]) -> Node:
    """The layer of the class logits: with no other layer between it and the score, and with most outputs.

    The layers before the heads may have more outputs than there are classes.
    """
    heads = heads_of(nodes, reached)
    outputs = {node: node.outputs[0].shape[-1 if node.op == "linear" else 1] for node in heads}
    largest = [node for node in heads if outputs[node] == max(outputs.values())]
    if len(largest) > 1:
        names = " and ".join(sorted({node.module for node in largest}))
        raise TargetError(
            f"the score of the box depends on {names} alike, so its class logit cannot be told from others"
        )
    return largest[0]


def _recorded(answers: Answers, score: Tensor) -> Any:
    """The recorded value that a score was taken from after the forward pass."""
    by_node = {value.edge.node: value for value in answers.recorder.values.values() if value.edge is not None}
    node: Any = score.grad_fn
    while node is not None and node not in by_node:
        node = next((following for following, _ in node.next_functions if following is not None), None)
    if node is None:
        raise TargetError("what this detector returns has no gradient there, so it cannot be explained")
    return by_node[node]
