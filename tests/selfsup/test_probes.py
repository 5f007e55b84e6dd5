"""Linear probes: on a network of which it is known what each stage keeps and what it destroys."""

import csv
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torch import nn
from typer.testing import CliRunner

import classlens
from classlens.cli.selfsup_train import probe
from classlens.errors import ClasslensError
from classlens.evaluate import open_dataset
from classlens.models import LoadedModel, Preprocess
from classlens.models._torchvision import import_torchvision
from classlens.selfsup.layers import METRICS, maps_figure, segmentation_by_stage
from classlens.selfsup.probes import fit_linear, load_probe, probe_stages
from classlens.selfsup.stages import Probe, Stage, find_stages, pooled, stage_outputs

SIDE = 24
HUES = {"red": (220, 60, 60), "green": (60, 220, 60)}  # their three channels have the same sum


def network() -> nn.Sequential:
    """conv1 keeps the colours, conv2 adds the three channels up, and with that the hue is gone for conv3 too."""
    conv1, conv2, conv3 = nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 1, 1, bias=False), nn.Conv2d(1, 4, 3, padding=1)
    with torch.no_grad():
        conv1.weight.copy_(torch.eye(3)[:, :, None, None])
        conv2.weight.fill_(1.0)
    return nn.Sequential(
        conv1, nn.ReLU(), nn.MaxPool2d(2), conv2, nn.ReLU(), conv3, nn.ReLU(), nn.Flatten(), nn.Linear(576, 3)
    ).eval()


def loaded() -> LoadedModel:
    torch.manual_seed(0)
    return LoadedModel("known", network(), Preprocess(None, SIDE, mean=(0.0,) * 3, std=(1.0,) * 3), None)


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """A coloured square anywhere on grey; its colour is its class. Beside it the same with masks."""
    root, masked = tmp_path_factory.mktemp("folders"), tmp_path_factory.mktemp("masked")
    random = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (masked / folder).mkdir()
    for split, count in (("train", 30), ("val", 10)):
        for name, colour in HUES.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.full((SIDE, SIDE, 3), 113, np.uint8)
                y, x = random.integers(0, SIDE - 8, 2)
                pixels[y : y + 8, x : x + 8] = colour
                Image.fromarray(pixels).save(root / split / name / f"{i:02d}.png")
                if split == "val":
                    mask = np.zeros((SIDE, SIDE), np.uint8)
                    mask[y : y + 8, x : x + 8] = 1
                    Image.fromarray(pixels).save(masked / "images" / f"{name}{i}.png")
                    Image.fromarray(mask).save(masked / "masks" / f"{name}{i}.png")
    return root, masked


@pytest.fixture(scope="module")
def probed(squares, tmp_path_factory):
    return probe_stages(loaded(), squares[0], "folders", tmp_path_factory.mktemp("probes"), pool=1)


# -------------------------------------------------------------------------------------------------------- stages


def test_a_small_network_has_a_stage_for_each_convolution():
    stages = find_stages(network(), torch.zeros(1, 3, SIDE, SIDE))
    assert stages == (Stage("1", (3, 24, 24)), Stage("4", (1, 12, 12)), Stage("6", (4, 12, 12)))


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
def test_stages_of_known_networks():
    models = import_torchvision().models
    images = torch.zeros(1, 3, 64, 64)
    alexnet = nn.Sequential(models.alexnet(weights=None).features)
    assert [s.name for s in find_stages(alexnet, images)] == ["0.1", "0.4", "0.7", "0.9", "0.11"]
    deep = [(s.name, s.shape) for s in find_stages(models.resnet18(weights=None).eval(), images)]
    assert deep == [
        ("relu", (64, 32, 32)), ("layer1", (64, 16, 16)), ("layer2", (128, 8, 8)), ("layer3", (256, 4, 4)),
        ("layer4", (512, 2, 2)),
    ]  # fmt: skip


def test_named_stages_and_wrong_names():
    images = torch.zeros(1, 3, SIDE, SIDE)
    assert find_stages(network(), images, ["2"]) == (Stage("2", (3, 12, 12)),)
    with pytest.raises(ClasslensError, match="no module '7' returns a feature map; choose from 0, 1"):
        find_stages(network(), images, ["7"])
    with pytest.raises(ClasslensError, match="no convolution"):
        find_stages(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 2)), images)


def test_a_probe_is_the_network_up_to_its_stage():
    net = network()
    stage = find_stages(net, torch.zeros(1, 3, SIDE, SIDE))[1]
    cut = Probe(net, stage, pool=2, classes=5).train()
    images = torch.rand(2, 3, SIDE, SIDE)
    assert torch.equal(cut(images), cut.linear(pooled(net[:5](images), 2)))
    assert torch.equal(stage_outputs(net, images, [stage])["4"], net[:5](images))
    assert not cut.body.training  # frozen, whatever is asked
    assert cut.body[0].weight is net[0].weight  # shared, not copied
    assert not any(module._forward_hooks for module in net.modules())  # nothing is attached to the network itself
    assert net(images).shape == (2, 3)


# ----------------------------------------------------------------------------------------------- the linear layer


