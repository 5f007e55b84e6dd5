"""Where the time of one explanation goes: by kind of layer, beside the forward pass of the same layers.

    python benchmarks/profile_agf.py                    # writes benchmarks/PROFILE.md
    python benchmarks/profile_agf.py --models resnet50 --method lrp

"forward" is the share of a plain forward pass that these layers take, "sweep" what the backward sweep spends on them;
their quotient says how many forwards of its own a layer costs there. C needs 2 at a convolution (|W| v, and one
transposed convolution), so what is above 2 is element-wise work, or a library that is slow at this kind of layer. CPU
time of one thread, so that a busy machine matters little.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench
import torch


def kind(node: Any) -> str:
    """conv2d 3x3, conv2d 1x1, depthwise, linear, add ..."""
    if node.op != "conv2d":
        return str(node.op)
    weight = node.arguments()["weight"]
    size = "x".join(map(str, weight.shape[2:]))
    return f"conv2d {size}" + (" depthwise" if node.arguments().get("groups", 1) > 1 else "")


@contextmanager
def watched(times: dict[str, float], family: Any) -> Iterator[None]:
    """Time every rule, and the steps around the sweep."""
    inner = family.propagate

    def propagate(tape: Any, start: Any, choose: Any, *rest: Any, **named: Any) -> Any:
        def timed(node: Any) -> Any:
            rule = choose(node)
            return lambda n, relevance: clocked(times, kind(n), lambda: rule(n, relevance))

        return inner(tape, start, timed, *rest, **named)

    family.propagate = propagate
    try:
        yield
    finally:
        family.propagate = inner


def clocked(times: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    begun = time.process_time()
    result = work()
    times[name] += time.process_time() - begun
    return result


def profile(network: str, method: str, rounds: int = 5) -> str:
    """A Markdown section."""
    import classlens
    from classlens.core.capture import record
    from classlens.methods import METHODS

    model, images = bench.build(network), torch.rand(1, 3, 224, 224)
    family = importlib.import_module(METHODS[method].run.__module__)
    for _ in range(2):
        classlens.explain(model, images, 1, method)
    forward: dict[str, float] = collections.defaultdict(float)
    sweep: dict[str, float] = collections.defaultdict(float)
    whole: dict[str, float] = collections.defaultdict(float)
    for _ in range(rounds):
        with torch.no_grad():
            clocked(whole, "forward", lambda: model(images))
            for node in record(model, images).nodes:
                clocked(forward, kind(node), lambda node=node: node.call(*(v.tensor for v in node.inputs)))
        with watched(sweep, family):
            clocked(whole, "explain", lambda: classlens.explain(model, images, 1, method))
        clocked(whole, "record", lambda: record(model, images))
    unit = whole["forward"]
    lines = [
        f"## {network}", "",
        f"One `{method}` is {whole['explain'] / unit:.2f} forwards: recording {whole['record'] / unit:.2f}, rules "
        f"{sum(sweep.values()) / unit:.2f}, the rest (gradients, start) "
        f"{(whole['explain'] - whole['record'] - sum(sweep.values())) / unit:.2f}.", "",
        "| layers | share of a forward | share of the sweep | sweep / forward of these layers |", "|---|---|---|---|",
    ]  # fmt: skip
    for name in sorted(sweep, key=lambda n: -sweep[n]):
        if sweep[name] < 0.003 * unit:
            continue
        own = forward[name] / unit
        each = f"{sweep[name] / forward[name]:.1f}" if own > 0.002 else "–"
        lines.append(f"| {name} | {100 * own:.0f} % | {100 * sweep[name] / sum(sweep.values()):.0f} % | {each} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(bench.NETWORKS), help="networks, with commas")
    parser.add_argument("--method", default="agf", help="a method that propagates relevance")
    parser.add_argument("--out", type=Path, default=bench.HERE / "PROFILE.md")
    options = parser.parse_args()
    bench.quiet(1)
    sections = [profile(network, options.method) for network in options.models.split(",")]
    about = (__doc__ or "").split("\n\n")[2]
    out = ["# Where the time goes", "`python benchmarks/profile_agf.py`", about.replace("\n", " "), *sections]
    options.out.write_text("\n\n".join(out) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
