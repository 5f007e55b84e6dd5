"""Parts of the classes and images give the maps of the whole, within the memory that they may take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens import chunks, machine
from classlens.errors import ModelError, TargetError
from classlens.methods import METHODS, Case, Method, Result
from classlens.progress import reporting
from networks import build, pictures
from quick import QUICK, suited

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
CLASSES = [[3, 0, 5], [2, 3, 4]]
SEVERAL = ("residual", "gated", "modern")  # skip connections, gates, tokens


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A budget of one image and two classes at a time; lists the (images, classes) that methods got."""
    seen: list[tuple[int, int]] = []
    for name, method in METHODS.items():

        def spied(case: Case, original: Any = method.run, **options: Any) -> Result:
            seen.append((case.targets.shape[0], case.targets.shape[1]))
            return original(case, **options)

        monkeypatch.setitem(METHODS, name, Method(**{**vars(method), "run": spied}))
    monkeypatch.setattr(chunks, "budget", lambda: 2000)
    monkeypatch.setattr(chunks, "held", lambda chosen, case: 500)
    return seen


def explained(model: nn.Module, x: Tensor, method: str, **more: Any) -> classlens.Explanation:
    return classlens.explain(model, x, CLASSES[: len(x)], method, **QUICK.get(method, {}), **more)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9 * float(b.nan_to_num().abs().max()), equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SEVERAL)
def test_parts_are_the_whole(name: str, method: str, request: pytest.FixtureRequest) -> None:
    model, x = build(suited(name, method)).double(), pictures(2).double()
    whole = explained(model, x, method)
    seen = request.getfixturevalue("tiny")
    parts = explained(model, x, method)
    assert seen == [(1, 2), (1, 1)] * 2
    assert torch.equal(parts.targets, whole.targets)
    same(parts.logits, whole.logits)
    same(parts.maps, whole.maps)
    for number in ("started", "arrived", "absorbed"):
        same(getattr(parts.report, number), getattr(whole.report, number))
    assert (parts.report.ops, parts.report.notes) == (whole.report.ops, whole.report.notes)


@pytest.mark.parametrize("method", ["agf", "agf(without=Fx)", "agf-paper", "agf-release"])
def test_traces_are_joined_layer_by_layer(method: str, request: pytest.FixtureRequest) -> None:
    model, x = build("residual").double(), pictures(2).double()
    whole = explained(model, x, method, trace=True)
    request.getfixturevalue("tiny")
    parts = explained(model, x, method, trace=True)
    assert [(a.name, a.op, list(a.terms)) for a in parts.trace] == [(a.name, a.op, list(a.terms)) for a in whole.trace]
    for mine, theirs in zip(parts.trace, whole.trace, strict=True):
        for term in mine.terms:
            same(mine.terms[term], theirs.terms[term])


def test_channels_are_joined_too(request: pytest.FixtureRequest) -> None:
    from classlens.explanation import run

    model, x = build("residual").double(), pictures(2).double()
    whole = run(model, x, CLASSES, "lrp")[1].colours
    request.getfixturevalue("tiny")
    parts = run(model, x, CLASSES, "lrp")[1].colours
    assert whole is not None
    assert parts is not None
    assert parts.shape == (2, 3, *x.shape[1:])
    same(parts, whole)


@pytest.mark.usefixtures("tiny")
def test_parts_report_their_progress() -> None:
    heard: list[tuple[str, int, int]] = []
    with reporting(lambda what, done, total: heard.append((what, done, total))):
        explained(build("plain"), pictures(1), "gradient")
    assert heard[0] == ("classes by gradient", 0, 3)
    assert heard[-1] == ("classes by gradient", 3, 3)


class BatchNormalised(nn.Module):
    """The images of a batch affect each other: values are relative to the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((self.conv(x) - 0.9 * self.conv(x).mean(0, keepdim=True)).relu().mean((2, 3)))


@pytest.mark.usefixtures("tiny")
def test_a_batch_that_is_more_than_its_images_is_not_cut() -> None:
    with pytest.raises(ModelError, match=r"images of a batch affect each other.*give at most 1 images"):
        explained(BatchNormalised().eval(), pictures(2), "gradient")


@pytest.mark.parametrize("trace", [False, True])
def test_a_result_larger_than_the_machine_is_refused(trace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "memory", lambda: 300_000)
    model, x = build("residual"), pictures(1)
    if not trace:
        explained(model, x, "agf")
        monkeypatch.setattr(chunks, "memory", lambda: 90_000)
    with pytest.raises(
        TargetError, match=r"the (maps|traces) of 3 targets need .* GB.*explain fewer classes or images"
    ):
        explained(model, x, "agf", trace=trace)


def test_the_memory_of_a_container_counts(tmp_path: Path) -> None:
    own, inner = tmp_path / "cgroup", tmp_path / "slice" / "job"
    own.write_text("0::/slice/job\n")
    inner.mkdir(parents=True)
    assert list(machine._limits(tmp_path, own)) == []
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1073741824\n")
    assert list(machine._limits(tmp_path, own)) == [(inner.parent, 2**30)]
    assert 2**28 < machine.memory() < 2**50


_PEAK = """
import json, re, sys
import torch, classlens
from classlens import chunks
chunks.MOST = int(sys.argv[1])
torch.manual_seed(0)
layers = [torch.nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(6)]
model = torch.nn.Sequential(*[m for c in layers for m in (c, torch.nn.ReLU())], torch.nn.AdaptiveAvgPool2d(1),
                            torch.nn.Flatten(), torch.nn.Linear(16, 100)).eval()
images, classes = torch.rand(int(sys.argv[2]), 3, 64, 64), int(sys.argv[3])
classlens.explain(model, images[:1], method="agf")
def peak():  # of this program: getrusage would begin with that of the process which started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

before = peak()
classlens.explain(model, images, classlens.top(classes), method="agf")
print(json.dumps((peak() - before) / 1024))
"""


@pytest.mark.parametrize(("images", "classes"), [(1, 100), (48, 1)])
def test_the_peak_stays_within_the_budget(images: int, classes: int) -> None:
    def peak(budget: int) -> float:
        command = [sys.executable, "-c", _PEAK, str(budget), str(images), str(classes)]
        return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

    budget = 32
    assert peak(budget * 2**20) < 2 * budget  # MB; the allocator keeps some
    assert peak(2**33) > 3 * budget
