"""A CPU that announces AMX but does not run it: avoided by the command, named in one line by the library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.cli import main
from classlens.errors import MachineError
from classlens.machine import VARIABLE, announces_amx, avoid_amx, free_memory, memory, onednn_errors
from networks import build, pictures

XEON = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\nbugs\t\t: x\n"
EPYC = "processor\t: 0\nflags\t\t: fpu sse4_1 avx2 avx512f avx512_bf16 avx512_vnni\nbugs\t\t: amx_tile\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"
ERROR = "could not create a primitive"


@pytest.mark.parametrize(("cpuinfo", "announced"), [(XEON, True), (EPYC + XEON, True), (EPYC, False), (ARM, False)])
def test_which_cpus_announce_amx(cpuinfo: str, announced: bool) -> None:
    assert announces_amx(cpuinfo) is announced


@pytest.mark.parametrize(
    ("cpuinfo", "before", "after"),
    [
        (XEON, None, "AVX512_CORE_BF16"),
        (XEON, "AVX2", "AVX2"),  # what the user has chosen
        (EPYC, None, None),
        (None, None, None),  # not Linux
    ],
)
def test_amx_is_avoided_where_it_is_announced(
    cpuinfo: str | None, before: str | None, after: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, before or "")  # so that it is put back
    if before is None:
        monkeypatch.delenv(VARIABLE)
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    avoid_amx(tmp_path / "cpuinfo")
    assert os.environ.get(VARIABLE) == after


class FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError(ERROR)


class Broken(nn.Module):
    """A network whose convolutions fail as those of oneDNN do."""

    def __init__(self, backwards: bool = False) -> None:
        super().__init__()
        self.body, self.backwards = build("plain"), backwards

    def forward(self, x: Tensor) -> Tensor:
        if not self.backwards:
            raise RuntimeError(ERROR)
        return self.body(FailsBackwards.apply(x))


@pytest.mark.parametrize("backwards", [False, True])
def test_explain_names_the_variable_in_one_line(backwards: bool) -> None:
    with pytest.raises(MachineError, match="restart with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16") as error:
        classlens.explain(Broken(backwards).eval(), pictures(), 0, "gradient")
    assert "\n" not in str(error.value)


def test_the_command_avoids_amx_and_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = []
    monkeypatch.setattr("classlens.cli.commands.avoid_amx", lambda: called.append(True))
    monkeypatch.setattr("classlens.cli.commands.app", lambda arguments: Broken()(pictures()))
    with pytest.raises(SystemExit) as ended:
        main(["explain", "photo.jpg"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert VARIABLE in said
    assert "bug" not in said
    assert called


@pytest.mark.parametrize("text", ["out of order", "could not create a primitive descriptor for the matmul primitive"])
def test_other_errors_pass(text: str) -> None:
    with pytest.raises(RuntimeError, match=text), onednn_errors():
        raise RuntimeError(text)


def test_free_memory(tmp_path: Path) -> None:
    """What the system says is left, or what a container's limit leaves without files that can be dropped."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    assert free_memory(proc, groups) == memory()  # a system that does not say
    (proc / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    assert free_memory(proc, groups) == 5000 * 1024
    (proc / "self/cgroup").write_text("0::/box\n")
    (groups / "box").mkdir(parents=True)
    for name, text in {"max": "3000000", "current": "2500000", "stat": "anon 5\ninactive_file 700000\n"}.items():
        (groups / "box" / f"memory.{name}").write_text(text)
    assert free_memory(proc, groups) == 3000000 - (2500000 - 700000)
