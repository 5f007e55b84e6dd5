"""Self-supervised tasks: RotNet's rotations, SeLa's self-labels, SCAN's two steps.

A task is an `nn.Module` that holds the network and all other state, so that its `state_dict` is all there is to save.
It computes the loss of a batch, and scores on held-out images:

    >>> task = Rotations(net, store, network, Options())
    >>> task.begin(epoch=0)
    >>> task.loss(positions=[3, 1, 4], generator=generator).backward()
    >>> task.scores()
    {'val_loss': 1.21, 'rotation_accuracy': 0.44}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from classlens.selfsup.collection import Part, Store
from classlens.selfsup.networks import SmallNetwork, TwoParts
from classlens.selfsup.scores import chance_purity, mutual_information, purity
from classlens.selfsup.sinkhorn import self_labels
from classlens.selfsup.views import centre, crops, other_colours, quarter_turns

_AT_ONCE = 64  # images per batch without training
_MEASURED = 2000  # held-out images for the scores of an epoch


@dataclass(frozen=True)
class Options:
    """Hyperparameters of the recipes; the defaults are those of the papers where they suit a small network."""

    clusters: int = 10
    neighbours: int = 20  # SCAN: of each image
    entropy: float = 5.0  # SCAN: weight of the entropy, which spreads images over all clusters
    temperature: float = 0.5  # of the contrast
    projection: int = 64  # SCAN's pretext task: dimensions in which views are compared


class Task(nn.Module):
    """What the tasks share: the images, and forward passes over them. After training, only the net is kept."""

    def __init__(self, net: TwoParts, store: Store, network: SmallNetwork, options: Options) -> None:
        super().__init__()
        self.net = net
        self.store = store
        self.network = network
        self.options = options

    def prepare(self) -> None:
        """Called before the first epoch; not again when a training is resumed."""

    def begin(self, epoch: int) -> None:
        """Called before each epoch."""

    def loss(self, positions: Sequence[int], generator: Generator) -> Tensor:
        """The loss of the training images at these positions."""
        raise NotImplementedError

    def scores(self) -> dict[str, float]:
        """The scores on held-out images, in eval mode."""
        raise NotImplementedError

    def crops(self, positions: Sequence[int], scale: tuple[float, float], generator: Generator) -> Tensor:
        """Random crops of training images, in [0,1]."""
        return crops(self._pixels(self.store.train, positions), self.network.side, scale, generator)

    def normalise(self, images: Tensor) -> Tensor:
        return self.network.preprocess.normalise(images)

    def views(self, positions: Sequence[int], generator: Generator) -> Tensor:
        """Network input: random crops with colour augmentation, for instance discrimination."""
        return self.normalise(other_colours(self.crops(positions, (0.45, 1.0), generator), generator))

    def whole(self, part: Part, count: int | None = None) -> Iterator[Tensor]:
        """The (first `count`) images of a part without augmentation, in batches."""
        for start in range(0, min(len(part), count or len(part)), _AT_ONCE):
            stop = min(start + _AT_ONCE, count or len(part), len(part))
            yield self.normalise(centre(self._pixels(part, range(start, stop)), self.network.side))

    def outputs(self, make: Callable[[Tensor], Tensor], part: Part, count: int | None = None) -> Tensor:
        """The outputs of the head, or of the body, for all images of a part (on the CPU), in eval mode."""
        was = self.training
        self.eval()
        with torch.no_grad():
            found = torch.cat([make(images).cpu() for images in self.whole(part, count)])
        self.train(was)
        return found

    def cluster_scores(self) -> dict[str, float]:
        """How well the clusters of the held-out images fit their labels, if any, and how many clusters are used."""
        val = self.store.val
        count = min(len(val), _MEASURED)
        clusters = self.outputs(self.net, val, count).argmax(1).numpy()
        used = {"clusters_used": float(len(np.unique(clusters)))}
        if not val.labelled:
            return used
        labels = val.labels[:count]
        return used | {
            "purity": purity(clusters, labels),
            "purity_by_chance": chance_purity(clusters, labels),
            "nmi": mutual_information(clusters, labels),
        }

    def _pixels(self, part: Part, positions: Sequence[int]) -> Tensor:
        # Sorted, so that the file is read in one direction.
        order = np.argsort(np.asarray(positions), kind="stable")
        pixels = np.empty((len(order), *part.pixels.shape[1:]), np.uint8)
        pixels[order] = part.pixels[np.asarray(positions)[order]]
        return torch.from_numpy(pixels).to(self.net.head.weight.device)


class Rotations(Task):
    """RotNet: predict which of four angles an image was rotated by (Gidaris et al., 2018)."""

    def loss(self, positions: Sequence[int], generator: Generator) -> Tensor:
        images, turns = quarter_turns(self.normalise(self.crops(positions, (0.7, 1.0), generator)))
        return F.cross_entropy(self.net(images), turns)

    def scores(self) -> dict[str, float]:
        logits, turns = [], []
        for images in self.whole(self.store.val, _MEASURED):
            turned, labels = quarter_turns(images)
            logits.append(self.net(turned))
            turns.append(labels)
        found, truth = torch.cat(logits), torch.cat(turns)
        accuracy = (found.argmax(1) == truth).double().mean()
        return {"val_loss": float(F.cross_entropy(found, truth)), "rotation_accuracy": float(accuracy)}


class SelfLabels(Task):
    """SeLa: learn the labels that Sinkhorn-Knopp assigns from the network's outputs before each epoch."""

    def __init__(self, net: TwoParts, store: Store, network: SmallNetwork, options: Options) -> None:
        super().__init__(net, store, network, options)
        self.labels: Tensor
        self.register_buffer("labels", torch.full((len(store.train),), -1))
        self.register_buffer("changed", torch.tensor(1.0))

    def begin(self, epoch: int) -> None:
        scores = self.outputs(lambda images: self.net(images).log_softmax(1), self.store.train)
        labels = self_labels(scores).to(self.labels.device)
        self.changed = (labels != self.labels).float().mean()
        self.labels = labels

    def loss(self, positions: Sequence[int], generator: Generator) -> Tensor:
        return F.cross_entropy(self.net(self.views(positions, generator)), self.labels[list(positions)])

    def scores(self) -> dict[str, float]:
        return {"labels_changed": float(self.changed)} | self.cluster_scores()


