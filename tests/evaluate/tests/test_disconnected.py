from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import classlens
from classlens.errors import ModelError
from classlens.evaluate import Settings, options_of_tests, run
from classlens.evaluate.detour import cut_at, is_cut, survey
from classlens.evaluate.tests import pointing
from classlens.evaluate.tests.disconnected import DEPTHS, KINDS, Disconnected, even, stitched, unstitched


class Skipping(nn.Module):
    """A strided stem, a residual block with a gate, a pooled head; unmodified networks do all of this."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 8, stride=8)
        self.branch, self.gate = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 6)
        self.deep = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8, 5)

    def body(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.branch(x) * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]
        return torch.relu(self.deep(x))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).mean((2, 3)))
        return logits


@pytest.fixture
def model() -> Skipping:
    torch.manual_seed(0)
    return Skipping().eval()


def test_cells_are_put_side_by_side_and_back() -> None:
    cells = torch.arange(2 * 4 * 3 * 2 * 5.0).view(8, 3, 2, 5)
    grids = stitched(cells)
    assert torch.equal(grids[1, :, :2, 5:], cells[5])
    assert torch.equal(grids[0, :, 2:, :5], cells[2])
    assert torch.equal(unstitched(grids), cells)
    assert torch.equal(even(torch.nn.functional.pad(grids, (0, 1, 0, 1))), grids)


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_cell_goes_through_the_network_alone(model: Skipping, depth: str) -> None:
    grids = torch.rand(2, 3, 64, 64)
    net = Disconnected(model, "full", depth, (32, 32)).eval()
    with torch.no_grad():
        assert torch.allclose(net(net.features(grids)), model(grids[:, :, :32, :32]), atol=1e-6)


@pytest.mark.parametrize("depth", DEPTHS)
def test_only_the_head_is_split(model: Skipping, depth: str) -> None:
    grids = torch.rand(2, 3, 64, 64)
    net = Disconnected(model, "part", depth, (32, 32)).eval()
    with torch.no_grad():
        features = model.body(grids)
        slow = model.head(features[:, :, : features.shape[2] // 2, : features.shape[3] // 2].mean((2, 3)))
        assert torch.allclose(net(net.features(grids)), slow, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_other_cells_have_no_influence_where_they_cannot(model: Skipping, kind: str) -> None:
    grids = torch.rand(1, 3, 64, 64, requires_grad=True)
    Disconnected(model, kind, "input", (32, 32)).eval()(grids).sum().backward()
    assert grids.grad is not None
    outside = grids.grad.abs().sum() - grids.grad[:, :, :32, :32].abs().sum()
    assert bool(outside < 1e-6 * grids.grad.abs().sum()) == (kind == "full")


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_map_is_read_on_the_whole_grid(model: Skipping, kind: str) -> None:
    """LayerCAM weighs each position by its own gradient: none of it lies where the gradient is 0."""
    net = Disconnected(model, kind, "final", (32, 32)).eval()
    evidence = classlens.explain(net, net.features(torch.rand(1, 3, 64, 64)), method="layercam").maps[0, 0]
    assert evidence.any()
    assert float(pointing.share_in(evidence, "2x2", 0)) == pytest.approx(1)


def test_a_cut_is_where_nothing_passes_by(model: Skipping) -> None:
    probe = torch.rand(1, 3, 32, 32)
    found = survey(model, probe)
    assert found.sizes[found.final] == (2, 2)
    middle = cut_at(model, probe, found, 8)
    assert found.sizes[middle] == (4, 4)
    passed_by = [call for call, size in found.sizes.items() if size == (4, 4) and not is_cut(model, probe, call)]
    assert passed_by  # the branch: its skip connection passes it by
    assert middle > max(passed_by)
    assert cut_at(model, probe, found, 16) == found.final
    with pytest.raises(ModelError, match="no feature map at most 1 times smaller"):
        cut_at(model, probe, found, 1)
    with pytest.raises(ModelError, match="no feature map that a head pools"):
        survey(nn.Sequential(nn.Conv2d(3, 4, 32), nn.Flatten(), nn.Linear(4, 2)), probe)


class Fully(nn.Module):
    """A convolution makes a map for each class, and these are pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 8, stride=8), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
        self.maps = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.maps(self.body(x)).relu().mean((2, 3))
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_classes_belong_to_the_head(kind: str) -> None:
    torch.manual_seed(0)
    model, grids = Fully().eval(), torch.rand(2, 3, 64, 64)
    net = Disconnected(model, kind, "final", (32, 32)).eval()
    features = net.features(grids)
    assert features.shape[1:] == (8, 8, 8)
    with torch.no_grad():
        slow = model.body(grids[:, :, :32, :32]) if kind == "full" else model.body(grids)[:, :, :4, :4]
        assert torch.allclose(net(features), model.maps(slow).relu().mean((2, 3)), atol=1e-6)
    evidence = classlens.explain(net, features[:1], method="lrp").maps[0, 0]
    assert evidence.any()
    assert float(pointing.share_in(evidence, "2x2", 0)) == pytest.approx(1)
    whole = Disconnected(model, kind, "input", (32, 32)).eval()  # the last feature map is that of the whole grid
    classlens.explain(whole, grids[:1], method="gradcam")


def test_a_run(tmp_path: Path) -> None:
    for i, colour in enumerate([(200, 60, 60), (60, 200, 60), (60, 60, 200), (100, 100, 100)] * 2):
        Image.new("RGB", (48, 48), colour).save(tmp_path / f"{i}.png")  # grey is "nothing", the fourth class
    options = options_of_tests(kinds=("full",), depths=("input", "final"), confidence=0.0)
    settings = Settings(
        tests=("disconnected",),
        data=(str(tmp_path),),
        methods=("gradient-x-input", "random", "fullgrad"),
        model="world:make",
        options=options,
    )
    tables = run(settings, tmp_path / "run").tables
    assert [table.title for table in tables] == ["DiFull, input", "DiFull, final"]
    for table in tables:
        assert table.rows["gradient-x-input"][0].n == 2
        assert table.rows["random"][0].value < 60
        assert table.rows["fullgrad"][0].n == 0, "it would spread the biases of a batch of cells over the grid"
        shares = table.rows["gradient-x-input"][0].value  # 0 where the first cell is grey: nothing is positive there
        assert shares in (pytest.approx(100), pytest.approx(50))
