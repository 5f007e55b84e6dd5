"""Errors: each is one line that says what is wrong and what to do.

Every error that a user can cause is a `ClasslensError`; the command prints its text and exits with 2.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape bytes of a file name that are not UTF-8, so that every file, page and terminal can show the text.

    >>> print(printable(os.fsdecode(b"caf\xe9.jpg")))
    caf\udce9.jpg
    """
    return text.encode("utf-8", "backslashreplace").decode()


class ClasslensError(Exception):
    """Base of all errors that a user can cause or fix. The text is one line: what is wrong, what to do."""

    def __str__(self) -> str:
        return printable(super().__str__())


class MissingPackage(ClasslensError):
    """A required package that is not installed."""


class ImageError(ClasslensError):
    """An image that cannot be read or explained."""


class DataError(ClasslensError):
    """A data set that has an unexpected layout, or lacks what a test needs."""


class ModelError(ClasslensError):
    """A model that cannot be found, loaded or run."""


class MachineError(ClasslensError):
    """A machine that cannot run the instructions that its CPU reports."""


class TargetError(ClasslensError):
    """A class that does not exist, or a name that matches several."""


class MethodError(ClasslensError):
    """An unknown method, an unknown option, or a method that cannot explain this model."""


class CaptureError(ClasslensError):
    """A forward pass that cannot be recorded exactly."""


class UnsupportedOp(MethodError):
    """An operation of the network for which a method has no rule."""


class NotFiniteError(MethodError):
    """A map with NaN or infinite values."""