class Contrast(Task):
    """SCAN's first step: two views of an image are closer than views of other images (SimCLR; Chen et al., 2020)."""

    def __init__(self, net: TwoParts, store: Store, network: SmallNetwork, options: Options) -> None:
        super().__init__(net, store, network, options)
        width = net.head.in_features
        self.project = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, options.projection))

    def loss(self, positions: Sequence[int], generator: Generator) -> Tensor:
        views = torch.cat([self.views(positions, generator) for _ in range(2)])
        return contrast_loss(self.project(self.net.features(views)), self.options.temperature)

    def scores(self) -> dict[str, float]:
        """Whether the nearest training images of a held-out image have its label."""
        train, val = self.store.train, self.store.val
        if not (train.labelled and val.labelled):
            return {}
        known, asked = (
            F.normalize(self.outputs(self.net.features, part, count))
            for part, count in ((train, None), (val, _MEASURED))
        )
        nearest = (asked @ known.T).topk(min(self.options.neighbours, len(known)), 1).indices  # (val, k)
        votes = F.one_hot(torch.from_numpy(train.labels.copy())[nearest]).sum(1)
        return {"neighbour_accuracy": float((votes.argmax(1).numpy() == val.labels[: len(asked)]).mean())}


class Clusters(Task):
    """SCAN's second step: an image and its neighbours belong to one cluster (Van Gansbeke et al., 2020)."""

    def __init__(self, net: TwoParts, store: Store, network: SmallNetwork, options: Options) -> None:
        super().__init__(net, store, network, options)
        self.neighbours: Tensor
        count = min(options.neighbours, len(store.train) - 1)
        self.register_buffer("neighbours", torch.zeros(len(store.train), count, dtype=torch.long))

    def prepare(self) -> None:
        """Find the neighbours, in the latent space of the first step."""
        latents = F.normalize(self.outputs(self.net.features, self.store.train))
        self.neighbours = nearest_others(latents, self.neighbours.shape[1]).to(self.neighbours.device)

    def loss(self, positions: Sequence[int], generator: Generator) -> Tensor:
        column = torch.randint(self.neighbours.shape[1], (len(positions),), generator=generator)
        beside = self.neighbours[list(positions), column.to(self.neighbours.device)].tolist()
        images = torch.cat([self.views(positions, generator), self.views(beside, generator)])
        anchors, others = self.net(images).chunk(2)
        return scan_loss(anchors, others, self.options.entropy)

    def scores(self) -> dict[str, float]:
        return self.cluster_scores()


def contrast_loss(projections: Tensor, temperature: float) -> Tensor:
    """NT-Xent over 2B projections, where i and B+i are two views of one image."""
    z = F.normalize(projections)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf"))
    partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return F.cross_entropy(similarity, partner)


def scan_loss(anchors: Tensor, neighbours: Tensor, entropy: float) -> Tensor:
    """-mean log <p, q> - entropy * H(mean p), with the probabilities p of images and q of their neighbours."""
    p, q = anchors.softmax(1), neighbours.softmax(1)
    agreement = (p * q).sum(1).clamp(min=1e-8).log().mean()
    mean = p.mean(0).clamp(min=1e-8)
    return -agreement + entropy * (mean * mean.log()).sum()


def nearest_others(latents: Tensor, count: int, block: int = 1000) -> Tensor:
    """(N,count): the positions of the rows with the largest inner products, never a row itself."""
    found = []
    for start in range(0, len(latents), block):
        similarity = latents[start : start + block] @ latents.T
        rows = torch.arange(len(similarity))
        similarity[rows, rows + start] = float("-inf")
        found.append(similarity.topk(count, 1).indices)
    return torch.cat(found)
