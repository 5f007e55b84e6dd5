"""A run: plan the work, have it done here or on a cluster, keep the rows, write the report."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol
import json
import os

import torch

from classlens.evaluate import report
from classlens.evaluate.datasets import data_hash
from classlens.evaluate.plan import Plan, grid_work, image_work, make_plan
from classlens.evaluate.records import Store
from classlens.evaluate.settings import Settings, as_json
from classlens.evaluate.shards import Shard
from classlens.evaluate.worker import Batch, Result, Worker


class Executor(Protocol):
    """Does shards, in any order, and gives their results as they come."""

    def map(self, shards: Sequence[Shard]) -> Iterator[Result]: ...

    def close(self) -> None: ...


class Progress(Protocol):
    """Is told how far a run has come; in units of one row."""

    def begin(self, what: str, units: int) -> None: ...

    def advance(self, result: Result) -> None: ...


class Local:
    """Shards one after the other in this process; the next one's pictures are read meanwhile."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pictures")

    def map(self, shards: Sequence[Shard]) -> Iterator[Result]:
        ahead: Future[Batch] | None = self._reader.submit(self._worker.load, shards[0]) if shards else None
        for index, shard in enumerate(shards):
            assert ahead is not None
            begun = time.perf_counter()
            batch = ahead.result()
            waited = time.perf_counter() - begun
            if index + 1 < len(shards):
                ahead = self._reader.submit(self._worker.load, shards[index + 1])
            for result in self._worker.run(shard, batch):
                result.seconds["load"] = result.seconds.get("load", 0.0) + waited
                waited = 0.0
                yield result

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)


def run(
    settings: Settings,
    out: str | os.PathLike[str],
    cluster: str | None = None,
    progress: Progress | None = None,
    command: Sequence[str] = (),
) -> report.Report:
    """Do what is not yet done of a command, and report on all of it.

    >>> run(Settings(tests=("pointing",), data=("data/val",), methods=("agf", "gradcam")), "runs/first").tables

    `cluster` is None (this process), "local" (Ray on this machine) or the address of a Ray cluster.
    """
    store = Store(out)
    begun = datetime.now(UTC)
    worker = Worker(settings)
    plan = make_plan(settings, worker)
    entry = _manifest_entry(settings, worker, plan, command, cluster, begun)
    _write_manifest(store, entry)
    seconds = _measure(plan, settings, worker, store, cluster, progress)
    store.compact()
    finished = report.write(store, plan, settings, worker)
    entry |= {"finished": _now(), "seconds": seconds | {"total": (datetime.now(UTC) - begun).total_seconds()}}
    _write_manifest(store, entry)
    return finished
