"""Image classifiers of Hugging Face transformers, from folders that the library wrote itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from skimage import data

import classlens
from classlens.errors import ModelError
from classlens.models import Preprocess
from classlens.models._torchvision import import_transformers
from classlens.models.own import OwnPreprocess

NAMES = ("cat", "dog", "bird")
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 64}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}


def written(folder: Path, kind: str, model: str, config: dict[str, Any], processor: Any) -> str:
    """A folder as `save_pretrained` writes it."""
    library = import_transformers()
    torch.manual_seed(0)
    settings = getattr(library, f"{kind}Config")(**{"id2label": dict(enumerate(NAMES))} | config)
    getattr(library, f"{kind}{model}")(settings).save_pretrained(folder)
    processor.save_pretrained(folder)
    return f"hf:{folder}"


def vit(folder: Path, model: str = "ForImageClassification", **config: Any) -> str:
    processor = import_transformers().ViTImageProcessor(size={"height": 64, "width": 64})
    return written(folder, "ViT", model, TINY | {"patch_size": 16} | config, processor)


def seen(name: str) -> torch.Tensor:
    """What the model's own processor makes of a photograph."""
    processor = import_transformers().AutoImageProcessor.from_pretrained(name.removeprefix("hf:"))
    made: torch.Tensor = processor(images=Image.fromarray(data.coffee()), return_tensors="pt")["pixel_values"]
    return made


def test_a_folder_loads_with_its_processor_and_labels(tmp_path: Path, no_network: None) -> None:
    name = vit(tmp_path)
    loaded = classlens.load(name)
    assert (loaded.labels, loaded.multilabel, loaded.name) == (NAMES, False, name)
    assert type(loaded.preprocess) is Preprocess
    torch.testing.assert_close(loaded.preprocess(Image.fromarray(data.coffee()))[None], seen(name), atol=0.05, rtol=0)
    e = classlens.explain(loaded, Image.fromarray(data.coffee()), ["dog", "cat"])
    assert (e.name(0, 0), tuple(e.maps.shape)) == ("dog", (1, 2, 64, 64))
    again = import_transformers().ViTForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(e.logits, again(loaded.preprocess(Image.fromarray(data.coffee()))[None]).logits)


@pytest.mark.parametrize("edge", [224, 384])
def test_the_crop_of_a_processor_with_crop_pct(edge: int, tmp_path: Path) -> None:
    processor = import_transformers().ConvNextImageProcessor(size={"shortest_edge": edge})
    name = written(tmp_path, "ConvNext", "ForImageClassification", STAGES, processor)
    found = classlens.load(name).preprocess
    assert found.resize == (256 if edge == 224 else (384, 384))
    torch.testing.assert_close(found(Image.fromarray(data.coffee()))[None], seen(name), atol=0.1, rtol=0)


def test_a_processor_with_settings_that_we_do_not_know_is_used_itself(tmp_path: Path) -> None:
    processor = import_transformers().ViTImageProcessor(size={"height": 64, "width": 64}, rescale_factor=1 / 100)
    name = written(tmp_path, "ViT", "ForImageClassification", TINY | {"patch_size": 16}, processor)
    found = classlens.load(name).preprocess
    assert isinstance(found, OwnPreprocess)
    torch.testing.assert_close(found(Image.fromarray(data.coffee()))[None], seen(name))


def test_a_multi_label_model_says_so_and_placeholders_are_no_labels(tmp_path: Path) -> None:
    config = {"problem_type": "multi_label_classification", "id2label": {0: "LABEL_0", 1: "LABEL_1"}}
    loaded = classlens.load(vit(tmp_path, **config))
    assert (loaded.multilabel, loaded.labels) == (True, None)


def test_random_weights_and_own_weights(tmp_path: Path) -> None:
    name, file = vit(tmp_path / "folder"), tmp_path / "mine.pt"
    torch.save(classlens.load(name).model.state_dict(), file)
    x = torch.rand(1, 3, 64, 64)
    published, own, other = (classlens.load(name, weights).model(x).logits for weights in ("default", file, None))
    torch.testing.assert_close(own, published)
    assert not torch.allclose(other, published)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: vit(folder, "Model"), "has no weights for classifier.bias, classifier.weight"),
        (lambda folder: f"hf:{folder}", r"cannot be loaded \(.*\): check the folder"),
        (
            lambda folder: written(
                folder, "CLIPText", "Model", TINY | {"vocab_size": 50}, import_transformers().ViTImageProcessor()
            ),
            "is a clip_text_model model, for which transformers has no image classifier",
        ),
    ],
)
def test_what_is_no_classifier_is_refused_in_one_line(make: Any, words: str, tmp_path: Path, no_network: None) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        classlens.load(make(tmp_path))
    assert "\n" not in str(caught.value)
