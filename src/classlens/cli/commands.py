"""The command `classlens`: its commands, and how it ends.

Each command reads options, calls the library and prints; nothing is computed here. torch and matplotlib take seconds to
import, so each command imports what it needs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from classlens.cli.compare import compare
from classlens.cli.evaluate import add_evaluate
from classlens.cli.explain import explain
from classlens.cli.lists import coverage, methods, models, ops
from classlens.cli.options import Device, complain
from classlens.cli.report import report
from classlens.cli.selfsup import selfsup
from classlens.cli.train import data, train
from classlens.errors import ClasslensError
from classlens.machine import avoid_amx, onednn_errors

_DEBUG = "CLASSLENS_DEBUG"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # main() says in one line what went wrong
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 a bug, 2 something the user can mend, 130 stopped with Ctrl-C."""
    avoid_amx()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name need not be UTF-8: show it escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        with onednn_errors():
            app(arguments)
    except (ClasslensError, OSError) as error:
        if os.environ.get(_DEBUG):
            raise
        complain(str(error))
        sys.exit(2)
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        complain(f"{type(error).__name__}: {error} (a bug? `classlens --debug ...` shows where it happened)")
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
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
app.command()(models)
app.command()(methods)
add_evaluate(app)
app.add_typer(train, name="train")
app.add_typer(data, name="data")
app.add_typer(selfsup, name="selfsup")
app.command(no_args_is_help=True)(report)
app.command()(ops)
app.command()(coverage)


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A network of the page; can be repeated.  [default: efficientnet-lite0]", show_default=False),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 opens the page to others.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7860,
    device: Device = "auto",
) -> None:
    """Show a page in the browser: drop a picture, click a class, see where it is found.

        classlens serve

        classlens serve --model efficientnet-lite0 --model torchvision:resnet50 --port 8000

    Nothing is fetched from elsewhere and no picture is kept. Ctrl-C stops it.
    """
    from classlens.app.server import serve as run
    from classlens.models.loading import pick_device

    run(model or ["efficientnet-lite0"], host, port, pick_device(device))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where demo.png goes.")] = Path("out"),
) -> None:
    """Explain two classes of one picture with the embedded network."""
    from classlens.demo import run

    run(out)
