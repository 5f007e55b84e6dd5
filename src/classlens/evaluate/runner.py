"""A run: plans the work, executes it here or on a cluster, stores the rows, writes the report."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from classlens.evaluate import manifest, older
from classlens.evaluate.contents import Contents
from classlens.evaluate.plan import PREDICTION, Plan, Shard, make_plan, work
from classlens.evaluate.report import Report, write
from classlens.evaluate.settings import Settings
from classlens.evaluate.store import Store
from classlens.evaluate.worker import Loaded, Result, Worker
from classlens.models import LoadedModel
from classlens.progress import Progress, silent

R = TypeVar("R")

_REQUIRED = ("clean forward", "method", "further method", "further forward")  # the rest is overhead


class Executor(Protocol):
    """Executes shards, in any order, and yields their results."""

    def map(self, shards: Sequence[Shard]) -> Iterator[Result]: ...

    def close(self) -> None: ...


class Local:
    """Executes shards one after the other in this process; reads the images of the next one meanwhile."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pictures")

    def map(self, shards: Sequence[Shard]) -> Iterator[Result]:
        waiting: list[Future[Loaded]] = [self._reader.submit(self._worker.load, shard) for shard in shards[:1]]
        for index, shard in enumerate(shards):
            begun = time.perf_counter()
            loaded = waiting.pop().result()
            waited = time.perf_counter() - begun
            waiting += [self._reader.submit(self._worker.load, later) for later in shards[index + 1 : index + 2]]
            for result in self._worker.run(shard, loaded):
                result.seconds["load"] = result.seconds.get("load", 0.0) + waited
                waited = 0.0
                yield result

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)


def run(
    settings: Settings,
    out: str | os.PathLike[str],
    cluster: str | None = None,
    progress: Progress = silent,
    command: Sequence[str] = (),
) -> Report:
    """Compute the missing rows of a command, and report on all of its rows.

    >>> run(Settings(tests=("pointing",), data=("data/val",), methods=("agf", "gradcam")), "runs/first").tables

    `cluster` is None (this process), "local" (Ray on this machine) or the address of a Ray cluster.
    """
    return run_and(write, settings, out, cluster, progress, command)


def run_and(
    report: Callable[[Store, Plan, Settings, Worker], R],
    settings: Settings,
    out: str | os.PathLike[str],
    cluster: str | None = None,
    progress: Progress = silent,
    command: Sequence[str] = (),
    loaded: LoadedModel | None = None,
) -> R:
    """Like `run`, with another report; `loaded` is a network in memory, for a run in this process."""
    begun = time.perf_counter()
    # On a cluster the GPUs are elsewhere: here the model is only needed for its metadata.
    worker = Worker(replace(settings, device="cpu") if cluster else settings, loaded)
    store = Store(out)
    earlier = manifest.read(store)
    store.timings()  # what another version wrote is refused now, not after the work
    contents = Contents(store.root / "contents.json")
    plan = make_plan(settings, worker, contents)
    contents.save()
    entry = manifest.entry(settings, worker, plan, command, cluster)
    plan = _with_notes(plan, [*manifest.notes(earlier, entry), *older.changed(plan, store)])
    manifest.write(store, entry)
    plan, seconds = _measure(plan, settings, worker, store, cluster, progress, earlier)
    store.compact()
    written = report(store, plan, settings, worker)
    passed = round(time.perf_counter() - begun, 3)
    entry |= {"finished": manifest.now(), "seconds": seconds | {"everything": passed}, "notes": list(plan.notes)}
    manifest.write(store, entry)
    return written


def _with_notes(plan: Plan, notes: Sequence[str]) -> Plan:
    return replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes))))


def _measure(
    plan: Plan, settings: Settings, worker: Worker, store: Store, cluster: str | None, progress: Progress,
    earlier: Sequence[manifest.Entry],
) -> tuple[Plan, dict[str, float]]:  # fmt: skip
    """Do the missing work. Returns the plan with new notes, and the seconds by stage, summed over workers."""
    seconds: Counter[str] = Counter()
    begun = time.perf_counter()
    executor = _executor(settings, worker, cluster)
    adopted, broken = older.Adopted(), []
    try:
        # Some tests make their units from classified images, so all images are classified first.
        for kind in ("pictures", "units"):
            adopted |= older.adopt(plan, store, earlier, late=kind == "units")
            shards = work(plan, store, settings.images_at_once, late=kind == "units")
            # Tests and data sets differ in cost: in mixed order, the first shards predict the remaining time.
            random.Random(0).shuffle(shards)
            done, total = 0, sum(shard.rows for shard in shards)
            for result in executor.map(shards):
                _keep(result, kind, plan.model, store)
                broken += [row for row in result.rows if row["test"] == "skipped" and row["method"] == PREDICTION]
                seconds.update(result.seconds)
                done += result.done
                progress(f"scores of {kind}", done, total)
    finally:
        executor.close()
    broken.sort(key=lambda row: (row["data"], row["image"]))
    plan = replace(_with_notes(plan, adopted.notes()), broken=tuple(broken))
    return plan, _rounded(seconds, time.perf_counter() - begun, cluster)


def _rounded(seconds: Counter[str], passed: float, cluster: str | None) -> dict[str, float]:
    rounded = {stage: round(value, 3) for stage, value in seconds.items()}
    overhead = {} if cluster else {"overhead": round(passed - sum(seconds[stage] for stage in _REQUIRED), 3)}
    return rounded | overhead | {"measuring": round(passed, 3)}


def _keep(result: Result, kind: str, model: str, store: Store) -> None:
    begun = time.perf_counter()
    store.append(result.rows)
    result.seconds["records"] = time.perf_counter() - begun
    rounded = {stage: round(value, 4) for stage, value in result.seconds.items()}
    about = {"model": model, "kind": kind, "method": result.method, "images": result.images}
    store.add_timing(about | {"seconds": rounded})


def _executor(settings: Settings, worker: Worker, cluster: str | None) -> Executor:
    if cluster is None:
        return Local(worker)
    from classlens.evaluate.cluster import RayExecutor

    return RayExecutor(settings, cluster)
