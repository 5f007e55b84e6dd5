"""How long and how much memory maps take, beside other libraries, in units of the network's own forward pass.

    make bench                                     # everything, then benchmarks/RESULTS.md; goes on where it was
    make bench DEVICE=cuda                         # on a GPU, into RESULTS-cuda.md (written, but never run on one)
    python benchmarks/bench.py --models resnet50 --methods agf,gradcam --rounds 3

One process for each network; forward pass and contenders take turns, and what counts is the median of
(time of the contender) / (mean time of the forwards before and after it). Seconds of a noisy machine mean little,
such ratios hold. On a CPU the time is that of the process on one thread, so that other processes matter little; on
another device it is that of the clock, from idle to idle. Peak memory comes from a process for each contender.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NETWORKS = ("vgg19", "resnet50", "efficientnet-lite0", "densenet121", "convnext_tiny")
# (batch, classes). One class of one image is what people wait for; the rest tells how work is shared.
SIZES = ((1, 1), (1, 5), (8, 1), (8, 5))
PEERS = ("captum", "pytorch-grad-cam", "zennit")
STEPS = 10  # of integrated gradients and smoothgrad, ours and the peers' alike
# Methods that run the network hundreds of times cost what their forwards cost: not measured.
FORWARDS_ONLY = ("rise", "meaningful-perturbation")
# What is measured beyond one class of one image: everything at every size would take hours.
FEW = ("agf", "gradcam", "gradient")
WIDE = (*FEW, "lrp", "lrp-epsilon-plus-flat")
MEASURED = {(1, 5): WIDE, (8, 1): FEW, (8, 5): FEW[:2]}

Run = Callable[[Any, Any, list[int]], Any]  # (model, images, classes) -> maps


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement."""

    network: str
    library: str
    method: str
    batch: int
    classes: int
    ratio: float | None  # to a plain forward of the same batch
    low: float | None = None  # smallest and largest round
    high: float | None = None
    rounds: int = 0
    why: str = ""  # no ratio: the error

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        return self.network, self.library, self.method, self.batch, self.classes


# ------------------------------------------------------------------------------------------------------ contenders


def build(network: str, device: str = "cpu") -> Any:
    """A network with random weights (times do not depend on them), or the embedded one."""
    import classlens

    name = network if network.startswith("efficientnet-lite") else f"torchvision:{network}"
    return classlens.load(name, weights="default" if ":" not in name else None).model.to(device)


def last_features(network: str, model: Any) -> Any:
    """The layer that users of other libraries have to name for Grad-CAM."""
    from torch import nn

    named = {"vgg19": "features.35", "resnet50": "layer4.2", "densenet121": "features", "convnext_tiny": "features.7"}
    if network in named:
        return model.get_submodule(named[network])
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)][-1]


def ours(method: str) -> Run:
    import classlens

    def run(model: Any, images: Any, classes: list[int]) -> Any:
        return classlens.explain(model, images, [classes] * len(images), method).maps

    return run


def each_class(attribute: Callable[[Any, int], Any]) -> Any:
    """Peers explain one class a call."""
    return lambda images, classes: [attribute(images, c) for c in classes]


def captum_methods(network: str, model: Any) -> dict[str, Callable[[], Any]]:
    from captum import attr

    layer = last_features(network, model)
    return {
        "gradient": lambda: each_class(lambda x, c: attr.Saliency(model).attribute(x, c)),
        "gradient-x-input": lambda: each_class(lambda x, c: attr.InputXGradient(model).attribute(x, c)),
        "integrated-gradients": lambda: each_class(
            lambda x, c: attr.IntegratedGradients(model).attribute(
                x, target=c, n_steps=STEPS, internal_batch_size=max(10, len(x))
            )
        ),
        "smoothgrad": lambda: each_class(
            lambda x, c: attr.NoiseTunnel(attr.Saliency(model)).attribute(
                x, nt_type="smoothgrad", nt_samples=STEPS, nt_samples_batch_size=10, target=c
            )
        ),
        "gradcam": lambda: each_class(
            lambda x, c: attr.LayerAttribution.interpolate(
                attr.LayerGradCam(model, layer).attribute(x, c), x.shape[2:], "bilinear"
            )
        ),
        "lrp": lambda: each_class(lambda x, c: attr.LRP(_with_positive_rule(model)).attribute(x, c)),
    }


def _with_positive_rule(model: Any) -> Any:
    """Our `lrp` is z+; captum's default would be another rule, with another price."""
    from captum.attr._utils.lrp_rules import Alpha1_Beta0_Rule
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.rule = Alpha1_Beta0_Rule()
    return model


def gradcam_methods(network: str, model: Any) -> dict[str, Callable[[], Any]]:
    import pytorch_grad_cam as cams
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    def of(kind: Any) -> Callable[[], Any]:
        def make() -> Any:
            cam = kind(model=model, target_layers=[last_features(network, model)])
            return each_class(lambda x, c: cam(input_tensor=x, targets=[ClassifierOutputTarget(c)] * len(x)))

        return make

    kinds = {"gradcam": cams.GradCAM, "layercam": cams.LayerCAM, "fullgrad": cams.FullGrad, "finer-cam": cams.FinerCAM}
    return {name: of(kind) for name, kind in kinds.items()}


