"""Measurements -> benchmarks/RESULTS.md: the machine, the targets, the tables.

python benchmarks/report.py        # from rows.jsonl, without measuring again
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench

LIBRARIES = ("classlens", "torch", "torchvision", *("captum", "grad-cam", "zennit"))
# (network, batch, classes) -> agf's largest ratio to a forward, for each class
TARGETS = {
    ("vgg19", 1, 1): 6.0, ("resnet50", 1, 1): 5.0, ("efficientnet-lite0", 1, 1): 6.5, ("densenet121", 1, 1): 6.0,
    ("convnext_tiny", 1, 1): 4.0, ("vgg19", 1, 5): 2.5, ("resnet50", 1, 5): 3.0,
}  # fmt: skip
# Forward-equivalents of its convolutions and matrix products, counted by torch.utils.flop_counter.
FLOORS = {
    ("vgg19", 1, 1): 3.4, ("resnet50", 1, 1): 3.8, ("efficientnet-lite0", 1, 1): 3.9, ("densenet121", 1, 1): 3.6,
    ("vgg19", 1, 5): 1.8, ("resnet50", 1, 5): 2.2,
}  # fmt: skip
NEAR = 1.03  # two times that differ by less are equal

Rows = list[dict[str, Any]]


def write(rows: Path, out: Path, threads: int, device: str = "cpu") -> None:
    """The whole page, written at once."""
    found = bench.read(rows)
    timed = {(r["network"], r["library"], r["method"], r["batch"], r["classes"]): r for r in found if "batch" in r}
    peaks = {(r["network"], r["library"], r["method"]): r["peak"] for r in found if "peak" in r}
    parts = [head(threads, device), targets(timed, peaks), beside_peers(timed), all_methods(timed), memory(peaks)]
    draft = out.with_suffix(".part")
    draft.write_text("\n\n".join(part for part in parts if part) + "\n")
    draft.replace(out)


def head(threads: int, device: str) -> str:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
            break
    clock = f"CPU time of the process, with {threads} thread{'s' * (threads > 1)}: a busy machine matters little."
    if device != "cpu":
        clock = f"Times by the clock on {device}, each from idle to idle."
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return (
        f"# Speed and memory\n\n`make bench`{'' if device == 'cpu' else f' DEVICE={device}'}, {cpu}; {versions}.\n\n"
        "All times are multiples of the network's own plain forward pass of the same batch, measured in one process in "
        "turns with it; the median of the rounds, and the smallest and the largest in brackets where they matter. "
        f"{clock} Networks of 224 x 224 pixels. Integrated gradients and SmoothGrad take {bench.STEPS} steps "
        "everywhere. Other libraries explain one class a call, so five classes are five calls."
    )


def targets(timed: dict[Any, Any], peaks: dict[Any, Any]) -> str:
    lines = ["## Targets", "", "| target | measured | arithmetic | met |", "|---|---|---|---|"]
    for (network, batch, classes), limit in TARGETS.items():
        row = timed.get((network, "classlens", "agf", batch, classes))
        if row is None:
            continue
        ratio, low, high = (row[k] / classes for k in ("ratio", "low", "high"))
        what = f"`agf`, {network}, {classes} class{'es, each' if classes > 1 else ''}: at most {limit:.1f} forwards"
        floor = FLOORS.get((network, batch, classes), "")
        lines.append(f"| {what} | {ratio:.2f} [{low:.2f}, {high:.2f}] | {floor} | {_met(ratio <= limit)} |")
    agf, backward = peaks.get(("vgg19", "classlens", "agf")), peaks.get(("vgg19", "backward", ""))
    if agf and backward:
        times = f"{agf / backward:.2f}"
        lines.append(
            f"| `agf`, vgg19: peak memory at most 2 x forward + backward | {times} x | | {_met(agf <= 2 * backward)} |"
        )
    pairs = shared(timed)
    slower = [key for key, (own, peer, _) in pairs.items() if own > NEAR * peer]
    lines.append(
        f"| every shared method at least as fast as the fastest peer, within {NEAR - 1:.0%} | "
        f"{len(pairs) - len(slower)} of {len(pairs)} "
        f"cells | | {_met(not slower)} |"
    )
    return "\n".join([*lines, "", WHY])


WHY = """What keeps these from being met, where they are not (`python benchmarks/profile_agf.py` has the layers):

