"""A run: plan the work, have it done here or on a cluster, keep the rows, write the report."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from classlens.data.layouts import data_hash
from classlens.evaluate.plan import Plan, Shard, make_plan, work
from classlens.evaluate.report import Report, write
from classlens.evaluate.settings import Settings
from classlens.evaluate.store import Store
from classlens.evaluate.worker import Loaded, Result, Worker
from classlens.progress import Progress, silent

R = TypeVar("R")

_REQUIRED = ("clean forward", "method", "further method", "further forward")  # the rest is overhead
_PACKAGES = ("classlens", "torch", "torchvision", "timm", "captum", "numpy", "pillow", "pyarrow", "ray")


class Executor(Protocol):
    """Does shards, in any order, and gives their results as they come."""

    def map(self, shards: Sequence[Shard]) -> Iterator[Result]: ...

    def close(self) -> None: ...


class Local:
    """Shards one after the other in this process; the next one's pictures are read meanwhile."""

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
    """Do what is not yet done of a command, and report on all of it.

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
) -> R:
    """The same with a report of one's own."""
    begun = time.perf_counter()
    # On a cluster the GPUs are elsewhere: here the model only says what it is.
    worker = Worker(replace(settings, device="cpu") if cluster else settings)
    plan = make_plan(settings, worker)
    store = Store(out)
    entry = _manifest(settings, worker, plan, command, cluster)
    _write_manifest(store, entry)
    seconds = _measure(plan, settings, worker, store, cluster, progress)
    store.compact()
    written = report(store, plan, settings, worker)
    entry |= {"finished": _now(), "seconds": seconds | {"everything": round(time.perf_counter() - begun, 3)}}
    _write_manifest(store, entry)
    return written


def _measure(
    plan: Plan, settings: Settings, worker: Worker, store: Store, cluster: str | None, progress: Progress
) -> dict[str, float]:
    """Do the missing work. Gives seconds by stage, summed over workers, and the time that passed."""
    seconds: Counter[str] = Counter()
    begun = time.perf_counter()
    executor = _executor(settings, worker, cluster)
    try:
        # Some tests make their units of pictures that are classified, so all pictures come first.
        for kind in ("pictures", "units"):
            shards = work(plan, store, settings.images_at_once, late=kind == "units")
            # Tests and data sets differ in cost: mixed, the first shards tell how long the others take.
            random.Random(0).shuffle(shards)
            done, total = 0, sum(shard.rows for shard in shards)
            for result in executor.map(shards):
                _keep(result, kind, plan.model, store)
                seconds.update(result.seconds)
                done += result.done
                progress(f"scores of {kind}", done, total)
    finally:
        executor.close()
    rounded = {stage: round(value, 3) for stage, value in seconds.items()}
    passed = time.perf_counter() - begun
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


# ---------------------------------------------------------------------------------------------------- manifest


def _manifest(
    settings: Settings, worker: Worker, plan: Plan, command: Sequence[str], cluster: str | None
) -> dict[str, Any]:
    return {
        "command": list(command),
        "begun": _now(),
        "finished": None,
        "seed": settings.seed,
        "cluster": cluster,
        "versions": versions(),
        "revision": _revision(),
        "machine": {"system": platform.platform(), "threads": torch.get_num_threads(), "device": settings.device},
        "model": {"name": settings.model, "id": worker.network.id, "preprocess": worker.network.preprocess.to_json()},
        "data": [
            {
                "name": part.dataset.name,
                "layout": part.dataset.layout,
                "pictures": len(part.items),
                "of": len(part.dataset.items),
                "hash": data_hash(part.dataset, part.items),
            }
            for part in plan.parts
        ],
        "configs": {config.hash: config.to_json() for part in plan.parts for config in part.configs},
        "settings": settings.to_json(),
        "notes": list(plan.notes),
    }


def _write_manifest(store: Store, entry: dict[str, Any]) -> None:
    """manifest.json holds every command that worked on this folder; the last one is this one."""
    file = store.root / "manifest.json"
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError):
        earlier = []
    if earlier and earlier[-1]["begun"] == entry["begun"]:
        earlier.pop()
    store.write_text("manifest.json", json.dumps({"runs": [*earlier, entry]}, indent=2) + "\n")


def versions() -> dict[str, str]:
    """What was run: Python and the packages that decide what a run finds."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _revision() -> str | None:
    """The git revision of this package, if it runs from a checkout (and not from inside someone else's)."""
    folder = Path(__file__).parent
    try:
        for arguments in (
            ("ls-files", "--error-unmatch", "../errors.py"),
            ("describe", "--always", "--dirty", "--abbrev=40"),
        ):
            done = subprocess.run(
                ("git", "-C", str(folder), *arguments), capture_output=True, text=True, timeout=10, check=True
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _now() -> str:
    return datetime.now(UTC).isoformat()
