import io
import json
from contextlib import suppress
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import classlens
from classlens.errors import ClasslensError, ImageError, MethodError, ModelError, NotFiniteError, TargetError
from classlens.explanation import operations
from classlens.models import LoadedModel, Preprocess
from networks import build, pictures


def loaded() -> LoadedModel:
    preprocess = Preprocess(resize=40, crop=32)
    return LoadedModel("tiny", build("plain"), preprocess, tuple(f"thing {i}" for i in range(7)))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (50, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_files_pictures_and_tensors_give_the_same(photo: Path) -> None:
    m = loaded()
    maps = [classlens.explain(m, source, 3).maps for source in (photo, str(photo), [photo], Image.open(photo))]
    tensor = m.preprocess(photo)[None]
    assert all(torch.equal(a, classlens.explain(m.model, tensor, 3).maps) for a in maps)


def test_what_an_explanation_holds(photo: Path) -> None:
    e = classlens.explain(loaded(), [photo, photo], "thing 4")
    assert e.targets.tolist() == [[4], [4]]
    assert e.label(4) == "thing 4"
    assert e.probability(1, 0) == pytest.approx(float(e.logits[1].softmax(0)[4]), rel=1e-6)
    assert e.model == "tiny"
    assert e.method == "agf"
    assert e.signed
    assert e.report.seconds > 0
    assert e.report.ops["conv2d"] == 2
    restored = Preprocess(resize=40, crop=32).restore(Preprocess(resize=40, crop=32)(photo))
    assert torch.allclose(e.pictures[0], restored, atol=1e-6)


def test_report_is_json(photo: Path) -> None:
    for method in ("agf", "gradcam"):
        text = json.dumps(classlens.explain(loaded(), photo, method=method).report.to_json(), allow_nan=False)
        assert json.loads(text)["ops"]["linear"] == 1


def test_saving_writes_pictures_numbers_and_report(photo: Path, tmp_path: Path) -> None:
    e = classlens.explain(loaded(), photo, classlens.top(2))
    written = e.save(tmp_path / "out")
    assert {p.suffix for p in written} == {".png", ".npz", ".json"}
    arrays = np.load(next(p for p in written if p.suffix == ".npz"))
    assert np.array_equal(arrays["maps"], e.maps.numpy())
    assert np.array_equal(arrays["targets"], e.targets.numpy())


def test_options_in_brackets_and_as_keywords() -> None:
    model, x = build("residual"), pictures(1)
    a = classlens.explain(model, x, 1, "agf-release(without=A)").maps
    assert torch.equal(a, classlens.explain(model, x, 1, "agf-release", without="A").maps)
    b = classlens.explain(model, x, 1, "agf-release(without=['A', 'M'])").maps
    assert torch.equal(b, classlens.explain(model, x, 1, "agf-release", without=["A", "M"]).maps)
    assert not torch.allclose(a, b)


class Returns(nn.Module):
    def __init__(self, what: object) -> None:
        super().__init__()
        self.what, self.conv = what, nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> object:
        return self.what(self.conv(x))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: classlens.explain(build("plain"), "photo.jpg"), ImageError, "need preprocessing: give preprocess="),
        (lambda: classlens.explain(loaded(), []), ImageError, "no images were given"),
        (lambda: classlens.explain(loaded(), "nowhere.jpg"), ImageError, "nowhere.jpg"),
        (lambda: classlens.explain("resnet50", pictures()), ModelError, "the model is a str"),
        (lambda: classlens.explain(build("plain"), pictures()[0]), ImageError, r"\[None\]"),
        (lambda: classlens.explain(build("plain"), torch.full((1, 3, 32, 32), torch.nan)), ImageError, "(?i)nan"),
        (lambda: classlens.explain(build("plain"), torch.zeros(1, 4, 32, 32)), ModelError, "cannot run on input"),
        (lambda: classlens.explain(build("plain"), torch.zeros(1, 3, 0, 32)), ImageError, r"\(1, 3, 0, 32\)"),
        (lambda: classlens.explain(build("plain").train(), pictures()), ModelError, "training mode"),
        (lambda: classlens.explain(build("plain"), pictures(), method="agff"), MethodError, "did you mean agf"),
        (lambda: classlens.explain(build("plain"), pictures(), method="agf("), MethodError, "cannot read the method"),
        (lambda: classlens.explain(build("plain"), pictures(), method="agf(A)"), MethodError, "name=value"),
        (
            lambda: classlens.explain(Returns(lambda x: x).eval(), pictures()),
            ModelError,
            "select the logits with output=",
        ),
        (
            lambda: classlens.explain(Returns(lambda x: (x, x)).eval(), pictures()),
            ModelError,
            "select the logits",
        ),
        (
            lambda: classlens.explain(Returns(lambda x: x.flatten(1) / 0).eval(), pictures()),
            ModelError,
            "logits of image 0 are NaN or infinite",
        ),
    ],
)
def test_bad_input_is_one_line(call: object, error: type[ClasslensError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_grey_networks_are_drawn_grey() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 900, 3)).eval()
    e = classlens.explain(model, pictures()[:, :1])
    assert e.pictures.shape == (2, 3, 32, 32)
    assert torch.equal(e.pictures[:, 0], e.pictures[:, 2])
    assert e.pictures.min() == 0
    assert e.pictures.max() == 1