def zennit_methods(network: str, model: Any) -> dict[str, Callable[[], Any]]:
    import torch
    from zennit.attribution import Gradient
    from zennit.canonizers import SequentialMergeBatchNorm
    from zennit.composites import EpsilonGammaBox, EpsilonPlusFlat, ExcitationBackprop
    from zennit.torchvision import ResNetCanonizer

    canonizers = [ResNetCanonizer()] if network.startswith("resnet") else [SequentialMergeBatchNorm()]

    def of(composite: Any) -> Callable[[], Any]:
        def make() -> Any:
            def attribute(x: Any, c: int) -> Any:
                with Gradient(model=model, composite=composite()) as attributor:
                    return attributor(x, torch.eye(1000, device=x.device)[[c] * len(x)])[1]

            return each_class(attribute)

        return make

    return {
        "lrp-epsilon-plus-flat": of(lambda: EpsilonPlusFlat(canonizers=canonizers)),
        "lrp-epsilon-gamma-box": of(lambda: EpsilonGammaBox(low=-3.0, high=3.0, canonizers=canonizers)),
        "excitation-bp": of(lambda: ExcitationBackprop(canonizers=canonizers)),
    }


def peer_methods(library: str, network: str, model: Any) -> dict[str, Callable[[], Any]]:
    tables = {"captum": captum_methods, "pytorch-grad-cam": gradcam_methods, "zennit": zennit_methods}
    return tables[library](network, model)


# ---------------------------------------------------------------------------------------------------------- timing


def with_steps(method: str) -> str:
    return {"integrated-gradients": f"{method}(steps={STEPS})", "smoothgrad": f"{method}(samples={STEPS})"}.get(
        method, method
    )


def contenders(network: str, model: Any, methods: list[str]) -> Iterator[tuple[str, str, Run]]:
    """(library, method, run). Peers get a copy of the network each: some leave hooks, or rewrite it."""
    for method in methods:
        yield "classlens", method, ours(with_steps(method))
    for library in PEERS:
        for method in peer_methods(library, network, model):
            if method in methods:
                yield library, method, _peer(library, method, network)


def _peer(library: str, method: str, network: str) -> Run:
    made: list[Any] = []  # made once, as a user would

    def run(model: Any, images: Any, classes: list[int]) -> Any:
        if not made:
            made.append(peer_methods(library, network, copy.deepcopy(model))[method]())
        return made[0](images, classes)

    return run


