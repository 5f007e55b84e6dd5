"""A workaround for CPUs that report instructions they cannot run.

Some virtual machines report AMX, Intel's matrix instructions, but cannot run them. oneDNN, which implements PyTorch's
convolutions, relies on the report: it raises `could not create a primitive` or dies with an illegal instruction. An
environment variable stops oneDNN from using AMX. Only bfloat16 and 8-bit integers use it, so float32 stays as fast.

The kernel (`arch_prctl`) does not reveal such machines: oneDNN asks it too, and is told that AMX works.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from classlens.errors import MachineError

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
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
