"""open_clip: from a folder with its own tokenizer, without a download, and as its users build it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from skimage import data

import classlens
from classlens.errors import ModelError, TargetError
from classlens.models import Preprocess
from texts import open_clip_folder

PHOTO = Image.fromarray(data.coffee())
TEXTS = ["a photo of a cat", "a cup of coffee"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any) -> None:
        raise AssertionError("it opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_folder_gives_the_library_s_own_cosines(tmp_path: Path) -> None:
    name = open_clip_folder(tmp_path)
    loaded = classlens.load(name)
    e = classlens.explain(loaded, PHOTO, [classlens.text(text) for text in TEXTS])
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    model.eval()
    with torch.no_grad():
        images = model.encode_image(transform(PHOTO)[None], normalize=True)
        words = model.encode_text(open_clip.get_tokenizer(f"local-dir:{tmp_path}")(TEXTS), normalize=True)
    cosines = torch.stack([e.target(0, k).value(e.logits[0]) for k in range(2)])
    torch.testing.assert_close(cosines, (words @ images.T)[:, 0], atol=1e-4, rtol=0)
    assert type(loaded.preprocess) is Preprocess
    assert e.maps.abs().amax((2, 3)).min() > 0


@pytest.mark.parametrize("method", ["agf", "lrp", "gradcam", "integrated-gradients(steps=4)", "attention-rollout"])
def test_a_model_as_its_library_builds_it(method: str, tmp_path: Path) -> None:
    open_clip_folder(tmp_path)
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    e = classlens.explain(model.eval(), PHOTO, classlens.text("a cat"), method, preprocess=transform)
    assert e.maps.shape == (1, 1, 32, 32)
    assert torch.isfinite(e.maps).all()
    assert e.maps.any()


def test_names_weights_and_long_texts(tmp_path: Path) -> None:
    loaded = classlens.load(open_clip_folder(tmp_path))
    with pytest.raises(TargetError, match="reads at most 20; shorten it"):
        classlens.explain(loaded, PHOTO, classlens.text("cat " * 30))
    random = classlens.load(f"open_clip:{tmp_path}", weights=None).model(torch.rand(1, 3, 32, 32))
    assert random.shape == (1, 16)
    own = classlens.load(f"open_clip:{tmp_path}", weights=tmp_path / "open_clip_model.safetensors")
    x = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(own.model(x), loaded.model(x))
    for name, words in (("ViT-B-33", "nearest: ViT-B-32"), ("ViT-B-32/laion", "has no weights 'laion' of ViT-B-32")):
        with pytest.raises(ModelError, match=words):
            classlens.load(f"open_clip:{name}")
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot be loaded \(.*\): check the folder"):
        classlens.load(f"open_clip:{tmp_path}")
    with pytest.raises(ModelError, match="has no open_clip_config"):
        classlens.load(f"open_clip:{tmp_path.parent}")
