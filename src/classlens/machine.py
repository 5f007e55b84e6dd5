"""CPUs that announce more than they can do.

Some virtual machines announce AMX, Intel's matrix instructions, but do not run them. PyTorch's convolutions, which come
from oneDNN, believe the announcement: they raise `could not create a primitive` or die with an illegal instruction. An
environment variable keeps oneDNN from AMX. Only bfloat16 and 8-bit integers ever use it, so float32 loses nothing.

The kernel's own answer (`arch_prctl`) does not tell such machines apart: oneDNN asks it too, and is told yes.
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
    """Whether the text of /proc/cpuinfo has AMX among the CPU's flags.

    >>> announces_amx("flags : fpu avx512f amx_bf16 amx_tile amx_int8")
    True
    """
    return re.search(r"^flags\s*:.*\bamx_tile\b", cpuinfo, re.M) is not None


def avoid_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Keep oneDNN from AMX where the CPU announces it, unless the variable is set already.

    oneDNN reads the variable at the first convolution, so this has to come before it.
    """
    try:
        announced = announces_amx(cpuinfo.read_text())
    except OSError:  # not Linux
        return
    if announced:
        os.environ.setdefault(VARIABLE, WITHOUT_AMX)


@contextmanager
def onednn_errors() -> Iterator[None]:
    """Say in one line what helps when oneDNN fails; other errors pass as they are."""
    try:
        yield
    except RuntimeError as error:
        if not _REFUSED.search(str(error)):
            raise
        raise MachineError(
            "oneDNN could not create a primitive, as on CPUs that announce AMX but do not run it; "
            f"start again with {VARIABLE}={WITHOUT_AMX} in the environment"
        ) from error
