"""Models of images and texts: both towers are found, and a text is asked without a wrapper or a download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from skimage import data
from torch import nn

import classlens
from classlens.errors import ModelError, TargetError
from classlens.models._torchvision import import_transformers
from classlens.models.towers import ImageTower, has_towers
from texts import LONGEST, hf_folder, hf_model, tokenizer

PHOTO = Image.fromarray(data.coffee())
KINDS = ("CLIP", "Siglip")


def by_the_library(name: str, texts: list[str]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The model as its own library opens it, and the unit vectors of the picture and of texts."""
    library = import_transformers()
    folder = name.removeprefix("hf:")
    model = library.AutoModel.from_pretrained(folder).eval()
    pixels = library.AutoImageProcessor.from_pretrained(folder)(images=PHOTO, return_tensors="pt")
    tokens = library.AutoTokenizer.from_pretrained(folder)(
        texts, padding="max_length", max_length=LONGEST, return_tensors="pt"
    )
    with torch.no_grad():
        out = model(**pixels, **{k: v for k, v in tokens.items() if k in ("input_ids", "attention_mask")})
    return model, out.image_embeds, out.text_embeds


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_library_s_own_cosines(kind: str, tmp_path: Path) -> None:
    name = hf_folder(tmp_path, kind)
    loaded = classlens.load(name)
    assert loaded.labels is None
    texts = ["a photo of a cat", "a red square"]
    e = classlens.explain(loaded, PHOTO, [classlens.text(t) for t in texts], "gradient-x-input")
    _, image, words = by_the_library(name, texts)
    cosines = torch.stack([e.target(0, k).value(e.logits[0]) for k in range(2)])
    torch.testing.assert_close(cosines, (words @ image.T)[:, 0], atol=2e-2, rtol=0)  # pictures are resized by PIL
    assert abs(float(cosines[0] - cosines[1])) > 1e-3
    x = loaded.preprocess(PHOTO)[None]
    torch.testing.assert_close(
        loaded.embed_text(texts).div(loaded.embed_text(texts).norm(dim=1, keepdim=True)), words, atol=1e-5, rtol=1e-4
    )
    assert loaded.model(x).shape == (1, image.shape[1])
    assert e.name(0, 1) == "the text 'a red square'"
    assert not torch.allclose(e.maps[0, 0], e.maps[0, 1])


@pytest.mark.parametrize("method", ["agf", "lrp", "gradcam", "integrated-gradients(steps=4)", "rise(n_masks=8)"])
def test_a_text_by_methods(method: str, tmp_path: Path) -> None:
    loaded = classlens.load(hf_folder(tmp_path, "CLIP"))
    asked = classlens.text("a cat") - classlens.text("a dog")
    e = classlens.explain(loaded, PHOTO, [asked, classlens.like(PHOTO)], method)
    assert e.name() == "the text 'a cat' minus the text 'a dog'"
    assert torch.isfinite(e.maps).all()
    assert e.maps[0, 0].any()


def test_a_model_that_the_user_built_needs_no_wrapper() -> None:
    library, model = import_transformers(), hf_model("CLIP")
    processor = library.CLIPProcessor(
        library.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}), tokenizer()
    )
    e = classlens.explain(model, PHOTO, classlens.text("a cat"), "lrp", preprocess=processor)
    assert e.maps.shape == (1, 1, 32, 32)
    x = torch.rand(1, 3, 32, 32)
    other = classlens.explain(model, x, classlens.like(torch.rand(1, 3, 32, 32)), "lrp")
    assert float(other.target().value(other.logits[0])) <= 1
    with pytest.raises(ModelError, match="comes without a tokenizer"):
        classlens.explain(model, x, classlens.text("a cat"), "lrp")


def test_towers_are_moved_and_left_together() -> None:
    model = hf_model("CLIP")
    assert has_towers(model)
    assert not has_towers(nn.Linear(2, 2))
    loaded = classlens.LoadedModel("mine", model, classlens.models.Preprocess(), None)
    assert isinstance(loaded.model, ImageTower)
    loaded.model.double()
    assert next(model.text_model.parameters()).dtype == torch.float64
    with pytest.raises(ModelError, match="Linear is no model of images and texts"):
        ImageTower(nn.Linear(2, 2))


@pytest.mark.parametrize("targets", [None, 3, "cat", classlens.top(2)])
def test_an_embedding_has_no_classes(targets: Any) -> None:
    with pytest.raises(TargetError, match=r"has no classes; ask with --text") as caught:
        classlens.explain(hf_model("CLIP"), torch.rand(1, 3, 32, 32), targets)
    assert "\n" not in str(caught.value)
    e = classlens.explain(hf_model("CLIP"), torch.rand(1, 3, 32, 32), lambda y: y[3], "lrp")  # but it has numbers
    assert e.maps.any()


def test_a_missing_library_is_one_line() -> None:
    if find_spec("open_clip"):
        with pytest.raises(ModelError, match="open_clip has no model 'ViT-B-33'; nearest: "):
            classlens.load("open_clip:ViT-B-33")
    else:
        with pytest.raises(ModelError, match=r"open_clip is not installed: pip install 'classlens\[open_clip\]'"):
            classlens.load("open_clip:ViT-B-32")