def test_the_fit_is_the_optimum_that_another_library_finds(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = 5 * torch.randn(200, 6, generator=generator) + 3
    y = (x[:, :3] + torch.randn(200, 3, generator=generator)).argmax(1)
    monkeypatch.setattr("classlens.selfsup.probes._L2", (0.01,))
    linear, l2 = fit_linear(x, nn.functional.one_hot(y).float(), multilabel=False)
    standard = ((x - x.mean(0)) / x.std(0, correction=0)).numpy()
    reference = LogisticRegression(C=1 / (200 * l2), tol=1e-8, max_iter=1000).fit(standard, y.numpy())
    ours = linear(x).softmax(1).detach().numpy()
    assert np.allclose(ours, reference.predict_proba(standard), atol=2e-3)


def test_the_fit_of_several_labels_is_one_optimum_a_class(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(150, 4, generator=generator)
    targets = (x[:, :2] + torch.randn(150, 2, generator=generator) > 0.5).float()
    monkeypatch.setattr("classlens.selfsup.probes._L2", (0.02,))
    linear, _ = fit_linear(x, targets, multilabel=True)
    standard = ((x - x.mean(0)) / x.std(0, correction=0)).numpy()
    for k in range(2):
        one = LogisticRegression(C=1 / (150 * 0.02), tol=1e-8).fit(standard, targets[:, k].numpy())
        assert np.allclose(linear(x)[:, k].sigmoid().detach(), one.predict_proba(standard)[:, 1], atol=2e-3)


def test_a_feature_that_never_changes_is_left_out():
    x = torch.cat([torch.randn(50, 1, generator=torch.Generator().manual_seed(0)), torch.ones(50, 1)], 1)
    linear, _ = fit_linear(x, nn.functional.one_hot((x[:, 0] > 0).long()).float(), multilabel=False)
    assert torch.equal(linear.weight[:, 1], torch.zeros(2))
    assert torch.isfinite(linear.weight).all()


# -------------------------------------------------------------------------------------------------------- probes


def test_probes_find_what_a_stage_keeps_and_not_what_it_destroyed(probed):
    scores = {found.stage.name: found.score for found in probed.stages}
    assert probed.score_name == "accuracy"
    assert probed.chance == 0.5
    assert scores["1"] == 1.0
    assert scores["4"] <= 0.7  # grey: nothing but chance
    assert scores["6"] <= 0.7
    rows = list(csv.DictReader((probed.folder / "probes.csv").read_text().splitlines()))
    assert [float(row["accuracy"]) for row in rows] == [pytest.approx(scores[row["stage"]]) for row in rows]


def test_a_probe_is_explained_as_any_network(probed, squares):
    module = probed.probe(probed.stages[0].stage)
    found = classlens.explain(module, squares[0] / "val" / "green" / "00.png", targets="green")
    assert found.probability(0, 0) > 0.9
    assert found.labels == ("green", "red")
    again = classlens.explain(load_probe(probed.folder, "1", loaded()), squares[0] / "val" / "green" / "00.png")
    assert torch.equal(again.logits, found.logits)


def test_maps_through_the_stage_that_knows_lie_on_the_object(probed, squares):
    scored = segmentation_by_stage(probed, open_dataset(squares[1]), ("gradient-x-input",), limit=8)
    soft = {row.stage: row.scores[[metric.name for metric in METRICS].index("AP (soft)")] for row in scored}
    assert soft["1"].value > 90
    assert soft["1"].n == 8
    assert soft["1"].value > soft["4"].value
    with pytest.raises(ClasslensError, match="no masks"):
        segmentation_by_stage(probed, open_dataset(squares[0] / "val"))


def test_the_figure_names_classes_and_stages(probed):
    titles = [axes.get_title(loc="left") for axes in maps_figure(probed, "gradient", count=2).axes]
    assert titles[:4] == ["green", "1", "4", "6"]
    assert titles[4] == "red"


def test_features_are_computed_once(probed, squares, monkeypatch):
    monkeypatch.setattr("classlens.selfsup.probes._compute", lambda *_: pytest.fail("computed again"))
    again = probe_stages(loaded(), squares[0], "folders", probed.folder, pool=1)
    assert again.stages == probed.stages


def test_one_label_is_nothing_to_tell_apart(squares, tmp_path):
    (tmp_path / "one" / "red").mkdir(parents=True)
    for file in (squares[0] / "train" / "red").iterdir():
        (tmp_path / "one" / "red" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ClasslensError, match="at least two"):
        probe_stages(loaded(), tmp_path / "one", "folders", tmp_path / "probes")


def test_a_probe_of_another_network_is_refused(probed):
    other = loaded()
    with torch.no_grad():
        other.model[0].weight.mul_(2)
    with pytest.raises(ClasslensError, match="is not the network that was probed"):
        load_probe(probed.folder, "1", other)
    with pytest.raises(ClasslensError, match="choose one of 1, 4, 6"):
        load_probe(probed.folder, "conv9", loaded())
    with pytest.raises(ClasslensError, match="selfsup probe"):
        load_probe(probed.folder / "features", "1")


def test_the_command(squares, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nfrom classlens.models import LoadedModel, Preprocess\n"
        "def net():\n    torch.manual_seed(0)\n"
        "    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())\n"
        f"    return LoadedModel('mine', body, Preprocess(None, {SIDE}), None)\n"
    )
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(probe)
    arguments = ["--model", "mine:net", "--data", str(squares[0]), "--layout", "folders", "--masks", str(squares[1])]
    done = CliRunner().invoke(app, [*arguments, "--limit", "2", "--examples", "2", "--out", "out", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "chance: accuracy 50.0 %" in done.output
    written = {path.name for path in (tmp_path / "out").iterdir()}
    expected = {"probes.json", "probes.csv", "segmentation.csv", "layers.png", "maps.png", "features"}
    assert written == {*expected, "1.safetensors", "3.safetensors"}
    about = json.loads((tmp_path / "out" / "probes.json").read_text())
    assert about["labels"] == ["green", "red"]
    rows = list(csv.DictReader((tmp_path / "out" / "segmentation.csv").read_text().splitlines()))
    assert [row["stage"] for row in rows] == ["1", "3"]
