"""Writes what docs/ takes from the code: `python tools/write_docs.py` (a test checks that it is fresh)."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import classlens
from classlens.cli import app, flags
from classlens.methods import METHODS, Method

Command = Any  # a command of click; typer has a click of its own
DOCS = Path(__file__).resolve().parents[1] / "docs"

HEAD = """# The methods

<!-- written by tools/write_docs.py from the registry -->

Every method works on any model, except that some [need attention](transformers.md): `classlens.explain(model, images,
targets, method=NAME)`, `--method NAME`. Pass options in brackets or as keywords: `agf-release(without=A)`. [Choosing a
method](choosing.md) says which one to use.

## At a glance

The paper's table of properties, extended to every method of classlens.

- *class-specific*: another class gives another map. *signed*: negative values are evidence against the class.
- *conserves*: on ReLU-like networks the map sums to the starting relevance, minus what the report lists as absorbed.
- *functions*: the target may be [any function of the logits](concepts.md#targets), not only a class.
- *needs attention*: only for networks with attention; others are refused by name. See [Transformers](transformers.md).
- *cost*: the arithmetic of convolutions and matrix products, in forward passes of the network, for the first class and
  for each further class; counted on a small network of five convolutions, or of two transformer blocks for the family
  *attention*, so it is the same on every machine. It includes the forward pass, which all classes share.
  [Speed](speed.md) describes what else takes time.
"""

AFTER = """
!!! warning "Patents"

    Parts of layer-wise relevance propagation are covered by patents (EP3271863B1 and its family). If you use the
    methods of the family *relevance propagation* commercially, check whether these patents affect you.

`variant=release` computes what the authors' released code computes. Where that code has mistakes, the default corrects
them, and the note says how.
"""

# The cost of methods that run the network many times is counted for a few runs and scaled up.
MANY_RUNS = {
    "integrated-gradients": "steps",
    "smoothgrad": "samples",
    "rise": "n_masks",
    "meaningful-perturbation": "steps",
}
FEW = (2, 4)


class Small(nn.Module):
    """Five convolutions and a linear layer, to count on. The last one reads a map 16 times smaller than the image."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 16, 2), (16, 32, 2), (32, 64, 2), (64, 128, 2), (128, 128, 1))
        self.body = nn.ModuleList(nn.Conv2d(i, o, 3, stride, 1) for i, o, stride in sizes)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x).relu()
        return self.head(x.mean((2, 3)))


class Blocks(nn.Module):
    """A class token, 64 patches and two transformer blocks, to count methods for attention on.

    The attention is written out, since the counter does not know all fused kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 64, 8, 8), nn.Parameter(torch.randn(1, 1, 64))
        self.qkv, self.up = (nn.ModuleList(nn.Linear(64, n) for _ in range(2)) for n in (192, 128))
        self.down, self.norms = nn.ModuleList(nn.Linear(128, 64) for _ in range(2)), nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            q, k, v = qkv(self.norms(x)).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            x = x + ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = x + down(nn.functional.gelu(up(self.norms(x))))
        return self.head(x[:, 0])


@cache
def network(attention: bool = False) -> tuple[nn.Module, Tensor]:
    """The network that is counted on, and an image."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, image = (Blocks() if attention else Small()).eval(), torch.rand(1, 3, 64, 64)
    classlens.explain(model, image, method="gradient")  # the first recording of a model is checked by another forward
    return model, image


def operations(run: Any) -> int:
    """What a call computes: its additions and multiplications in convolutions and matrix products."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def in_forwards(method: str, classes: list[int], **options: Any) -> float:
    """The operations of maps of some classes over those of a plain forward pass."""
    model, image = network(METHODS[method].family == "attention")
    with torch.no_grad():
        forward = operations(lambda: model(image))
    return operations(lambda: classlens.explain(model, image, [classes], method, **options)) / forward


def cost(method: Method) -> tuple[float, float]:
    """Forward passes for the first class, and for each further one."""
    few = MANY_RUNS.get(method.name)
    if few is None:
        one, two = in_forwards(method.name, [1]), in_forwards(method.name, [1, 2])
        return one, two - one
    runs = inspect.signature(method.run).parameters[few].default
    found = []
    for classes in ([1], [1, 2]):
        low, high = (in_forwards(method.name, classes, **{few: n}) for n in FEW)
        found.append(low + (high - low) / (FEW[1] - FEW[0]) * (runs - FEW[0]))
    return found[0], found[1] - found[0]


def count(value: float) -> str:
    """Two digits are enough: 4.9, 150."""
    return f"{value:.1f}" if value < 9.95 else f"{float(f'{value:.2g}'):,.0f}"


def yes(mark: bool) -> str:
    """For a table."""
    return "yes" if mark else "–"


def glance() -> list[str]:
    """The table of properties."""
    lines = [
        "| method | class-specific | signed | conserves | functions | needs attention | cost, first class | further |",
        "|---|:-:|:-:|:-:|:-:|:-:|--:|--:|",
    ]
    for m in METHODS.values():
        marks = " | ".join(yes(mark) for mark in (m.class_specific, m.signed, m.conserves, m.scalars, m.attention))
        lines.append(f"| [`{m.name}`](#{m.family.replace(' ', '-')}) | {marks} | {' | '.join(map(count, cost(m)))} |")
    return lines


def methods_page() -> str:
    """docs/methods.md."""
    lines = [HEAD, *glance(), AFTER]
    for family in dict.fromkeys(m.family for m in METHODS.values()):
        lines += [
            f"\n## {family[0].upper()}{family[1:]}\n",
            "| name | description | options | paper |",
            "|---|---|---|---|",
        ]
        members = [m for m in METHODS.values() if m.family == family]
        lines += [f"| `{m.name}` | {m.summary} | {', '.join(m.options) or '–'} | {m.paper} |" for m in members]
        lines.append("")
        lines += [f"- **{m.name}**: {' '.join((inspect.getdoc(m.run) or '').split())}" for m in members]
    return "\n".join(lines) + "\n"


# The pages of the commands: title, and the first words of those on it.
COMMAND_PAGES = {
    "commands-explain.md": ("Commands: explain and look", "explain compare concepts models methods ops serve demo"),
    "commands-evaluate.md": ("Commands: evaluate and report", "evaluate choose masks report verify diff coverage"),
    "commands-train.md": ("Commands: train, and networks without labels", "train data selfsup"),
}

COMMANDS = """# The commands

