"""Work in a fork of this process."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

FAILED = 70  # the exit code of a fork whose function raised


def forked(work: Callable[[], int], says: Path | str | None = os.devnull) -> int:
    """Run a function in a fork, with what it says into a file (None: as before); gives the fork's id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        if says is not None:
            file = os.open(says, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            for stream in (0, 1, 2):
                os.dup2(file, stream)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def waited_for(pid: int) -> int:
    """Wait for a fork, and end it if this process is interrupted; gives its status."""
    try:
        return os.waitpid(pid, 0)[1]
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
