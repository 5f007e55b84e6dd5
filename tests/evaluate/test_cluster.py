"""The same work on a real Ray cluster: two nodes on this machine, bound to 127.0.0.1, and a worker killed."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from classlens.evaluate import Settings, options_of_tests, run
from classlens.evaluate.cluster import ClusterError, RayExecutor
from classlens.evaluate.store import Store, schemas

HERE = Path(__file__).resolve().parent


def settings(*data: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "tests": ("perturbation", "segmentation", "pointing", "sanity"), "everything": True,
        "methods": ("agf-release", "gradcam", "random"), "data": tuple(map(str, data)), "model": "world:make",
        "batch_size": 2, "threads": 1, "options": options_of_tests(sanity_images=4, shapes=("2x1",)),
    }  # fmt: skip
    return Settings(**(values | changes))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module", autouse=True)
def own_token() -> Iterator[None]:
    """Ray is to use a token of these tests alone, and to leave none in the home folder; set before it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
        yield


@pytest.fixture(autouse=True)
def stay_on_this_machine(own_token: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray"):
        services = importlib.import_module("ray._private.services")
        monkeypatch.setattr(services, "get_node_ip_address", lambda address=None: "127.0.0.1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent / "worlds"), str(HERE.parents[1] / "src")]))


@pytest.fixture(scope="module")
def cluster(own_token: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a head with one CPU and a second node with one."""
    pytest.importorskip("ray")
    # Short: Ray makes sockets under it, whose names may not be long.
    folder = tmp_path_factory.mktemp("ray", numbered=False) if len(str(tmp_path_factory.getbasetemp())) < 40 else None
    port = free_port()
    address = f"127.0.0.1:{port}"
    path = os.pathsep.join(
        [str(HERE.parent / "worlds"), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    )
    environment = os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    common = [
        "--node-ip-address=127.0.0.1",
        "--num-cpus=1",
        "--num-gpus=0",
        "--object-store-memory=100000000",
        "--block",
    ]
    head = ["--head", f"--port={port}", "--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0"]
    if folder is not None:
        head.append(f"--temp-dir={folder}")
    nodes = []
    try:
        for extra in (head, [f"--address={address}"]):
            command = [sys.executable, str(HERE / "loopback_ray.py"), "start", *extra, *common]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            nodes.append(subprocess.Popen(command, env=environment, start_new_session=True, **quiet))
            wait_for(port)
        yield address
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in reversed(nodes):
            try:
                node.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def wait_for(port: int) -> None:
    end = time.monotonic() + 240  # a busy machine takes its time
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail("Ray did not start")


def listening() -> set[str]:
    """Addresses on which Ray's processes listen, from the kernel's tables."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(word in (process / "cmdline").read_text() for word in ("raylet", "gcs_server", "ray::")):
                inodes |= {os.readlink(link) for link in (process / "fd").iterdir()}
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and f"socket:[{parts[9]}]" in inodes:
                found.add(parts[1].partition(":")[0])
    return found


def rows(out: Path) -> dict[str, str]:
    return {test: repr(Store(out).read(test).to_pylist()) for test in schemas()}


class Killer:
    """A progress bar that kills workers in the middle of their work, twice."""

    def __init__(self, executors: list[RayExecutor]) -> None:
        self.executors, self.nodes, self.killed = executors, 0, set[int]()

    def __call__(self, what: str, done: int, total: int, /) -> None:
        import ray

        (executor,) = self.executors
        self.nodes = max(self.nodes, sum(node["Alive"] for node in ray.nodes()))
        busy = [executor.processes[actor] for actor, _ in executor.running.values()]
        alive = [process for process in busy if process not in self.killed]  # a death is noticed a little later
        if alive and len(self.killed) < 2:
            os.kill(alive[0], signal.SIGKILL)
            self.killed.add(alive[0])


@pytest.mark.cluster
def test_two_nodes_and_a_killed_worker_give_the_rows_of_a_local_run(
    cluster: str, labelled: Path, masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors: list[RayExecutor] = []
    create = RayExecutor.__init__

    def remember(self: RayExecutor, *arguments: Any) -> None:
        create(self, *arguments)
        executors.append(self)

    monkeypatch.setattr(RayExecutor, "__init__", remember)
    chosen = settings(labelled, masked, limit=12)
    killer = Killer(executors)
    run(chosen, tmp_path / "cluster", cluster=cluster, progress=killer)
    run(chosen, tmp_path / "here")
    assert listening() <= {"0100007F", 24 * "0" + "01000000", 16 * "0" + "FFFF00000100007F"}  # 127.0.0.1, ::1
    assert (killer.nodes, len(killer.killed)) == (2, 2)
    assert len(executors[0].processes) >= 3  # two to begin with, and one in the place of a dead one
    assert rows(tmp_path / "cluster") == rows(tmp_path / "here")


@pytest.mark.cluster
def test_a_cluster_without_room_is_told(cluster: str, labelled: Path) -> None:
    executor = RayExecutor(settings(labelled, threads=64), cluster)
    try:
        with pytest.raises(ClusterError, match="no machine of the cluster has room"):
            list(executor.map([object()]))  # type: ignore[list-item]
    finally:
        executor.close()


@pytest.mark.cluster
def test_a_cluster_on_this_machine_alone(labelled: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    chosen = settings(labelled, tests=("perturbation",), methods=("gradcam",), limit=4)
    run(chosen, tmp_path / "local", cluster="local")
    run(chosen, tmp_path / "here")
    assert rows(tmp_path / "local") == rows(tmp_path / "here")


@pytest.mark.cluster
def test_no_cluster_is_one_line(labelled: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ClusterError, match="cannot reach a Ray cluster"):
        RayExecutor(settings(labelled), "127.0.0.1:1")


def test_without_ray_the_extra_is_named(labelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"pip install 'classlens\[cluster\]'"):
        RayExecutor(settings(labelled), "local")
