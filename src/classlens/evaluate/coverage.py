"""Which networks can be explained: every classifier of a library is tried, and what happens is written down.

    classlens coverage --library torchvision --out coverage

Each network runs in a process of its own, with a time and a memory limit; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from classlens.errors import ClasslensError, ModelError
from classlens.models import untrained

LIBRARIES = ("torchvision", "timm", "transformers")


@dataclass(frozen=True)
class Row:
    """What happened to one network."""

    name: str  # as `classlens.load` takes it, or `untrained.build`
    size: int = 0  # of the input
    captured: bool = False  # recorded, and the recorded output equals the plain forward bit for bit
    finite: bool = False
    conservation: float | None = None  # of lrp, the largest over two classes
    agf_conservation: float | None = None
    batch_is_single: bool = False
    untouched: bool = False
    times_forward: float | None = None  # agf for one class over a plain forward
    reason: str = ""  # why not

    @property
    def good(self) -> bool:
        """Captured, finite, conserved within 0.1 %, batch = single, model untouched."""
        conserved = self.conservation is not None and self.conservation <= 1e-3
        return self.captured and self.finite and conserved and self.batch_is_single and self.untouched


def network_names(library: str) -> list[str]:
    """All classifiers of torchvision; of timm the smallest network of every family (one module of timm.models).

    Of transformers all classifiers, each with every implementation of attention that it offers.
    """
    if library == "torchvision":
        from classlens.models._torchvision import import_torchvision

        models = import_torchvision().models
        return [f"torchvision:{name}" for name in models.list_models(module=models)]
    if library == "timm":
        from classlens.models._torchvision import import_timm

        timm = import_timm()
        families = [timm.list_models(module=module) for module in timm.list_modules()]
        return [f"timm:{min(family, key=_size_by_name)}" for family in families if family]
    if library == "transformers":
        return untrained.names()
    raise ModelError(f"there is no library {library!r}; there are {', '.join(LIBRARIES)}")


def _size_by_name(name: str) -> tuple[int, int, str]:
    """Guess which of a family is small from how it is called, without building all of them."""
    words = ("femto", "atto", "nano", "pico", "xxs", "xx_small", "tiny", "_ti", "test", "small", "_s", "18", "mini")
    large = ("large", "huge", "giant", "xl", "_l", "_h", "152", "base", "_b", "384", "512")
    return (-any(w in name for w in words), any(w in name for w in large), name)


def cover(
    library: str, folder: Path, timeout: float = 180, memory: float = 12, only: str = ""
) -> Iterator[tuple[int, int, Row]]:
    """Examine the networks of a library one by one; gives (how many done, how many in all, row).

    Rows are appended to `folder`/rows.jsonl; networks that stand there are not run again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "rows.jsonl"
    done = {row.name: row for row in read_rows(log)}
    names = [name for name in network_names(library) if only in name]
    for i, name in enumerate(names, start=1):
        if name not in done:
            row = _in_a_process(name, timeout, memory)
            with log.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        else:
            row = done[name]
        yield i, len(names), row