<!-- written by tools/write_docs.py from the command itself -->

`classlens COMMAND --help` shows the same texts. An error that you can fix is one line, and the exit code is 2;
`classlens --debug COMMAND` also shows the traceback.

Mistakes that need no network to be seen, such as a wrong path, method or class, are reported at once. The most used
options have short names: `-m` model, `-c` class, `-k` top, `-M` method, `-d` data, `-o` out.

**Completion.** `classlens --install-completion` sets up your shell (bash, zsh, fish, PowerShell): after a restart, Tab
completes commands and options. `classlens --show-completion` prints the script, if you prefer to install it yourself.
"""


def commands_page() -> str:
    """docs/commands.md: every command in a line."""
    lines = [COMMANDS, "| command | what it does |", "|---|---|"]
    for path, command in leaves(typer.main.get_command(app), "classlens"):
        page = next(page for page, (_, words) in COMMAND_PAGES.items() if path.split()[1] in words.split())
        first = " ".join(" ".join(described(command)).split("  ")[0].split()).split(". ")[0].rstrip(".:")
        lines.append(f"| [`{path}`]({page}#{path.replace(' ', '-')}) | {first} |")
    return "\n".join(lines) + "\n"


def command_page(name: str) -> str:
    """A page of docs/commands-*.md: the options of some commands."""
    title, words = COMMAND_PAGES[name]
    lines = [f"# {title}", "", "<!-- written by tools/write_docs.py from the command itself -->"]
    lines += ["", "[All commands](commands.md) in one table; `classlens COMMAND --help` shows the same texts."]
    for path, command in leaves(typer.main.get_command(app), "classlens"):
        if path.split()[1] in words.split():
            lines += [f"\n## {path}\n", *described(command), *options_of(command)]
    return "\n".join(lines) + "\n"


def leaves(command: Command, path: str) -> list[tuple[str, Command]]:
    """Every command that does something, with its words."""
    if not hasattr(command, "commands"):
        return [(path, command)]
    return [leaf for name, child in command.commands.items() for leaf in leaves(child, f"{path} {name}")]


def described(command: Command) -> list[str]:
    """The help text, with its examples as code: those that follow each other as one block."""
    lines = (inspect.getdoc(command.callback) or "").splitlines()
    text = "\n".join(f"    {line.strip()}" if line.strip().startswith("classlens ") else line for line in lines)
    return re.sub(r"(    classlens .*)\n\n(?=    classlens )", r"\1\n", text).splitlines()


def options_of(command: Command) -> list[str]:
    """The table of arguments and options, from what `--help` says."""
    context = command.make_context(command.name, [], resilient_parsing=True)
    lines = ["", "| option | what it does | |", "|---|---|---|"]
    for parameter in context.command.params:
        name, about = parameter.get_help_record(context) or ("--help", "")
        if not name.startswith("--help"):
            about, _, rest = re.sub(r"([;\[] ?|  )[\d.]*(<=)?x[<>]=[\d.]+\]?", "", about).partition("  [")
            cells = (f"`{re.sub(' <[^|>]*>', '', name)}`", about.rstrip(), rest.rstrip("] "))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines if len(lines) > 3 else []


PAGES = {"methods.md": methods_page, "commands.md": commands_page}
PAGES |= {name: partial(command_page, name) for name in COMMAND_PAGES}

if __name__ == "__main__":
    flags.FILE.write_text(json.dumps(flags.registered(), indent=2) + "\n")
    print(f"wrote {flags.FILE.name}")
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(f"wrote docs/{name}")
