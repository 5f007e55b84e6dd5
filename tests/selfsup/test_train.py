"""Training without labels: learns, stops, goes on after being killed, and leaves a model that every command takes."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import classlens
from classlens.cli.selfsup_train import Network, Recipe, train
from classlens.errors import ClasslensError
from classlens.selfsup.collection import find_pictures, read_pictures
from classlens.selfsup.networks import NETWORKS
from classlens.selfsup.recipes import RECIPES, Choices
from classlens.selfsup.train import train_selfsup
from selfsup import tiny  # noqa: F401  makes a network known that trains in a second

TESTS = Path(__file__).resolve().parents[1]


def nothing(what, done, total):
    pass


def oriented(seed: int, hue: int) -> Image.Image:
    """Bright above and dark below, with noise: a picture that knows which way is up. Its hue is its class."""
    random = np.random.default_rng(seed)
    level = np.where(np.arange(32) < random.integers(10, 22), 200, 60)[:, None, None].repeat(32, 1).repeat(3, 2)
    level[..., hue] += 50
    return Image.fromarray(np.clip(level + random.normal(0, 25, (32, 32, 3)), 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for split, count, start in (("train", 24, 0), ("val", 8, 1000)):
        for hue, name in enumerate(("red", "green")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                oriented(start + 100 * hue + i, hue).save(folder / f"{i:02d}.png")
    return root


def choices(pictures, recipe="rotnet", **more) -> Choices:
    usual = {"network": "tiny", "batch_size": 12, "epochs": (2,)}
    return Choices(recipe, (str(pictures),), **(usual | more))


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_rotnet_learns_which_way_is_up(pictures, tmp_path):
    trained = train_selfsup(choices(pictures, epochs=(12,), batch_size=8, learning_rate=1e-2), tmp_path / "run")
    assert trained.history[-1].scores["rotation_accuracy"] > 0.8  # chance: 0.25
    assert trained.history[-1].loss < trained.history[0].loss
    loaded = classlens.load(tmp_path / "run")
    image = loaded.preprocess(oriented(5000, 1))[None]
    assert loaded.labels == ("upright", "turned left", "upside down", "turned right")
    logits = loaded.model(torch.cat([torch.rot90(image, turn, (2, 3)) for turn in range(4)]))
    assert (logits.argmax(1) == torch.arange(4)).sum() >= 3
    found = classlens.explain(loaded, image)
    assert found.maps.shape == (1, 1, 16, 16)
    assert torch.isfinite(found.maps).all()
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == [row.loss for row in trained.history]
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["training"]["epochs"] == {"done": 12, "of": 12}
    assert (tmp_path / "run" / "metrics.png").stat().st_size > 5000


@pytest.mark.parametrize("recipe", ["rotnet", "sela"])
def test_a_stopped_training_goes_on_as_if_it_had_not_been(pictures, tmp_path, recipe):
    asked = choices(pictures, recipe, clusters=None if recipe == "rotnet" else 4)
    train_selfsup(asked, tmp_path / "whole")

    def stop(what, done, total):
        if "epoch 2" in what and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_selfsup(asked, tmp_path / "stopped", stop)
    train_selfsup(asked, tmp_path / "stopped")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))
    assert (tmp_path / "whole" / "metrics.csv").read_text() == (tmp_path / "stopped" / "metrics.csv").read_text()
    other = choices(pictures, recipe, clusters=asked.clusters, seed=1)
    train_selfsup(other, tmp_path / "other")
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "other"))


_KILLED = """
import os, signal, sys
from selfsup import tiny
from classlens.selfsup.recipes import Choices
from classlens.selfsup.train import train_selfsup
def kill(what, done, total):
    if "clusters, epoch 2" in what and done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
train_selfsup(
    Choices("scan", (sys.argv[1],), network="tiny", batch_size=12, epochs=(1, 2), clusters=2), sys.argv[2], kill
)
"""


def test_a_killed_training_ends_with_the_same_weights(pictures, tmp_path):
    """Killed in the second epoch of SCAN's second step, which needs the neighbours that the first one found."""
    command = [sys.executable, "-c", _KILLED, str(pictures), str(tmp_path / "killed")]
    # One thread, as here: sums of two threads round otherwise.
    alone = {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, env=os.environ | alone, timeout=900)
    assert done.returncode == -signal.SIGKILL
    asked = choices(pictures, "scan", epochs=(1, 2), clusters=2)
    resumed = train_selfsup(asked, tmp_path / "killed")
    whole = train_selfsup(asked, tmp_path / "whole")
    assert [row.phase for row in whole.history] == ["contrast", "clusters", "clusters"]
    assert resumed.history == whole.history
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    assert not list((tmp_path / "killed").glob(".*"))
    before = (tmp_path / "whole" / "state.pt").stat().st_mtime_ns
    assert train_selfsup(asked, tmp_path / "whole").history == whole.history  # done: nothing is done again
    assert (tmp_path / "whole" / "state.pt").stat().st_mtime_ns == before


