import threading

import pytest

import classlens
from classlens.progress import reporting, ticker, track
from networks import build, pictures


@pytest.mark.parametrize(
    ("method", "total"),
    [
        ("integrated-gradients(steps=16)", 4), ("smoothgrad(samples=3)", 3), ("gradient-shap(samples=4)", 4),
        ("deeplift-shap", 4), ("rise(n_masks=20)", 3), ("meaningful-perturbation(steps=2)", 8),
    ],
)  # fmt: skip
def test_long_methods_report_each_step(method: str, total: int) -> None:
    seen: list[tuple[str, int, int]] = []
    with reporting(lambda *step: seen.append(step)):
        classlens.explain(build("plain"), pictures(), [[1, 2], [3, 4]], method)
    name = method.split("(")[0]
    assert seen == [(name, done, total) for done in range(total + 1)]


def test_nobody_is_called_outside_the_block_or_in_another_thread() -> None:
    seen: list[tuple[str, int, int]] = []
    with reporting(lambda *step: seen.append(step)):
        other = threading.Thread(target=lambda: list(track("ab", 2, "other")))
        other.start()
        other.join()
    ticker(2, "after")()
    assert list(track("ab", 2, "after")) == ["a", "b"]
    assert seen == []
