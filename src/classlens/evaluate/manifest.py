"""manifest.json: every command that worked on a run's folder, and what a later one has to know of the earlier ones.

>>> earlier = read(store)
>>> notes(earlier, plan, settings)
['torchvision:resnet18 has other weights or preprocessing than in an earlier run here; ...']
"""

from __future__ import annotations

import json
import platform
import subprocess
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from classlens import files
from classlens.data.layouts import data_hash
from classlens.evaluate.plan import Plan
from classlens.evaluate.settings import Settings
from classlens.evaluate.store import Store, foreign
from classlens.evaluate.worker import Worker

Entry = dict[str, Any]

FILE = "manifest.json"
_PACKAGES = ("classlens", "torch", "torchvision", "timm", "captum", "numpy", "pillow", "pyarrow", "ray")
_DECISIVE = ("classlens", "torch")  # what computes the rows
_NEEDED: dict[str, type] = {"begun": str, "versions": dict, "model": dict, "data": list, "settings": dict}


def entry(settings: Settings, worker: Worker, plan: Plan, command: Sequence[str], cluster: str | None) -> Entry:
    """What is run now."""
    return {
        "id": uuid.uuid4().hex,
        "command": list(command),
        "begun": now(),
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


def read(store: Store) -> list[Entry]:
    """The commands so far; none where there is no manifest yet."""
    file = store.root / FILE
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise foreign(file) from None
    runs = found.get("runs") if isinstance(found, dict) else None
    if not isinstance(runs, list) or not all(_is_entry(run) for run in runs):
        raise foreign(file)
    return runs


def _is_entry(run: Any) -> bool:
    return (
        isinstance(run, dict)
        and all(isinstance(run.get(name), kind) for name, kind in _NEEDED.items())
        and all(isinstance(data, dict) for data in run["data"])
    )


def write(store: Store, mine: Entry) -> None:
    """Add a command, or say more of it. Other processes may do the same with theirs at the same time."""
    with files.locked(store.root):
        others = [run for run in read(store) if run.get("id") != mine["id"]]
        store.write_text(FILE, json.dumps({"runs": [*others, mine]}, indent=2) + "\n")


def notes(earlier: Sequence[Entry], mine: Entry) -> list[str]:
    """What the reader of the tables has to know of earlier commands in the same folder, by name."""
    found = []
    name, own = mine["model"]["name"], mine["model"]["id"]
    if any(run["model"].get("name") == name and run["model"].get("id") != own for run in earlier):
        found.append(
            f"{name} has other weights or preprocessing than in an earlier run here; its rows are computed anew, and "
            "those of the earlier run are kept but not shown."
        )
    for package in _DECISIVE:
        used = {run["versions"].get(package) for run in earlier if run["model"].get("id") == own}
        other = sorted(str(version) for version in used - {mine["versions"].get(package)})
        if other:
            found.append(
                f"some rows may be of {package} {', '.join(other)}, in an earlier run here; this is "
                f"{mine['versions'].get(package)}. Give a new --out to compute all of them with one version."
            )
    return found


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


def now() -> str:
    """The time of day, for people and manifests."""
    return datetime.now(UTC).isoformat()
