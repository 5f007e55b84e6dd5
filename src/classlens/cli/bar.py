"""The command's progress bar.

    >>> with Bar() as bar:
    ...     report(model, data, "report.html", progress=bar)

It is on stderr and appears after two seconds. If stderr is not a terminal, it prints a line at the end of each stage
and from time to time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

_PATIENCE = 2.0  # seconds before the bar appears
_QUIET = 30.0  # seconds between lines without a terminal


class Bar:
    """A `classlens.progress.Progress` that draws a bar.

    A new stage starts when the count falls or the total changes.
    """

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        # Not on stdout: results may be piped into a file while the bar is on the terminal.
        self._bar = Progress(
            *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("", total=None, speed="")
        self._due = time.monotonic() + _PATIENCE
        self._timer: threading.Timer | None = None
        self._what, self._done, self._total = "", -1, -1
        self._begun = self._said = time.monotonic()

    def __enter__(self) -> Bar:
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def __call__(self, what: str, done: int, total: int, /) -> None:
        """Show the progress of a stage."""
        now = time.monotonic()
        if done < self._done or total != self._total:
            self._bar.reset(self._task, total=total)
            self._begun = self._said = now
        ended = done == total and (what, done, total) != (self._what, self._done, self._total)
        self._what, self._done, self._total = what, done, total
        speed = done / max(now - self._begun, 1e-9)
        self._bar.update(self._task, description=escape(what), completed=done, speed=f"{speed:.2f}/s" if done else "")
        if not self._console.is_terminal and (ended or now - self._said > _QUIET):
            self._said = now
            self._say(speed)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar while results are printed."""
        self._hide()
        try:
            yield
        finally:
            self._show()

    def _say(self, speed: float) -> None:
        line = f"{self._what}: {self._done} of {self._total}"
        if self._done:
            line += f", {speed:.2f}/s"
        if 0 < self._done < self._total:
            line += f", {(self._total - self._done) / speed:.0f} s left"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        if self._console.is_terminal:
            self._timer = threading.Timer(max(0.0, self._due - time.monotonic()), self._bar.start)
            self._timer.start()

    def _hide(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # it may be about to start the bar
            self._bar.stop()
