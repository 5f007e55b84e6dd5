"""Peak memory and CPU time of a forward pass, a gradient and a method on large pictures, each in a process of its own.

python benchmarks/memory.py --sides 224 1024 --calls forward gradient agf
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision, with random weights")
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 1024])
    parser.add_argument("--calls", nargs="+", default=["forward", "gradient", "agf"])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.model, given.measure[0], int(given.measure[1]))
        return
    for call in given.calls:
        for side in given.sides:
            subprocess.run([sys.executable, __file__, "--model", given.model, "--measure", call, str(side)], check=True)


def measure(name: str, call: str, side: int) -> None:
    import torch

    import classlens
    from classlens.models._torchvision import import_torchvision

    torch.manual_seed(0)
    model, image = import_torchvision().models.get_model(name, weights=None).eval(), torch.randn(1, 3, side, side)
    begun = time.process_time()
    if call == "forward":
        with torch.no_grad():
            model(image)
    elif call == "gradient":
        torch.autograd.grad(model(image.requires_grad_())[0, 1], image)
    else:
        classlens.explain(model, image, 1, call)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name} {call} at {side}: peak {peak:.0f} MB, {time.process_time() - begun:.1f} s of CPU time")


if __name__ == "__main__":
    main()
