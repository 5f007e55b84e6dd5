"""The machine: a workaround for CPUs that report instructions they cannot run, and the size of its memory.

Some virtual machines report AMX, Intel's matrix instructions, but cannot run them. oneDNN, which implements PyTorch's
convolutions, relies on the report: it raises `could not create a primitive` or dies with an illegal instruction. An
environment variable stops oneDNN from using AMX. Only bfloat16 and 8-bit integers use it, so float32 stays as fast.

The kernel (`arch_prctl`) does not reveal such machines: oneDNN asks it too, and is told that AMX works.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from classlens.errors import MachineError

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
MUCH_MEMORY = 2**28  # bytes: for less, it is not worth the time to check free memory or to give any back
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
    return min([total, *(limit for _, limit in _limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))])


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process can still get; where the system does not say, all of the machine's."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", (proc / "meminfo").read_text(), re.M)
    except OSError:  # not Linux
        found = None
    free = memory() if found is None else 1024 * int(found[1])
    return min([free, *(limit - _used(folder) for folder, limit in _limits(groups, proc / "self/cgroup"))])


def _used(group: Path) -> int:
    """The memory that a control group uses, without files that the kernel can drop."""
    used = cached = 0
    for name in ("memory.current", "memory.usage_in_bytes"):
        with suppress(OSError, ValueError):
            used = int((group / name).read_text())
    with suppress(OSError):
        found = re.search(r"^(?:total_)?inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)
        cached = int(found[1]) if found else 0
    return max(0, used - cached)


def check_memory(needed: int, what: str) -> None:
    """Refuse what would need more memory than there is: the system would end the process without a word."""
    free = free_memory()
    if needed > free:
        raise MachineError(
            f"{what} needs about {needed / 2**30:.3g} GB more memory, and {free / 2**30:.3g} GB are free; give smaller "
            "pictures, or fewer at once"
        )


@functools.cache
def _allocator() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # not glibc
        return None


def give_back_memory() -> None:
    """Return freed memory to the system: glibc keeps blocks of up to 32 MB for itself, scattered, so a peak stays."""
    if _allocator() is not None:
        _allocator()(0)


def _limits(root: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that a process belongs to, each with its memory limit."""
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
            yield file.parent, int(file.read_text())
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