def test_operations_of_a_network() -> None:
    found = operations(loaded())
    assert found["conv2d"] == 2
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_in_a_notebook_it_shows_its_figure_and_elsewhere_a_line(photo: Path) -> None:
    e = classlens.explain(loaded(), photo, ["thing 4", "thing 1"])
    data, size = e._repr_png_()
    with Image.open(io.BytesIO(data)) as image:
        assert image.width > size["width"] > 300  # more dots than the place it takes, for dense screens
    assert matplotlib.pyplot.get_fignums() == []
    assert repr(e) == "<Explanation by agf of tiny: maps (1, 2, 32, 32) for thing 4, thing 1>"


@pytest.mark.parametrize("name", ["clrp", "sglrp", "finer-cam"])
def test_one_output_leaves_nothing_to_compare_with(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1)).eval()
    with pytest.raises(TargetError, match="only one output"):
        classlens.explain(model, torch.rand(1, 3, 8, 8), 0, name)


@pytest.mark.parametrize("method", ["agf", "agf-release", "lrp", "clrp", "excitation-bp", "sobel"])
def test_a_map_that_overflows_is_refused(method: str) -> None:
    """ReLU6 hides what overflows below it, so the logits are sound; the maps would be NaN all over."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU6(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(5, 4)).eval()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    images[1] *= 3e38
    assert torch.isfinite(model(images)).all()
    with pytest.raises(
        NotFiniteError, match=rf"map of image 1 by {method} holds NaN .* spans -3e\+38 to 3e\+38"
    ) as caught:
        classlens.explain(model, images, 1, method)
    assert "\n" not in str(caught.value)
    assert torch.isfinite(classlens.explain(model, images[:1], 1, method).maps).all()


class Cut(nn.Module):
    """A network whose logits have no gradient: detached, or made of a comparison."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Conv2d(3, 4, 3), how

    def forward(self, images: Tensor) -> Tensor:
        found = self.layer(images)
        return (found.detach() if self.how == "detached" else (found > 0).float()).mean((2, 3))


@pytest.mark.parametrize("how", ["detached", "compared"])
@pytest.mark.parametrize("name", list(classlens.METHODS))
def test_a_network_that_cannot_be_differentiated_is_refused_in_one_line(name: str, how: str) -> None:
    chosen = classlens.METHODS[name]
    images = torch.rand(1, 3, 24, 24)
    if chosen.family == "controls" or name == "rise":  # they look from outside
        assert classlens.explain(Cut(how).eval(), images, 0, name).maps.abs().sum() > 0
    elif how == "detached" and (chosen.family == "relevance propagation" or name == "deeplift-shap"):
        with suppress(ClasslensError):  # most hand relevance through a detached value as through any other
            assert classlens.explain(Cut(how).eval(), images, 0, name).maps.abs().sum() > 0
    else:
        with pytest.raises(ClasslensError, match=r"^.*$"):
            classlens.explain(Cut(how).eval(), images, 0, name)