def test_weights_that_are_newer_than_the_state_do_no_harm(pictures, tmp_path, monkeypatch):
    """Stopped after the weights of an epoch were written and before its state was."""
    asked = choices(pictures)
    train_selfsup(asked, tmp_path / "whole")
    replace, states = Path.replace, []

    def stop(self, target):
        states.extend([target] if Path(target).name == "state.pt" else [])
        if len(states) == 2:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            train_selfsup(asked, tmp_path / "stopped")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))  # already those of the last epoch
    assert len(train_selfsup(asked, tmp_path / "stopped").history) == 2
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))
    assert not list((tmp_path / "stopped").glob(".*"))


def test_clusters_are_scored_with_labels_that_were_not_trained_on(pictures, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in pictures.rglob("*.png"):
        (bare / "-".join(file.relative_to(pictures).parts)).write_bytes(file.read_bytes())
    for data, scored in ((pictures, True), (bare, False)):
        out = tmp_path / f"run-{scored}"
        scores = train_selfsup(choices(data, "sela", clusters=4, epochs=(1,)), out).history[-1].scores
        assert ("purity" in scores) is scored
        assert 1 <= scores["clusters_used"] <= 4


# ----------------------------------------------------------------------------------------------------------- data


def test_pictures_are_read_once_and_broken_ones_left_out(pictures, tmp_path):
    data = tmp_path / "data"
    for split in ("train", "val"):
        for folder in ("red", "green"):
            (data / split / folder).mkdir(parents=True)
            for file in sorted((pictures / split / folder).iterdir())[:3]:
                (data / split / folder / file.name).write_bytes(file.read_bytes())
    (data / "train" / "red" / "00.png").write_bytes(b"no picture")
    found = find_pictures([data], limit=5)
    assert len(found.train) == 5
    found = find_pictures([data])
    store = read_pictures(found, 32, tmp_path / "run", nothing)
    assert (len(store.train), len(store.val)) == (5, 6)
    assert store.skipped[0].startswith("red/00.png")
    names = [picture.name for picture in found.train if picture.name != "red/00.png"]
    for position, name in enumerate(names):
        original = np.asarray(Image.open(data / "train" / name)).transpose(2, 0, 1)
        assert np.array_equal(store.train.pixels[position], original)
        assert store.train.labels[position] == ["green", "red"].index(name.split("/")[0])

    def never(what, done, total):
        raise AssertionError("read again")

    assert np.array_equal(read_pictures(found, 32, tmp_path / "run", never).val.pixels, store.val.pixels)


def test_without_a_split_every_fifth_picture_is_held_out(pictures):
    found = find_pictures([pictures / "train"])
    assert (len(found.train), len(found.val)) == (38, 10)
    assert not {p.name for p in found.train} & {p.name for p in found.val}


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"recipe": "moco"}, "choose one of rotnet, sela, scan"),
        ({"recipe": "scan"}, "contrast and clusters"),
        ({"clusters": 5}, "sela and scan"),
        ({"network": "vgg"}, "alexnet-96"),
        ({"batch_size": 64}, "too few"),
        ({"learning_rate": -1.0}, "above 0"),
    ],
)
def test_choices_that_do_not_work_are_told(pictures, tmp_path, more, message):
    recipe = more.pop("recipe", "rotnet")
    with pytest.raises(ClasslensError, match=message):
        train_selfsup(choices(pictures, recipe, **more), tmp_path / "run")
    assert not (tmp_path / "run" / "card.json").exists()


def test_a_folder_of_another_training_or_model_is_refused(pictures, tmp_path):
    train_selfsup(choices(pictures, epochs=(1,)), tmp_path / "run")
    with pytest.raises(ClasslensError, match=r"seed was 0, not 1"):
        train_selfsup(choices(pictures, epochs=(1,), seed=1), tmp_path / "run")
    (tmp_path / "run" / "state.pt").write_bytes(b"torn")
    with pytest.raises(ClasslensError, match="not a training state"):
        train_selfsup(choices(pictures, epochs=(1,)), tmp_path / "run")
    (tmp_path / "run" / "state.pt").unlink()
    with pytest.raises(ClasslensError, match="from elsewhere"):
        train_selfsup(choices(pictures, epochs=(1,)), tmp_path / "run")


# ------------------------------------------------------------------------------------------------ names, command


@pytest.mark.parametrize("name", ["alexnet-96", "resnet-32"])
def test_networks_are_two_parts_and_small(name):
    network = NETWORKS[name]
    net = network.build(7).eval()
    images = torch.rand(2, 3, network.side, network.side)
    latents = net.features(images)
    assert latents.shape == (2, net.head.in_features)
    assert torch.equal(net(images), net.head(latents))
    assert net(images).shape == (2, 7)
    assert sum(p.numel() for p in net.parameters()) * 4 < 5e6


def test_the_command(pictures, tmp_path):
    import typer

    app = typer.Typer()
    app.command()(train)
    arguments = ["sela", "--data", str(pictures), "--clusters", "3", "--epochs", "1", "--batch-size", "40"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run"), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "1 epochs" in done.output
    assert "purity" in done.output
    wrong = CliRunner().invoke(app, [*arguments, "--epochs", "many", "--out", str(tmp_path / "other")])
    assert wrong.exit_code == 2


def test_the_command_offers_what_there_is():
    assert [choice.value for choice in Recipe] == list(RECIPES)
    assert [choice.value for choice in Network] == [name for name in NETWORKS if name != "tiny"]