def read_rows(log: Path) -> list[Row]:
    """Rows written so far; a last line that was cut off by a kill is left out."""
    rows = []
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            rows.append(Row(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown, with the count above."""
    good = sum(row.good for row in rows)
    lines = [
        f"{good} of {len(rows)} networks: captured bit for bit, finite, conserved within 0.1 %, batch = single image, "
        "model untouched.",
        "",
        "| network | input | captured | finite | conservation lrp | agf | batch = single | untouched "
        "| agf / forward | why not |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        marks = ["yes" if mark else "**no**" for mark in (row.captured, row.finite)]
        numbers = ["–" if n is None else f"{n:.0e}" for n in (row.conservation, row.agf_conservation)]
        kept = ["yes" if mark else "**no**" for mark in (row.batch_is_single, row.untouched)]
        ratio = "–" if row.times_forward is None else f"{row.times_forward:.1f}"
        lines.append("| " + " | ".join([row.name, str(row.size), *marks, *numbers, *kept, ratio, row.reason]) + " |")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------- one network


def _in_a_process(name: str, timeout: float, memory: float) -> Row:
    command = [sys.executable, "-m", "classlens.evaluate.coverage", name, str(memory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Row(name, reason=f"took longer than {timeout:.0f} s")
    try:
        return Row(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return Row(name, reason=" ".join(last.split())[:200])


def examine(name: str) -> Row:
    """One network, here and now: random weights with normalisation statistics that fit what the layers see."""
    import torch

    from classlens.explanation import explain

    model, images = network(name)
    size = images.shape[-1]
    before = _fingerprint(model)
    found: dict[str, Any] = {"name": name, "size": size}
    try:
        lrp = explain(model, images, [[1, 2]] * 2, "lrp")
        found |= {"captured": True, "conservation": float(lrp.report.conservation.max())}
        agf = explain(model, images, [[1, 2]] * 2, "agf")
        found |= {"agf_conservation": float(agf.report.conservation.max())}
        found |= {"finite": bool(torch.isfinite(agf.maps).all() and torch.isfinite(lrp.maps).all())}
        single = explain(model, images[1:], [1, 2], "lrp").maps
        found |= {"batch_is_single": bool((single - lrp.maps[1:]).norm() <= 1e-3 * single.norm())}
        found |= {"times_forward": _times_forward(model, images[:1])}
    except ClasslensError as error:
        found |= {"reason": str(error)}
    found |= {"untouched": all(torch.equal(a, b) for a, b in zip(before, _fingerprint(model), strict=True))}
    return Row(**found)


def network(name: str) -> tuple[Any, Any]:
    """A network with random weights and fitting statistics, and two images."""
    import torch

    from classlens.models import load

    torch.manual_seed(0)
    if name.startswith(untrained.PREFIX):
        model, side = untrained.build(name)  # its own size: a network of windows may keep what another size changed
        images = torch.randn(2, 3, side, side)
    else:
        loaded = load(name, weights=None)
        model, images = loaded.model, _smallest_input(loaded.model, loaded.preprocess.crop)
    _give_statistics(model, images)
    return model, images


def _smallest_input(model: Any, crop: Any) -> Any:
    """Two images of 128 pixels where the network takes them (quicker), else of its own size.

    A network built without weights may want another size than its published weights do: then 224.
    """
    import torch

    own = int(crop if isinstance(crop, int) else min(crop or (224,)))
    for size in (128, own):
        images = torch.randn(2, 3, size, size)
        try:
            with torch.no_grad():
                model(images)
        except Exception:
            continue
        return images
    return torch.randn(2, 3, 224, 224)


def _give_statistics(model: Any, images: Any) -> None:
    """BatchNorms learn what they see, and heads that start with zeros get weights: else there is nothing to explain."""
    import torch
    from torch import nn

    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    for weight in model.parameters():
        if weight.dim() == 2 and not weight.any():
            nn.init.normal_(weight, std=0.02)
    with torch.no_grad():
        model(images)
    model.eval()


def _fingerprint(model: Any) -> list[Any]:
    return [t.detach().clone() for t in model.state_dict().values()]


def _times_forward(model: Any, images: Any) -> float:
    """agf for one class over a plain forward: medians of three, taken in turns."""
    import statistics

    import torch

    from classlens.explanation import explain

    ratios = []
    for _ in range(3):
        begun = time.perf_counter()
        with torch.no_grad():
            model(images)
        forward = time.perf_counter() - begun
        explain(model, images, 1, "agf")
        ratios.append((time.perf_counter() - begun - forward) / forward)
    return statistics.median(ratios)


def _main(name: str, memory: str) -> None:
    import resource

    limit = int(float(memory) * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        row = examine(name)
    except Exception as error:
        row = Row(name, reason=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])
    sys.stdout.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
