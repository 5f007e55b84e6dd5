"""The same shards on a Ray cluster. Workers hold the model; rows come back here, and only this process writes."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from classlens.errors import ClasslensError
from classlens.evaluate.plan import Shard
from classlens.evaluate.settings import Settings
from classlens.evaluate.worker import Result, Worker

_ATTEMPTS = 5  # of one shard, and of starting a worker, before giving up
_PATIENCE = 600.0  # seconds to wait for a first worker


class ClusterError(ClasslensError):
    """A cluster that cannot be reached, or lost its workers."""


class RayExecutor:
    """Shards on actors: one for each GPU, or for each group of CPUs as large as a worker's threads.

    A shard whose worker dies goes to another one, and a new worker is asked for. Workers get shards only once they
    have started, so one that finds no free machine holds nothing up.
    """

    def __init__(self, settings: Settings, address: str) -> None:
        self._ray = _connect(address)
        # As many threads as a run without a cluster would take: sums are then added up in the same order.
        self._settings = replace(settings, threads=settings.threads or torch.get_num_threads())
        self._starting: dict[Any, Any] = {}  # reference to its first answer -> actor
        self._idle: list[Any] = []
        self.running: dict[Any, tuple[Any, int]] = {}  # reference to the results -> actor, shard
        self._failed_starts = 0
        self.processes: dict[Any, int] = {}  # actor -> its process, on its machine

    def map(self, shards: Sequence[Shard]) -> Iterator[Result]:
        """Results as they come. Each shard counts once, however often it was begun."""
        waiting = deque(range(len(shards)))
        attempts = [0] * len(shards)
        while waiting or self.running:
            self._ask_for_workers(len(waiting))
            self._hand_out(waiting, shards)
            reference = self._next_answer()
            if reference in self._starting:
                self._welcome(reference)
                results: list[Result] | None = []
            else:
                actor, index = self.running.pop(reference)
                results = self._results(reference)
                if results is None:
                    attempts[index] += 1
                    if attempts[index] >= _ATTEMPTS:
                        raise ClusterError(f"{_ATTEMPTS} workers died over one piece of work; lower --batch-size")
                    waiting.appendleft(index)
                else:
                    self._idle.append(actor)
            self._hand_out(waiting, shards)  # before the results are written: no worker waits for the disk
            yield from results or ()

    def close(self) -> None:
        for actor in (*self._starting.values(), *self._idle, *(actor for actor, _ in self.running.values())):
            self._ray.kill(actor)
        self._ray.shutdown()

    def _hand_out(self, waiting: deque[int], shards: Sequence[Shard]) -> None:
        while waiting and self._idle:
            actor, index = self._idle.pop(), waiting.popleft()
            self.running[actor.run.remote(shards[index])] = (actor, index)

    def _ask_for_workers(self, shards: int) -> None:
        there = len(self._starting) + len(self._idle) + len(self.running)
        for _ in range(min(self._room(), shards + len(self.running)) - there):
            actor = self._actor_class().remote(self._settings)
            self._starting[actor.ready.remote()] = actor
        if not there and not self._starting:
            raise ClusterError(f"no machine of the cluster has room for a worker ({self._needs()}); lower --threads")

    def _next_answer(self) -> Any:
        everything = [*self.running, *self._starting]
        while True:
            ready, _ = self._ray.wait(everything, num_returns=1, timeout=_PATIENCE)
            if ready:
                return ready[0]
            if not self.running:
                raise ClusterError(f"no worker has started in {_PATIENCE:.0f} s; look at `ray status`, then run again")

    def _welcome(self, reference: Any) -> None:
        """A worker has started, or failed to: then its reason is told if it happens again and again."""
        actor = self._starting.pop(reference)
        try:
            self.processes[actor] = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            self._failed_starts += 1
            if self._failed_starts >= _ATTEMPTS:
                raise ClusterError(f"workers cannot start: {_last_line(error)}") from error
            return
        self._idle.append(actor)

    def _results(self, reference: Any) -> list[Result] | None:
        """What a worker found; None if it died over it."""
        try:
            results: list[Result] = self._ray.get(reference)
            return results
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError):
            return None
        except ClasslensError:
            raise
        except self._ray.exceptions.RayTaskError as error:
            raise ClusterError(f"a worker failed: {_last_line(error)}") from error

    def _room(self) -> int:
        """How many workers fit on the machines that are alive."""
        kind, amount = next(iter(self._needs().items()))
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(int(resources.get(kind, 0) // amount) for resources in nodes)

    def _needs(self) -> dict[str, int]:
        return {"GPU": 1} if self._settings.device.startswith("cuda") else {"CPU": self._settings.threads or 1}

    def _actor_class(self) -> Any:
        needs = self._needs()
        return self._ray.remote(num_cpus=needs.get("CPU", 1), num_gpus=needs.get("GPU", 0))(_Actor)


class _Actor:
    """A worker in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        self._worker = Worker(settings)

    def ready(self) -> int:
        return os.getpid()

    def run(self, shard: Shard) -> list[Result]:
        return list(self._worker.run(shard))


def _connect(address: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local":
        # Ray's switch for systems on which it stays on the machine: listen on 127.0.0.1 alone.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise ClusterError("a cluster needs Ray: pip install 'classlens[cluster]'") from None
    _knock(address)
    # Workers find this package where this process does, when it was told by the environment.
    paths = {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
    options: dict[str, Any] = {"runtime_env": {"env_vars": paths}, "log_to_driver": False, "logging_level": "error"}
    if address == "local":
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        hint = "if the cluster wants a token, set RAY_AUTH_MODE=token here too"
        raise ClusterError(f"cannot reach a Ray cluster at {address!r} ({_last_line(error)}); {hint}") from error
    return ray


def _knock(address: str) -> None:
    """See whether anybody answers at host:port; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ClusterError(f"cannot reach a Ray cluster at {address!r} ({error}); is its head running?") from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
