"""Linear probes: how well each stage of a frozen network predicts labels, and where it finds them.

>>> probed = probe_stages("runs/rotnet", "data/voc", "voc", "runs/rotnet-probes")
>>> [(found.stage.name, round(found.score, 2)) for found in probed.stages]
[('features.conv1', 0.13), ('features.conv2', 0.17), ...]
>>> classlens.explain(load_probe("runs/rotnet-probes", "features.conv3"), "photo.jpg")

A probe is a linear layer on the feature map of a stage, averaged over a grid. It is the optimum of a convex loss
(L-BFGS; the weight of the L2 term is chosen on a fifth of the training images), so no stage gains from longer or faster
training.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from classlens.data.layouts import Item
from classlens.errors import DataError, ModelError
from classlens.files import text_hash, write_text
from classlens.models import LoadedModel, load
from classlens.models.cards import write_weights
from classlens.models.network import fingerprint as model_fingerprint
from classlens.progress import Progress, silent
from classlens.selfsup.stages import Probe, Stage, find_stages, pooled, stage_outputs
from classlens.training.data import Data, fingerprint, open_data, pieces, skipped_text, whole_view
from classlens.training.loop import mean_average_precision

PROBES = "probes.json"
_AT_ONCE = 16  # images per batch
_PART = 256  # images per feature file: a stopped run recomputes at most this many
_L2 = (1e-4, 1e-3, 1e-2, 1e-1)  # weights of the L2 term that are tried
_HELD_OUT = 5  # every fifth training image is held out to choose the L2 weight
_ITERATIONS = 100

Features = dict[str, Tensor]  # stage -> (N,D)


@dataclass(frozen=True)
class Found:
    """The result of one probe."""

    stage: Stage
    l2: float
    train_score: float
    score: float  # on held-out images: accuracy, or mAP for several labels per image


@dataclass(frozen=True)
class Probed:
    """All probes of a network."""

    folder: Path
    model: LoadedModel
    labels: tuple[str, ...]
    multilabel: bool
    pool: int
    chance: float
    stages: tuple[Found, ...]
    data: Data

    @property
    def score_name(self) -> str:
        return "mAP" if self.multilabel else "accuracy"

    def probe(self, stage: Stage) -> LoadedModel:
        """The network cut after a stage, for `explain`."""
        return _with_weights(self.model, stage, self.pool, self.labels, self.multilabel, self.folder)


def probe_stages(
    model: str | LoadedModel,
    data: str | Path,
    layout: str,
    out: str | os.PathLike[str],
    *,
    weights: str | None = "default",
    stages: Sequence[str] = (),
    pool: int = 1,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> Probed:
    """Train a probe on each stage and write them to a folder; features are computed once and cached there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for random weights
        loaded = model if isinstance(model, LoadedModel) else load(model, weights, device)
    found = open_data(data, layout, seed, progress)
    if len(found.labels) < 2:
        raise DataError(f"{found.name} has only the label {found.labels[0]!r}: a probe needs at least two")
    folder = Path(out)
    example = whole_view(found.train[0], found, loaded.preprocess)[0][None]
    chosen = find_stages(loaded.model, _placed(loaded, example), stages)
    multilabel = found.dataset.has_masks or any(len(e.classes) != 1 for e in (*found.train, *found.val))
    sets = []
    for part, examples in (("training", found.train), ("held-out", found.val)):
        say = functools.partial(progress, f"features of {part} pictures")
        sets.append(_cached(loaded, found, examples, chosen, pool, folder / "features", say))
    (train, train_truth), (val, val_truth) = sets
    results = []
    for number, stage in enumerate(chosen):
        linear, l2 = fit_linear(train[stage.name], train_truth, multilabel, seed)
        write_weights(folder / _file(stage), linear)
        scores = [
            score(linear(x), t, multilabel) for x, t in ((train[stage.name], train_truth), (val[stage.name], val_truth))
        ]
        results.append(Found(stage, l2, *scores))
        progress("probes", number + 1, len(chosen))
    chance = _chance(val_truth, multilabel)
    probed = Probed(folder, loaded, found.labels, multilabel, pool, chance, tuple(results), found)
    write_text(folder / PROBES, _about(probed, loaded.name))
    write_text(folder / "probes.csv", _table(probed))
    return probed


def load_probe(folder: str | os.PathLike[str], stage: str, model: str | LoadedModel | None = None) -> LoadedModel:
    """Load a probe from its folder, for `explain`; `model` is the new location of its network, if it was moved."""
    file = Path(folder) / PROBES
    if not file.is_file():
        raise ModelError(f"there is no {file}: give a folder that `classlens selfsup probe` wrote")
    about = json.loads(file.read_text(encoding="utf-8"))
    stages = {entry["name"]: Stage(entry["name"], tuple(entry["shape"])) for entry in about["stages"]}
    if stage not in stages:
        raise ModelError(f"there is no probe of {stage!r}; choose one of {', '.join(stages)}")
    network = model if isinstance(model, LoadedModel) else load(model or about["model"])
    if model_fingerprint(network) != about["fingerprint"]:
        raise ModelError(f"{network.name} is not the network that was probed: its weights or preprocessing differ")
    return _with_weights(
        network, stages[stage], about["pool"], tuple(about["labels"]), about["multilabel"], Path(folder)
    )


def _with_weights(
    network: LoadedModel, stage: Stage, pool: int, labels: tuple[str, ...], multilabel: bool, folder: Path
) -> LoadedModel:
    module = Probe(network.model, stage, pool, len(labels))
    module.linear.load_state_dict(load_file(folder / _file(stage)))
    weight = next(network.model.parameters())
    return LoadedModel(
        f"{network.name} {stage.name}", module.to(weight.device).eval(), network.preprocess, labels, multilabel
    )


