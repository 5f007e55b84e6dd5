"""Several methods on the same image and classes, side by side.

>>> c = compare(m, "photo.jpg", ["tabby", "espresso"], methods=["agf", "gradcam", "lrp"])
>>> c.figure().savefig("comparison.png")
>>> c.likeness("lrp")
0.98
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from classlens.core.targets import RatherThan, Targets
from classlens.errors import MethodError
from classlens.explanation import Explanation, explain
from classlens.methods import method_names
from classlens.models.loaded import LoadedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALIKE = 0.9  # above this correlation, the maps of two classes show the same thing


@dataclass(frozen=True, repr=False)
class Comparison:
    """The explanations of one image by several methods. In a notebook it shows its figure."""

    explanations: dict[str, Explanation]
    failures: dict[str, str]  # methods that cannot explain this model, and why

    def likeness(self, method: str) -> float | None:
        """Mean correlation between the maps of different classes: near 1, the method shows the same for every class.

        None for a single class, and for classes that are contrasted with the same rivals, which makes maps similar.
        """
        e = self.explanations[method]
        maps = e.maps[0].flatten(1).double()
        if len(maps) < 2 or e.likeliest_rival(0, 0) is not None:
            return None
        maps = torch.nn.functional.normalize(maps - maps.mean(1, keepdim=True), dim=1)
        pairs = torch.triu_indices(len(maps), len(maps), offset=1)
        return float((maps[pairs[0]] * maps[pairs[1]]).sum(1).mean())

    def figure(self) -> Figure:
        """Rows are classes, columns methods."""
        from classlens import render

        return render.comparison(self.explanations, self.failures)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        from classlens import render

        return render.notebook_png(self.figure())

    def __repr__(self) -> str:
        failed = f"; {', '.join(self.failures)} failed" if self.failures else ""
        return f"<Comparison of {', '.join(self.explanations) or 'nothing'}{failed}>"


def compare(
    model: nn.Module | LoadedModel, image: Any, targets: Targets = None, methods: str | Sequence[str] = "all",
    *, rather_than: RatherThan = None,
) -> Comparison:  # fmt: skip
    """Explain one image with several methods; "all" means every method of the registry.

    >>> compare(m, "photo.jpg", "tabby", ["agf", "gradcam"], rather_than="Egyptian cat")
    """
    done: dict[str, Explanation] = {}
    failed: dict[str, str] = {}
    for name, outcome in comparing(model, image, targets, methods, rather_than):
        if isinstance(outcome, Explanation):
            done[name] = outcome
        else:
            failed[name] = str(outcome)
    return Comparison(done, failed)


def comparing(
    model: nn.Module | LoadedModel, image: Any, targets: Targets, methods: str | Sequence[str],
    rather_than: RatherThan = None,
) -> Iterator[tuple[str, Explanation | MethodError]]:  # fmt: skip
    """Like `compare`, one method at a time, to show progress. A method that fails yields its error."""
    for name in method_names(methods):
        try:
            yield name, explain(model, image, targets, name, rather_than=rather_than)
        except MethodError as error:
            yield name, error
