"""Training the last part of a network, on features of the first: the same as training without them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from squares import Transformer
from torch import Tensor, nn

import classlens
from classlens.errors import ModelError
from classlens.models import LoadedModel, Preprocess, load
from classlens.models.cards import write_card
from classlens.training import Choices, Recipe, TrainingError, open_data, train_multilabel
from classlens.training.heads import Backbone, with_new_head
from classlens.training.loop import MULTILABEL, fit
from classlens.training.part import LastPart
from classlens.training.sources import Features, plain_view

RECIPE = Recipe(epochs=3, batch_size=8, learning_rate=1e-2)
STARTS = ("patches", "shared", "blocks.0", "blocks.1", "blocks.2", "between", "norm", "head")


def choices(voc: Path, start: str) -> Choices:
    return Choices(data=str(voc), layout="voc", backbone="squares:transformer", flip=False, train_from=start)


def backbone() -> Backbone:
    return with_new_head("squares:transformer", "default", 3)


def noise(count: int) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("start", STARTS)
def test_the_rest_of_a_network_gives_its_logits(start: str) -> None:
    whole = backbone()
    part = LastPart(whole, start)
    with torch.no_grad():
        for count in (3, 1, 3):
            found = part(part.features(noise(count)))
            torch.testing.assert_close(found, whole.model(noise(count)), rtol=0, atol=1e-6)
            assert found.abs().max() > 0.01
    assert not any("forward" in vars(module) for module in whole.model.modules())


class Reference(nn.Module):
    """The whole network on images, with everything before the second block frozen by hand."""

    def __init__(self, whole: Backbone) -> None:
        super().__init__()
        self.model = model = whole.model
        self.frozen = nn.ModuleList([model.patches, model.shared, model.blocks[0], model.scale])
        for parameter in (*self.frozen.parameters(), model.token):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def train(self, mode: bool = True) -> Reference:
        super().train(mode)
        self.frozen.eval()
        return self


def test_training_on_features_is_training(voc: Path, tmp_path: Path) -> None:
    """The same losses as without a cache; what precedes the start stays as it was, bit by bit."""
    run = train_multilabel(choices(voc, "blocks.1"), tmp_path / "run", RECIPE)
    whole, data = backbone(), open_data(voc, "voc")
    before = {key: value.clone() for key, value in whole.model.state_dict().items()}
    train, val = (
        Features(*map(torch.stack, zip(*(plain_view(i, data, whole.loaded.preprocess, False) for i in part),
                                       strict=True)), RECIPE.batch_size, RECIPE.seed)
        for part in (data.train, data.val)
    )  # fmt: skip
    (tmp_path / "other").mkdir()
    history = fit(
        MULTILABEL, Reference(whole), train, val, RECIPE, tmp_path / "other", {}, lambda _: None, lambda *_: None
    )
    for row, other in zip(run.history, history, strict=True):
        assert (row.train_loss, row.val_loss) == pytest.approx((other.train_loss, other.val_loss), rel=1e-4)
        assert row.val_map == pytest.approx(other.val_map, abs=1e-6)
    assert run.history[-1].train_loss < 0.9 * run.history[0].train_loss
    after = load_file(tmp_path / "run" / "model.safetensors")
    frozen = ("patches", "shared", "token", "scale", "blocks.0")
    for key, value in before.items():
        same = torch.equal(after[key], value)
        assert same == key.startswith(frozen) or key.endswith("num_batches_tracked"), key
    assert not torch.equal(after["between.running_mean"], before["between.running_mean"])
    assert after["patches.1.num_batches_tracked"] == 0 < after["between.num_batches_tracked"]


def test_the_run_is_a_model_and_its_features_are_kept(voc: Path, tmp_path: Path) -> None:
    short = replace(RECIPE, epochs=1)
    train_multilabel(choices(voc, "blocks.2"), tmp_path / "run", short)
    loaded = load(str(tmp_path / "run"))
    e = classlens.explain(loaded, voc / "JPEGImages" / "val03.jpg", classlens.top(2), "agf")
    assert e.maps.shape == (1, 2, 16, 16)
    assert loaded.model.head.out_features == 3
    cached = sorted((tmp_path / "run" / "features").iterdir())
    stamps = [file.stat().st_mtime_ns for file in cached]
    assert len(cached) == 2  # validation and training
    assert load_file(cached[0])["features"].shape[1:] == (17, 8)
    train_multilabel(choices(voc, "blocks.2"), tmp_path / "run", short)
    assert [file.stat().st_mtime_ns for file in cached] == stamps
    with pytest.raises(TrainingError, match=r"train_from was 'blocks\.2', not 'blocks\.1'"):
        train_multilabel(choices(voc, "blocks.1"), tmp_path / "run", short)
    train_multilabel(choices(voc, "blocks.1"), tmp_path / "other", short)
    assert {file.name for file in cached}.isdisjoint(file.name for file in (tmp_path / "other" / "features").iterdir())


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("block.1", "the network has no such module"),
        ("", "the network has no such module"),
        ("blocks", "the network does not run this module"),
        ("scale", "this module reads no tensor of features"),
        ("blocks.1.dense", "what follows this module also reads something else of the image"),
    ],
)
def test_a_start_that_is_none(start: str, reason: str) -> None:
    with pytest.raises(ModelError) as error:
        LastPart(backbone(), start)
    first, _, names = str(error.value).partition("; training can start from ")
    assert first == f"--train-from {start}: {reason}"
    assert tuple(names.split(", ")) == STARTS


def test_a_skip_past_the_start_is_refused() -> None:
    torch.manual_seed(0)
    loaded = LoadedModel("skips", Transformer(skips=True).eval(), Preprocess(resize=16, crop=16), None)
    whole = Backbone("skips", loaded, backbone().head)
    with pytest.raises(ModelError, match=re.escape("something else of the image; training can start from patches, be")):
        LastPart(whole, "blocks.1")


def test_a_failed_pass_leaves_no_trace() -> None:
    whole = backbone()
    part = LastPart(whole, "blocks.1")
    with pytest.raises(RuntimeError):
        part(torch.zeros(2, 17, 5))
    assert not any("forward" in vars(module) for module in whole.model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in whole.model.modules())


def test_freeze_and_a_start_contradict_each_other(voc: Path) -> None:
    with pytest.raises(TrainingError, match="leave out --train-from, or --freeze"):
        replace(choices(voc, "blocks.1"), freeze=True)


def test_a_card_is_a_backbone(voc: Path, tmp_path: Path) -> None:
    """Its architecture, settings and preprocessing go into the card of the run; its head is replaced."""
    first = with_new_head("squares:transformer", "default", 5)
    write_card(
        tmp_path / "card", first.model, architecture="squares:transformer", preprocess=Preprocess(resize=24, crop=16),
        head=first.head, overrides={"norm.eps": 0.5},
    )  # fmt: skip
    chosen = replace(choices(voc, "blocks.2"), backbone=str(tmp_path / "card"))
    train_multilabel(chosen, tmp_path / "run", replace(RECIPE, epochs=1))
    loaded = load(str(tmp_path / "run"))
    assert (loaded.model.norm.eps, loaded.preprocess.resize, loaded.model.head.out_features) == (0.5, 24, 3)
    assert torch.equal(loaded.model.token, first.model.token)
    assert str(tmp_path) not in (tmp_path / "run" / "card.json").read_text()