# ------------------------------------------------------------------------------------------------------ features


def _cached(
    loaded: LoadedModel,
    data: Data,
    examples: Sequence[Item],
    stages: Sequence[Stage],
    pool: int,
    folder: Path,
    say: Callable[[int, int], None],
) -> tuple[Features, Tensor]:
    """Pooled features of all stages, and labels (N,classes); cached on disk in parts."""
    key = f"{model_fingerprint(loaded)}\n{stages}\n{pool}\n{data.labels}"
    parts = []
    for positions in pieces(range(len(examples)), _PART):
        chosen = [examples[position] for position in positions]
        digest = text_hash(f"{key}\n{fingerprint(chosen)}")
        file = folder / f"{digest}.safetensors"
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_weights(file, _compute(loaded, data, chosen, stages, pool))
        parts.append(load_file(file))
        say(positions[-1] + 1, len(examples))
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return joined, joined.pop(_TARGETS)


_TARGETS = "\ttargets"  # no module can have this name


def _compute(loaded: LoadedModel, data: Data, examples: Sequence[Item], stages: Sequence[Stage], pool: int) -> Features:
    found: dict[str, list[Tensor]] = {}
    for positions in pieces(range(len(examples)), _AT_ONCE):
        views = [whole_view(examples[position], data, loaded.preprocess) for position in positions]
        maps = stage_outputs(loaded.model, _placed(loaded, torch.stack([image for image, _ in views])), stages)
        for name, features in maps.items():
            found.setdefault(name, []).append(pooled(features, pool).float().cpu())
        found.setdefault(_TARGETS, []).append(torch.stack([labels for _, labels in views]))
    return {name: torch.cat(values) for name, values in found.items()}


def _placed(loaded: LoadedModel, images: Tensor) -> Tensor:
    return images.to(next(loaded.model.parameters()))


# ---------------------------------------------------------------------------------------------------- the linear layer


def fit_linear(features: Tensor, targets: Tensor, multilabel: bool, seed: int = 0) -> tuple[nn.Linear, float]:
    """The linear layer that predicts labels (N,classes of 0 and 1) from features (N,D), and its L2 weight.

    Features are standardised for the fit; the returned layer takes the original features.
    """
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    held_out = torch.zeros(len(features), dtype=torch.bool)
    held_out[order[::_HELD_OUT]] = True
    mean, std = features.mean(0), features.std(0, correction=0)
    std = torch.where(std > 1e-6, std, torch.inf)  # a constant feature carries no information
    x = (features - mean) / std
    judged: dict[float, float] = {}
    for l2 in _L2:
        weight, bias = _optimum(x[~held_out], targets[~held_out], l2, multilabel)
        judged[l2] = float(_loss(F.linear(x[held_out], weight, bias), targets[held_out], multilabel))
    best = min(judged, key=judged.__getitem__)
    weight, bias = _optimum(x, targets, best, multilabel)
    linear = nn.Linear(features.shape[1], targets.shape[1])
    with torch.no_grad():
        linear.weight.copy_(weight / std)
        linear.bias.copy_(bias - (weight / std) @ mean)
    return linear, best


def _optimum(x: Tensor, targets: Tensor, l2: float, multilabel: bool) -> tuple[Tensor, Tensor]:
    """argmin of the mean loss + l2/2 |W|^2; convex, so the start does not matter."""
    weight = torch.zeros(targets.shape[1], x.shape[1], requires_grad=True)
    bias = torch.zeros(targets.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = _loss(F.linear(x, weight, bias), targets, multilabel) + l2 / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return weight.detach(), bias.detach()


def _loss(logits: Tensor, targets: Tensor, multilabel: bool) -> Tensor:
    if multilabel:  # summed over classes, so that the L2 term weighs the same as for one label per image
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)
    return F.cross_entropy(logits, targets.argmax(1))


@torch.no_grad()
def score(logits: Tensor, targets: Tensor, multilabel: bool) -> float:
    """Accuracy, or mean average precision for several labels per image."""
    if multilabel:
        return mean_average_precision(logits.detach().numpy(), targets.numpy() > 0)
    return float((logits.argmax(1) == targets.argmax(1)).double().mean())


def _chance(targets: Tensor, multilabel: bool) -> float:
    """The chance score: the share of the most frequent label, or for mAP the mean frequency of the labels."""
    shares = targets.double().mean(0)
    return float(shares[shares > 0].mean() if multilabel else shares.max())


# --------------------------------------------------------------------------------------------------------- files


def _file(stage: Stage) -> str:
    return f"{stage.name}.safetensors"


def _about(probed: Probed, model: str) -> str:
    about: dict[str, Any] = {
        "model": model,
        "fingerprint": model_fingerprint(probed.model),
        "data": probed.data.name,
        "data_hash": probed.data.hash,
        "pictures": {"train": len(probed.data.train), "val": len(probed.data.val)},
        "left_out": skipped_text(probed.data.skipped),
        "labels": list(probed.labels),
        "multilabel": probed.multilabel,
        "pool": probed.pool,
        "chance": probed.chance,
        "stages": [asdict(found.stage) | {"l2": found.l2, "score": found.score} for found in probed.stages],
    }
    return json.dumps(about, indent=2) + "\n"


def _table(probed: Probed) -> str:
    lines = [f"stage,shape,l2,train_{probed.score_name},{probed.score_name},chance"]
    lines += [
        f"{found.stage.name},{'x'.join(map(str, found.stage.shape))},{found.l2:g},{found.train_score:.6f},"
        f"{found.score:.6f},{probed.chance:.6f}"
        for found in probed.stages
    ]
    return "\n".join(lines) + "\n"
