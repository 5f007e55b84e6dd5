"""Chooses a method: measures all on half A, ranks them, and compares the best with the default on half B."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from classlens.choice import page
from classlens.choice.contest import DEFAULT, HALVES, LIMIT, about, contest, title
from classlens.choice.halves import Half, run_half
from classlens.choice.rank import Duel, decide, mean_ranks
from classlens.choice.words import verdict
from classlens.data.layouts import Dataset, data_hash, open_dataset
from classlens.errors import MethodError, ModelError
from classlens.evaluate import Settings, options_of_tests
from classlens.evaluate.manifest import versions
from classlens.evaluate.stats import Estimate
from classlens.evaluate.tables import Table
from classlens.models import Choice, LoadedModel
from classlens.models.loaded import described
from classlens.models.network import Network, short_name, weights_hash
from classlens.progress import Progress, silent


@dataclass(frozen=True)
class Chosen:
    """A choice with everything that it rests on."""

    choice: Choice
    ranks: Mapping[str, float]  # on half A, the best first
    a: Half
    b: Half
    duels: tuple[Duel, ...]  # on half B
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    files: tuple[Path, ...] = ()


def choose(
    model: nn.Module | LoadedModel,
    data: str | os.PathLike[str],
    *,
    methods: str | Sequence[str] | None = None,
    tests: Sequence[str] | None = None,
    limit: int = LIMIT,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    preprocess: Callable[..., Any] | None = None,
    labels: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Choice:
    """Choose the method for a network on half of your pictures, and prove it on the other half.

    >>> choice = classlens.choose(m, "photos/")
    >>> print(choice.text)
    >>> classlens.explain(m, "photo.jpg", method=choice)
    >>> choice.save(m)                                   # from now on, method="auto" finds it

    The tests are masks, if the data have them, or else deletion; pointing in grids of the pictures; and stability. The
    default, agf, stays unless half B confirms that another method is better. `methods` are those to try, `tests` those
    that decide (some of masks, deletion, grids, stability), `limit` is for each half. `out` is a folder for the
    scores and a page; with it, a stopped run resumes. `preprocess`, for a network in memory, is a
    `classlens.models.Preprocess`.
    """
    loaded = described(model, preprocess, labels)
    if not isinstance(loaded, LoadedModel):
        raise ModelError("files and pictures need preprocessing: give preprocess=, or a model of classlens.load()")
    asked: dict[str, Any] = {"methods": methods, "tests": tests, "limit": limit, "seed": seed, "progress": progress}
    with tempfile.TemporaryDirectory() if out is None else contextlib.nullcontext(out) as folder:
        return measure(loaded, data, folder, **asked).choice


def measure(
    model: LoadedModel,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    methods: str | Sequence[str] | None = None,
    tests: Sequence[str] | None = None,
    limit: int = LIMIT,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = silent,
    command: Sequence[str] = (),
) -> Chosen:
    """Like `choose`, and return tables and files too: `out` gets choice.html, choice.json and the scores.

    >>> measure(load("pets/card.json"), "photos/", "runs/choose").ranks
    {'agf': 1.3, 'layercam': 2.3, 'gradcam': 2.7}
    """
    network, dataset = Network(model), open_dataset(data)
    tried = contest(network, dataset, limit, seed, methods, tests)
    settings = Settings(
        tests=tried.tests, data=(os.fspath(data),), methods=tried.methods, model=model.name, limit=limit, seed=seed,
        options=options_of_tests(shapes=(tried.shape,), repeat_images=limit), batch_size=batch_size,
        device=next((p.device.type for p in model.model.parameters()), "cpu"),
    )  # fmt: skip
    run = partial(run_half, loaded=model, out=out, progress=progress, command=command)
    a = run("A", settings)
    if len(a.methods) < 2:
        raise MethodError("too few methods gave maps: " + "; ".join(a.left_out.values()))
    ranks = mean_ranks({test: {m: found.estimate(m).value for m in a.methods} for test, found in a.scores.items()})
    few = tuple(name for i, name in enumerate(ranks) if i < 2 or name == DEFAULT)  # leader, runner-up, default
    b = run("B", replace(settings, methods=few, tests=tuple(a.scores)), draw=True)
    made = _chosen(network, dataset, settings, ranks, a, b, tuple(tried.left_out.values()))
    return replace(made, files=page.write(made, dataset.name, tried, Path(out)))


def _chosen(
    network: Network, dataset: Dataset, settings: Settings, ranks: Mapping[str, float], a: Half, b: Half,
    left_out: tuple[str, ...],
) -> Chosen:  # fmt: skip
    leader, runner_up = list(ranks)[:2]
    default = DEFAULT if DEFAULT in ranks and DEFAULT in b.methods else None
    others = [runner_up] if default in (None, runner_up) else [default, runner_up]
    duels = tuple(b.duel(leader, o) for o in others if o != leader and {o, leader} <= set(b.methods))
    name = decide(leader, default, duels)
    text = verdict(short_name(network.loaded.name), name, leader, default, ranks, duels)
    notes = tuple(dict.fromkeys([*left_out, *a.left_out.values(), *b.left_out.values()]))
    proof = {
        "data": _data(dataset, settings),
        "tests": {title(test): about(test) for test in a.scores},
        "half A": {"mean ranks": dict(ranks), "scores": _numbers(a)},
        "half B": {
            "scores": _numbers(b),
            "differences": [
                {"method": duel.method, "against": duel.against, "by test": _by_test(duel.differences)}
                for duel in duels
            ],
        },
        "left out": list(notes),
        "seed": settings.seed,
        "versions": versions(),
    }
    choice = Choice(name, network.id, weights_hash(network.module), text, proof)
    return Chosen(choice, ranks, a, b, duels, page.tables(dataset.name, ranks, a, b, duels), notes)


def _data(dataset: Dataset, settings: Settings) -> dict[str, Any]:
    halves = {half: dataset.select(settings.limit, settings.seed, half) for half in HALVES}
    return {
        "name": dataset.name,
        "layout": dataset.layout,
        **{
            f"half {half}": {"pictures": len(items), "hash": data_hash(dataset, items)}
            for half, items in halves.items()
        },
    }


def _numbers(half: Half) -> dict[str, Any]:
    return {method: _by_test({t: s.estimate(method) for t, s in half.scores.items()}) for method in half.methods}


def _by_test(found: Mapping[str, Estimate]) -> dict[str, Any]:
    """[value, low, high] in per cent, and the number of pictures."""
    return {
        title(test): {"value": round(e.value, 3), "interval": [round(e.low, 3), round(e.high, 3)], "n": e.n}
        for test, e in found.items()
    }
