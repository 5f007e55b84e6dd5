"""Memory: values of the forward pass are freed behind the sweep, but only if the pass serves one explanation."""

from __future__ import annotations

import pytest
import torch

from classlens.core.capture import record
from classlens.errors import CaptureError
from classlens.explanation import run
from networks import NETWORKS, build, pictures

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
SWEEPS = ["agf", "agf-paper", "agf-release", "lrp", "clrp", "rap", "contrastive-excitation-bp"]


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "dictionary"])
@pytest.mark.parametrize("method", SWEEPS)
def test_freeing_values_changes_no_map(method: str, name: str) -> None:
    model, x = build(name).double(), pictures(2).double()
    tape = record(model, x)
    _, shared = run(model, x, [[1, 4], [2, 0]], method, recorded=tape)
    _, again = run(model, x, [[1, 4], [2, 0]], method, recorded=tape)  # a shared tape keeps its values
    case, alone = run(model, x, [[1, 4], [2, 0]], method)
    assert torch.equal(shared.maps, again.maps)
    assert torch.allclose(alone.maps, shared.maps, rtol=1e-9, atol=1e-12)
    inside = [value for node in case.tape.nodes for value in node.outputs if value is not case.tape.output]
    assert all(value.edge is None for value in inside[1:])
    with pytest.raises(CaptureError, match="was freed"):
        _ = inside[-1].tensor
    assert case.tape.logits.shape == (2, 7)
