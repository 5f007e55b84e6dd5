"""The command `classlens`."""

from classlens.cli.commands import app, main

__all__ = ["app", "main"]
