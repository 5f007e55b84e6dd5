"""The machine: a workaround for CPUs that report instructions they cannot run, and the size of its memory.

Some virtual machines report AMX, Intel's matrix instructions, but cannot run them. oneDNN, which implements PyTorch's
convolutions, relies on the report: it raises `could not create a primitive` or dies with an illegal instruction. An
environment variable stops oneDNN from using AMX. Only bfloat16 and 8-bit integers use it, so float32 stays as fast.

The kernel (`arch_prctl`) does not reveal such machines: oneDNN asks it too, and is told that AMX works.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from classlens.errors import MachineError

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
_USUAL = 16 * 2**30  # memory of a machine that does not say
_REFUSED = re.compile(r"could not create a primitive(?! descriptor)")


def announces_amx(cpuinfo: str) -> bool:
    """Whether the text of /proc/cpuinfo lists AMX among the CPU's flags.

    >>> announces_amx("flags : fpu avx512f amx_bf16 amx_tile amx_int8")
    True
    """
    return re.search(r"^flags\s*:.*\bamx_tile\b", cpuinfo, re.M) is not None


def avoid_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Stop oneDNN from using AMX if the CPU reports it, unless the variable is already set.

    oneDNN reads the variable at the first convolution, so call this before.
    """
    try:
        announced = announces_amx(cpuinfo.read_text())
    except OSError:  # not Linux
        return
    if announced:
        os.environ.setdefault(VARIABLE, WITHOUT_AMX)


@functools.cache
def memory() -> int:
    """Bytes of memory that this process may use: of the machine or, in a container, of its limit.

    >>> memory() // 2**30
    23
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        total = _USUAL
    return min([total, *_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _limits(root: Path, own: Path) -> Iterator[int]:
    """The memory limits of the control groups that a process belongs to."""
    try:
        names = [line.split(":", 2)[2] for line in own.read_text().splitlines()]
    except (OSError, IndexError):
        names = []
    folders = [root, root / "memory"]
    for name in names:
        inside = [part for part in name.split("/") if part and part != ".."]
        folders += [base.joinpath(*inside[:n]) for base in (root, root / "memory") for n in range(1, len(inside) + 1)]
    for file in (folder / name for folder in folders for name in ("memory.max", "memory.limit_in_bytes")):
        try:
            yield int(file.read_text())
        except (OSError, ValueError):  # not there, or "max": no limit
            continue


@contextmanager
def onednn_errors() -> Iterator[None]:
    """Turn oneDNN's failure into a one-line error with the workaround; other errors pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if not _REFUSED.search(str(error)):
            raise
        raise MachineError(
            "oneDNN could not create a primitive, as on CPUs that report AMX but cannot run it; "
            f"restart with {VARIABLE}={WITHOUT_AMX} in the environment"
        ) from error