def seconds(work: Callable[[], Any], device: str) -> float:
    """CPU time of the process or, on another device, time from idle to idle."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    synchronise(device)
    begun = clock()
    work()
    synchronise(device)
    return clock() - begun


def synchronise(device: str) -> None:
    """Wait until the device has nothing left to do."""
    import torch

    if device != "cpu":
        getattr(torch, device).synchronize()


def measure(network: str, methods: list[str], rounds: int, done: set[Any], device: str) -> Iterator[Row]:
    """Every contender at every size that is not done yet; those of one method and size take turns."""
    import torch

    model = build(network, device)
    table: dict[str, list[tuple[str, Run]]] = {}
    for library, method, run in contenders(network, model, methods):
        table.setdefault(method, []).append((library, run))
    for batch, classes in SIZES:
        images, wanted = torch.rand(batch, 3, 224, 224, device=device), list(range(1, classes + 1))

        def forward(images: Any = images) -> None:
            with torch.no_grad():
                model(images)

        for method, runs in table.items():
            if method not in MEASURED.get((batch, classes), methods):
                continue
            left = [(lib, run) for lib, run in runs if (network, lib, method, batch, classes) not in done]
            turns = rounds if batch == 1 else max(1, rounds // 2)  # large batches are steadier, and slow
            yield from _turns(network, method, left, forward, model, images, wanted, turns)


def _turns(
    network: str, method: str, runs: list[tuple[str, Run]], forward: Any, model: Any, images: Any, wanted: list[int],
    rounds: int,
) -> Iterator[Row]:  # fmt: skip
    ratios: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    device = images.device.type
    for library, run in runs:  # the first call makes caches, and tells whether it works at all
        try:
            for _ in range(1 if device == "cpu" else 3):  # GPUs choose their kernels in the first calls
                run(model, images, wanted)
            ratios[library] = []
        except Exception as error:
            errors[library] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
    for _ in range(rounds):
        for library, run in runs:
            if library in ratios:
                before = seconds(forward, device)
                took = seconds(lambda run=run: run(model, images, wanted), device)
                ratios[library].append(took / ((before + seconds(forward, device)) / 2))
    for library, _run in runs:
        at = (network, library, method, len(images), len(wanted))
        found = ratios.get(library)
        if found:
            yield Row(*at, statistics.median(found), min(found), max(found), len(found))
        else:
            yield Row(*at, None, why=errors[library])


# ---------------------------------------------------------------------------------------------------------- memory


def memory(network: str, library: str, method: str, device: str) -> int | None:
    """Peak memory (MB) of a process that does this once: resident memory or, on a GPU, what torch allocated there."""
    command = [sys.executable, __file__, "--peak", network, library, method, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    return int(done.stdout.split()[-1]) if done.returncode == 0 and done.stdout.strip() else None


def peak(network: str, library: str, method: str, device: str) -> None:
    """What `memory` starts: prints the peak."""
    import resource

    import torch

    model, images = build(network, device), torch.rand(1, 3, 224, 224, device=device)
    if library == "forward":
        with torch.no_grad():
            model(images)
    elif library == "backward":
        model(images)[:, 1].sum().backward()
    else:
        # No other library is imported than the one that is measured, and the network is not copied.
        if library == "classlens":
            ours(with_steps(method))(model, images, [1])
        else:
            peer_methods(library, network, model)[method]()(images, [1])
    if device == "cuda":
        print(torch.cuda.max_memory_allocated() // 2**20)
    elif device != "cpu":  # it has no figure of the peak: what is allocated at the end
        print(getattr(torch, device).current_allocated_memory() // 2**20)
    else:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10)


# ------------------------------------------------------------------------------------------------------------ main


def main() -> None:
    from classlens.methods import METHODS

    everything = [name for name in METHODS if name not in FORWARDS_ONLY]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NETWORKS), help="networks, with commas")
    parser.add_argument("--methods", default=",".join(everything), help="methods, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender takes its turn")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; CPU time counts all of them")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps; only cpu was ever tried")
    parser.add_argument("--rows", type=Path, help="measurements; what is there is kept (rows.jsonl beside this file)")
    parser.add_argument("--no-memory", action="store_true", help="only times")
    parser.add_argument("--peak", nargs=3, metavar=("NETWORK", "LIBRARY", "METHOD"), help=argparse.SUPPRESS)
    parser.add_argument("--network", help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet(options.threads)
    suffix = "" if options.device == "cpu" else f"-{options.device}"
    options.rows = options.rows or HERE / f"rows{suffix}.jsonl"
    if options.peak:
        peak(*options.peak, options.device)
    elif options.network:
        wanted = options.network, options.methods.split(","), options.rounds, keys(options.rows), options.device
        for row in measure(*wanted):
            append(options.rows, dataclasses.asdict(row))
            print(f"{'/'.join(map(str, row.key)):60s} {row.why or f'{row.ratio:.2f}'}", file=sys.stderr)
    else:
        run_all(options, HERE / f"RESULTS{suffix}.md")


def run_all(options: argparse.Namespace, out: Path) -> None:
    """A process for each network, then memory, then the page."""
    for network in options.models.split(","):
        subprocess.run(
            [sys.executable, __file__, "--network", network, "--methods", options.methods, "--rows", str(options.rows),
             "--rounds", str(options.rounds), "--threads", str(options.threads), "--device", options.device],
            check=True,
        )  # fmt: skip
        if not options.no_memory:
            measure_memory(network, options.rows, options.device)
    import report  # beside this file

    report.write(options.rows, out, options.threads, options.device)


def measure_memory(network: str, rows: Path, device: str) -> None:
    """Forward, forward + backward, and every contender of the methods people use most."""
    done = {(r["network"], r["library"], r["method"]) for r in read(rows) if "peak" in r}
    timed = [
        r for r in read(rows) if r.get("ratio") and r["network"] == network and (r["batch"], r["classes"]) == (1, 1)
    ]
    wanted = [("forward", ""), ("backward", ""), *((r["library"], r["method"]) for r in timed if r["method"] in WIDE)]
    for library, method in wanted:
        if (network, library, method) not in done:
            found = memory(network, library, method, device)
            append(rows, {"network": network, "library": library, "method": method, "peak": found})
            print(f"{network}/{library}/{method:30s} {found} MB", file=sys.stderr)


def read(rows: Path) -> list[dict[str, Any]]:
    """Rows so far; a line cut off by a kill is left out."""
    found = []
    for line in rows.read_text().splitlines() if rows.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def keys(rows: Path) -> set[Any]:
    """What is measured already."""
    return {(r["network"], r["library"], r["method"], r["batch"], r["classes"]) for r in read(rows) if "batch" in r}


def append(rows: Path, row: dict[str, Any]) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")


def quiet(threads: int) -> None:
    warnings.filterwarnings("ignore")  # peers warn on every call
    import torch

    from classlens.models._torchvision import import_torchvision

    import_torchvision()  # before pytorch-grad-cam does it, which would fail where torchvision's own operators do
    torch.set_num_threads(threads)
    torch.manual_seed(0)


if __name__ == "__main__":
    main()
