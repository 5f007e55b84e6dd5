"""The command `classlens`: its subcommands and exit codes.

Each command reads options, calls the library and prints; nothing is computed here. torch and matplotlib take seconds to
import, so each command imports what it needs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from classlens.cli.choose import choose
from classlens.cli.compare import compare
from classlens.cli.concepts import concepts
from classlens.cli.diff import diff
from classlens.cli.early import check_out
from classlens.cli.evaluate import add_evaluate
from classlens.cli.explain import explain
from classlens.cli.lists import coverage, methods, models, ops
from classlens.cli.masks import masks
from classlens.cli.options import Device, complain
from classlens.cli.plain import App
from classlens.cli.report import report
from classlens.cli.selfsup import selfsup
from classlens.cli.train import data, train
from classlens.cli.verify import verify
from classlens.errors import ClasslensError
from classlens.machine import avoid_amx, onednn_errors

_DEBUG = "CLASSLENS_DEBUG"

app = App()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 success, 1 a bug, 2 an error that the user can fix, 130 stopped with Ctrl-C."""
    avoid_amx()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names may not be UTF-8: show them escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        with onednn_errors():
            app(arguments)
    except (ClasslensError, OSError) as error:
        if os.environ.get(_DEBUG):
            raise
        complain(_in_words(error))
        sys.exit(2)
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        complain(f"{type(error).__name__}: {error} (a bug? `classlens --debug ...` shows the traceback)")
        sys.exit(1)


def _in_words(error: Exception) -> str:
    """The text of an error; that of the operating system without its number: "no space left on device: out/map.png"."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror[:1].lower()}{error.strerror[1:]}: {os.fsdecode(error.filename)}"
    return str(error)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"classlens {version('classlens')}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", envvar=_DEBUG, help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """See where a vision network finds each class."""
    if debug:
        os.environ[_DEBUG] = "1"


app.command(no_args_is_help=True)(explain)
app.command(no_args_is_help=True)(compare)
app.command(no_args_is_help=True)(concepts)
app.command()(models)
app.command()(methods)
add_evaluate(app)
app.add_typer(train, name="train")
app.add_typer(data, name="data")
app.add_typer(selfsup, name="selfsup")
app.command(no_args_is_help=True)(report)
app.command(no_args_is_help=True)(verify)
app.command(no_args_is_help=True)(diff)
app.command(no_args_is_help=True)(choose)
app.command(no_args_is_help=True)(masks)
app.command()(ops)
app.command()(coverage)


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="A network to offer; can be repeated.  [default: efficientnet-lite0]",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 opens the page to other computers.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")] = 7860,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR",
            help="Add the tab Concepts, which shows parts of the images in this folder to visitors; can be repeated.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Serve a web page: drop a picture, click a class, see where the network finds it.

        classlens serve
        classlens serve --data photos/
        classlens serve --model efficientnet-lite0 --model torchvision:resnet50 --port 8000

    The page works offline and stores no pictures. Ctrl-C stops the server.
    """
    from classlens.app.server import serve as run
    from classlens.models.loading import pick_device

    run(model or ["efficientnet-lite0"], host, port, pick_device(device), data or [])


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder for demo.png.")] = Path("out"),
) -> None:
    """Explain two classes of one picture with the included network."""
    check_out(out)
    from classlens.demo import run

    run(out)