- **`agf` of one class.** Its convolutions and matrix products are 4 forwards. The rest is memory: magnitudes of weights
  and of feature maps, divisions, sums for the conservation report, the factorisation; and, on networks of many small
  layers such as EfficientNet-Lite0, the 200 operations of torch at each layer, which take as long as the layer.
- **Grad-CAM of one image** is little more than a forward pass, and ours writes that pass down to find the layer by
  itself; captum is told the layer. That costs the same for each operation, however small the picture; for several
  classes the one recording serves all of them, and ours is four times faster.
- **Gradients**: the same forward and backward pass as captum's, and then probabilities, the picture to draw and the
  report.
- **Integrated gradients** are captum's own, plus the forward pass at the baseline that the report compares with.
- **SmoothGrad** takes eight noisy copies at once, captum was told to take ten."""


def shared(timed: dict[Any, Any]) -> dict[Any, tuple[float, float, str]]:
    """(network, method, batch, classes) -> (our ratio, the fastest peer's, its name), where a peer has an answer."""
    found: dict[Any, tuple[float, float, str]] = {}
    for (network, library, method, batch, classes), row in timed.items():
        own = timed.get((network, "classlens", method, batch, classes))
        if library == "classlens" or not row["ratio"] or own is None:
            continue
        key = (network, method, batch, classes)
        if key not in found or row["ratio"] < found[key][1]:
            found[key] = (own["ratio"], row["ratio"], library)
    return found


def beside_peers(timed: dict[Any, Any]) -> str:
    lines = [
        "## Beside other libraries", "",
        "Ours / the fastest of captum, pytorch-grad-cam and zennit that has the method and runs on the network. Below "
        "1, ours is faster.", "",
        "| network | method | batch | classes | ours | peer | which | ours / peer |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (network, method, batch, classes), (own, peer, library) in sorted(shared(timed).items()):
        ratio = own / peer
        mark = f"**{ratio:.2f}**" if ratio > NEAR else f"{ratio:.2f}"
        lines.append(f"| {network} | {method} | {batch} | {classes} | {own:.1f} | {peer:.1f} | {library} | {mark} |")
    failures = sorted({(r["library"], r["method"], r["network"], r["why"]) for r in timed.values() if r["why"]})
    if failures:
        lines += ["", "Peers that raise an error there:", ""]
        lines += [f"- {library} {method} on {network}: {why}" for library, method, network, why in failures]
    return "\n".join(lines)


def all_methods(timed: dict[Any, Any]) -> str:
    networks = [n for n in bench.NETWORKS if any(key[0] == n for key in timed)]
    sizes = [size for size in bench.SIZES if any(key[3:] == size for key in timed)]
    parts = ["## Every method", "", "A method that runs the network hundreds of times (rise, meaningful-perturbation) "
             "costs what these forwards cost and is not listed."]  # fmt: skip
    for batch, classes in sizes:
        methods = list(dict.fromkeys(k[2] for k in timed if k[1] == "classlens" and k[3:] == (batch, classes)))
        parts += [
            "", f"Batch {batch}, {classes} class{'es (for all of them)' if classes > 1 else ''}:", "",
            "| method | " + " | ".join(networks) + " |", "|---" * (len(networks) + 1) + "|",
        ]  # fmt: skip
        for method in methods:
            cells = [timed.get((n, "classlens", method, batch, classes)) for n in networks]
            numbers = [f"{c['ratio']:.1f}" if c and c["ratio"] else "–" for c in cells]
            parts.append(f"| {method} | " + " | ".join(numbers) + " |")
    return "\n".join(parts)


def memory(peaks: dict[Any, Any]) -> str:
    if not peaks:
        return ""
    networks = [n for n in bench.NETWORKS if any(key[0] == n for key in peaks)]
    kinds = list(dict.fromkeys((library, method) for _, library, method in peaks))
    lines = [
        "## Peak memory (MB, the whole process)", "", "One image, one class; a process for each.", "",
        "| | " + " | ".join(networks) + " |", "|---" * (len(networks) + 1) + "|",
    ]  # fmt: skip
    names = {"forward": "plain forward", "backward": "forward + backward"}
    for library, method in kinds:
        cells = [peaks.get((n, library, method)) for n in networks]
        name = names.get(library) or f"{library} {method}"
        lines.append(f"| {name} | " + " | ".join("–" if c is None else str(c) for c in cells) + " |")
    return "\n".join(lines)


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


if __name__ == "__main__":
    write(bench.HERE / "rows.jsonl", bench.HERE / "RESULTS.md", 1)
