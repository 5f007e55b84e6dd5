"""Networks of other libraries x methods: which questions are answered, which refused, and whether an error is silent.

    make outside PYTEST_ARGS=tests/outside/test_asked.py            # the environment with all libraries, and the tests
    .venv-outside/bin/python benchmarks/questions.py --out docs/questions-table.md

Every network has random weights and is asked two questions of its kind. A map counts as wrong if it is not finite, has
another size than the image, is empty, or is the same for both questions, without a note in the report.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

MARKS = {"ok": "●", "same": "○", "noted": "◐", "refused": "–", "wrong": "**wrong**"}
FEW = {"integrated-gradients": "steps=2", "smoothgrad": "samples=2", "rise": "n_masks=4", "gradient-shap": "samples=2",
       "meaningful-perturbation": "steps=2"}  # fmt: skip

HEAD = """# Networks and questions

<!-- written by benchmarks/questions.py -->

Methods on networks of other libraries, with random weights. Each network is asked two [questions](questions.md) of
its kind: two boxes, two pixels, two texts, two vectors or two neurons.

| mark | meaning |
|---|---|
| ● | two maps, finite and different |
| ◐ | an answer with a note in the report: an earlier feature map, unaccounted relevance, an empty map |
| ○ | one map for all targets, as the method [is described](methods.md) |
| – | refused, in one line that says why |

A map that is not finite, has another size than the image, is empty, or is the same for both questions, without a note,
would be marked **wrong**.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table (Markdown)")
    parser.add_argument("--networks", default="", help="only those whose names contain this")
    parser.add_argument("--methods", default="", help="names separated by commas; by default all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    from classlens.models._torchvision import import_torchvision

    import_torchvision()
    import torch

    from classlens import METHODS
    from libraries import NETWORKS, verdict

    torch.set_num_threads(1)
    names = options.methods.split(",") if options.methods else list(METHODS)
    counts: Counter[str] = Counter()
    rows: dict[str, list[str]] = {method: [] for method in names}
    done: list[str] = []
    for name in (name for name in NETWORKS if options.networks in name):
        torch.manual_seed(0)
        network = NETWORKS[name]()
        for method in names:
            found = verdict(network, f"{method}({FEW[method]})" if method in FEW else method)
            counts[found.word] += 1
            rows[method].append(MARKS[found.word])
            if found.word == "wrong":
                print(f"{name}, {method}: {found.why}", file=sys.stderr)
        done.append(name)
        print(name, dict(counts), file=sys.stderr, flush=True)
        command = f"python benchmarks/questions.py --methods {','.join(names)} --out docs/questions-table.md"
        options.out.write_text(f"{HEAD}```\n{command}\n```\n\n{page(done, rows, counts)}")


def page(networks: list[str], rows: dict[str, list[str]], counts: Counter[str]) -> str:
    """The networks with their numbers, the table, and how many cells have each mark."""
    numbered = [f"{i}. {name}" for i, name in enumerate(networks, start=1)]
    numbers = " | ".join(str(i) for i in range(1, len(networks) + 1))
    lines = [f"| method | {numbers} |", "|---" * (len(networks) + 1) + "|"]
    lines += [f"| {method} | {' | '.join(cells)} |" for method, cells in rows.items()]
    said = ", ".join(f"{counts[word]} {mark}" for word, mark in MARKS.items() if word != "wrong")
    summary = f"{sum(counts.values())} cells: {said}, {counts['wrong']} wrong."
    return "\n".join(numbered) + "\n\n" + "\n".join(lines) + f"\n\n{summary}\n"


if __name__ == "__main__":
    main()
