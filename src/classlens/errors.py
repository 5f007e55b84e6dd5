"""What can go wrong, as one line that says what to do.

Every error that a user can cause is a `ClasslensError`; the command prints its text and exits with 2.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""A text that every file, page and terminal takes: bytes of a file's name that are no UTF-8 are escaped.

    >>> print(printable(os.fsdecode(b"caf\xe9.jpg")))
    caf\udce9.jpg
    """
    return text.encode("utf-8", "backslashreplace").decode()


class ClasslensError(Exception):
    """Base of all errors a user can cause or mend. The text is one line: what is wrong, what to do."""

    def __str__(self) -> str:
        return printable(super().__str__())


class MissingPackage(ClasslensError):
    """A package that is needed for this and not installed."""


class ImageError(ClasslensError):
    """A picture that cannot be read or cannot be explained."""


class DataError(ClasslensError):
    """A data set that is not laid out as expected, or cannot serve a test."""


class ModelError(ClasslensError):
    """A model that cannot be found, loaded or run."""


class MachineError(ClasslensError):
    """A computer that cannot do what its CPU announces."""


class TargetError(ClasslensError):
    """A class that does not exist, or a name that fits several."""


class MethodError(ClasslensError):
    """An unknown method, an unknown option, or a method that cannot serve this model."""


class CaptureError(ClasslensError):
    """A forward pass that cannot be recorded faithfully."""


class UnsupportedOp(MethodError):
    """An operation of the network for which a method has no rule."""


class NotFiniteError(MethodError):
    """A map with NaN or infinite values, which would show nothing."""
