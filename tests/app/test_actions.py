import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

import classlens
from app import small
from classlens import render
from classlens.app import actions
from classlens.app import studio as studios
from classlens.app.actions import Blank, Panel, Wish
from classlens.app.studio import Studio
from classlens.data.images import to_tensor
from classlens.errors import ImageError, MethodError, TargetError
from classlens.models import Choice, LoadedModel, Preprocess
from classlens.models.network import Network, weights_hash


@pytest.fixture
def studio():
    made = small.studio()
    yield made
    made.close()


def wish(view="one", index=0, rival=1, method="agf", methods=("agf", "gradcam"), model="small", rather_than=None):
    return Wish(model, view, index, rival, method, methods, rather_than)


def last(studio, picture, wanted):
    *_, found = actions.panels(studio, picture, wanted)
    return found


# ------------------------------------------------------------------------------------------------------ pictures


def test_a_picture_is_read_as_each_network_takes_it(studio):
    picture = studio.open(small.file())
    with_library = studio.models["small"].preprocess(small.file())
    assert torch.equal(picture.inputs["small"][0], with_library)
    assert set(picture.inputs) == set(picture.views) == {"small", "other"}


def test_the_view_is_the_network_s_part_of_the_picture_but_sharper(studio):
    picture = studio.open(small.file(400, 300))
    view = picture.views["small"]
    assert view.width == view.height > 200  # 32 of 40 pixels of the short edge: 240 of 300
    seen = studio.models["small"].preprocess.frame(Image.open(io.BytesIO(small.file(400, 300))))
    shrunk = np.asarray(view.resize(seen.size, Image.Resampling.BILINEAR)).astype(float)
    assert np.abs(shrunk - np.asarray(seen).astype(float)).mean() < 6


def test_a_small_or_uncropped_picture_is_shown_as_the_network_sees_it():
    whole = LoadedModel("whole", small.network(), Preprocess(resize=None, crop=None), small.LABELS)
    tiny = small.loaded()
    studio = Studio({"whole": whole, "tiny": tiny})
    picture = studio.open(small.file(20, 16))
    assert picture.views["whole"].size == (20, 16)
    assert picture.views["tiny"].size == (32, 32)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "this file is empty"),
        (b"not a picture", "this file is not a picture"),
        (small.file(kind="JPEG")[:500], "this file is corrupt"),
        (b"0" * (studios.MAX_UPLOAD + 1), "larger than 20 MB"),
    ],
)
def test_a_broken_or_large_file_is_refused_in_one_line(studio, content, words):
    with pytest.raises(ImageError, match=words):
        studio.open(content)


def test_a_picture_of_too_many_pixels_is_refused(studio):
    buffer = io.BytesIO()
    Image.new("1", (9000, 8000)).save(buffer, "PNG")  # 72 megapixels in a few kilobytes
    with pytest.raises(ImageError, match="pixels"):
        studio.open(buffer.getvalue())


@pytest.mark.parametrize("text", [None, 5, "", "no base64!", "abc", {"path": "/etc/passwd"}])
def test_what_is_no_base64_is_refused(text):
    with pytest.raises(ImageError):
        studios.decode(text)


def test_samples_are_pictures_and_only_these_can_be_picked(studio):
    samples = studios.samples()
    for i, content in enumerate(samples.values()):
        assert studios.pick_sample(samples, i) == content
        studio.open(content)
    for wrong in (-1, len(samples), "0", None):
        with pytest.raises(ImageError):
            studios.pick_sample(samples, wrong)


# ------------------------------------------------------------------------------------------------------- classes


def test_the_likeliest_classes_are_those_of_the_network(studio):
    picture = studio.open(small.file())
    expected = studio.models["small"].model(picture.inputs["small"])[0].detach().softmax(0)
    found = studio.offer(picture, "small").likeliest(3)
    assert [index for index, _ in found] == expected.topk(3).indices.tolist()
    assert [share for _, share in found] == pytest.approx(expected.topk(3).values.tolist())
    assert len(studio.offer(picture, "small").likeliest(99)) == len(small.LABELS)


def test_a_multilabel_network_has_a_probability_for_each_class():
    studio = Studio({"many": small.loaded("many", multilabel=True)})
    picture = studio.open(small.file())
    expected = studio.models["many"].model(picture.inputs["many"])[0].detach().sigmoid()
    assert studio.offer(picture, "many").share(3) == pytest.approx(float(expected[3]))
    [panel] = last(studio, picture, wish(index=3, model="many"))
    assert panel.note == render.probability_text(float(expected[3]))


def test_classes_without_names_are_numbered():
    studio = Studio({"bare": LoadedModel("bare", small.network(), Preprocess(resize=40, crop=32), None)})
    assert studio.offer(studio.open(small.file()), "bare").names == tuple(f"class {i}" for i in range(5))


# -------------------------------------------------------------------------------------------------- explanations


def test_an_explanation_is_the_library_s_and_is_kept(studio):
    picture = studio.open(small.file())
    found = studio.explain(picture, "small", 2, "agf")
    assert torch.equal(found.maps, classlens.explain(studio.models["small"], picture.inputs["small"], 2).maps)
    assert studio.explain(studio.open(small.file()), "small", 2, "agf") is found  # the same picture, sent again
    others = [
        studio.explain(picture, "small", 1, "agf"),
        studio.explain(picture, "small", 2, "lrp"),
        studio.explain(picture, "other", 2, "agf"),
        studio.explain(studio.open(small.file(seed=1)), "small", 2, "agf"),
    ]
    assert all(not torch.equal(other.maps, found.maps) for other in others)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(studio, monkeypatch):
    picture = studio.open(small.file())
    first = studio.explain(picture, "small", 0)
    monkeypatch.setattr(studios, "_KEPT", 3 * (first.maps.nbytes + first.pictures.nbytes))
    second = studio.explain(picture, "small", 1)
    for index in (2, 3):
        studio.explain(picture, "small", index)
        assert studio.explain(picture, "small", 1) is second  # asked for again, so it stays
    assert studio.explain(picture, "small", 0) is not first


def test_a_picture_can_be_recalled_by_the_fingerprint_of_its_file_while_it_is_in_memory(studio, monkeypatch):
    picture = studio.open(small.file(seed=1))
    assert studio.recall(picture.digest) is picture
    assert studio.open(small.file(seed=1)) is picture
    with pytest.raises(ImageError, match="no longer in memory: choose it again"):
        studio.recall("0" * 64)
    monkeypatch.setattr("classlens.app.studio._KEPT", picture.nbytes)
    studio.open(small.file(seed=2))
    with pytest.raises(ImageError, match="no longer in memory"):
        studio.recall(picture.digest)


def test_auto_is_the_method_that_was_chosen_for_the_network(studio, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture, model = studio.open(small.file()), studio.models["small"]
    with pytest.raises(MethodError, match="run `classlens choose --model small"):
        studio.explain(picture, "small", 1, "auto")
    Choice("gradcam(shallower=1)", Network(model).id, weights_hash(model.model), "", {}).save(model)
    assert studio.explain(picture, "small", 1, "auto").method == "gradcam(shallower=1)"


def test_a_request_cannot_ask_for_other_methods_or_classes(studio):
    picture = studio.open(small.file())
    with pytest.raises(MethodError, match="no such method"):
        studio.explain(picture, "small", 0, "agf(without=M)")
    for index in (-1, 5):
        with pytest.raises(TargetError):
            studio.explain(picture, "small", index)


def test_the_likeliest_classes_are_computed_ahead(studio, monkeypatch):
    picture = studio.open(small.file())
    studio.prefetch(picture, "small", 4)
    studio._ahead.submit(int).result(30)  # there is one worker: when it comes to this, the rest is done
    monkeypatch.setattr(studios, "explain", pytest.fail)  # from here on, nothing is computed
    for index, _ in studio.offer(picture, "small").likeliest(4):
        assert studio.explain(picture, "small", index).maps.shape == (1, 1, 32, 32)


def test_what_is_computed_ahead_gives_way_to_the_next_picture(studio, monkeypatch):
    began, go_on, done = threading.Event(), threading.Event(), []

    def slow(picture, model, index, method, *more):
        began.set()
        go_on.wait(10)
        done.append((picture.digest, index))

    first, second = studio.open(small.file(seed=1)), studio.open(small.file(seed=2))
    monkeypatch.setattr(studio, "explain", slow)
    studio.prefetch(first, "small", 3)
    assert began.wait(10)
    studio.prefetch(second, "small", 2)
    go_on.set()
    studio._ahead.shutdown()
    assert [digest for digest, _ in done] == [first.digest, second.digest, second.digest]


# -------------------------------------------------------------------------------------------------------- panels


def test_one_class(studio):
    picture = studio.open(small.file())
    [panel] = last(studio, picture, wish(index=2))
    assert (panel.title, panel.index, panel.signed, panel.method) == ("<b>bold</b>", 2, True, "agf")
    assert torch.equal(panel.evidence, studio.explain(picture, "small", 2).maps[0, 0])


def test_one_class_rather_than_others(studio):
    picture = studio.open(small.file())
    [panel] = last(studio, picture, wish(index=0, rather_than=3))
    expected = classlens.explain(studio.models["small"], picture.inputs["small"], 0, rather_than=3)
    assert torch.equal(panel.evidence, expected.maps[0, 0])
    assert (panel.title, panel.name) == ("cat", "cat rather than cup")
    assert panel.rivals == render.rival_text(expected, 0, 0)
    assert panel.ends == ("for its rivals", "for it")
    saved = np.load(io.BytesIO(actions.arrays(picture, "small", [panel])))
    assert saved["names"].tolist() == ["cat rather than cup"]
    refused, drawn = last(studio, picture, wish("methods", methods=("clrp", "agf"), rather_than="rivals"))
    assert "chooses the rivals of a class itself" in refused.reason
    assert drawn.rivals.startswith("rather than its rivals (most likely: ")


def test_two_classes_and_their_difference(studio):
    picture = studio.open(small.file())
    one, two, apart = last(studio, picture, wish("two", 0, 3))
    assert (one.title, two.title, apart.is_difference) == ("cat", "cup", True)
    expected = one.evidence.double() / one.evidence.double().abs().sum()
    expected = expected - two.evidence.double() / two.evidence.double().abs().sum()
    torch.testing.assert_close(apart.evidence, expected)
    assert apart.ends == ("cup", "cat")  # blue, red
    with pytest.raises(TargetError, match="same"):
        last(studio, picture, wish("two", 3, 3))


def test_the_difference_does_not_depend_on_the_size_of_the_maps():
    one, two = torch.randn(2, 5, 5)
    torch.testing.assert_close(actions.difference(one, two), actions.difference(100 * one, two / 7))
    assert actions.difference(one, one).abs().max() == 0
    assert actions.difference(torch.zeros(2, 2), torch.zeros(2, 2)).abs().max() == 0


def test_several_methods_come_one_by_one(studio):
    picture = studio.open(small.file())
    blank = [
        [isinstance(panel, Blank) for panel in shown]
        for shown in actions.panels(studio, picture, wish("methods", methods=("agf", "gradcam")))
    ]
    assert blank == [[True, True], [False, True], [False, False]]
    agf, gradcam = last(studio, picture, wish("methods", methods=("agf", "gradcam")))
    assert (agf.title, agf.signed, gradcam.title, gradcam.signed) == ("agf", True, "gradcam", False)
    with pytest.raises(MethodError, match="no method"):
        last(studio, picture, wish("methods", methods=()))


def test_a_method_that_cannot_serve_says_why_and_the_others_go_on():
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 5)).eval()
    studio = Studio({"small": LoadedModel("small", flat, Preprocess(resize=40, crop=32), small.LABELS)})
    picture = studio.open(small.file())
    gradcam, gradient = last(studio, picture, wish("methods", methods=("gradcam", "gradient")))
    assert isinstance(gradcam, Blank)
    assert gradcam.reason
    assert isinstance(gradient, Panel)


def test_layers_are_decomposed_by_a_method_that_has_the_terms(studio):
    picture = studio.open(small.file())
    assert [actions.agf_method(name) for name in ("agf", "agf-paper", "gradcam", "x")] == [
        "agf", "agf-paper", "agf", "agf",
    ]  # fmt: skip
    [panel] = last(studio, picture, wish("layers", method="gradcam"))
    assert panel.method == "agf"
    png = studio.decomposition(picture, "small", 0, "agf-release")
    assert Image.open(io.BytesIO(png)).width > 600
    assert studio.decomposition(picture, "small", 0, "agf-release") is png


# --------------------------------------------------------------------------------------------------- as pictures


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("opacity", [0.0, 0.35, 0.8, 1.0])
def test_the_browser_s_blend_is_the_library_s_overlay(signed, opacity):
    picture, evidence = torch.rand(3, 24, 24), torch.randn(24, 24)
    rgba = np.asarray(actions.layer(evidence, signed)).astype(float) / 255
    grey = render.overlay(picture, torch.zeros(24, 24), signed).astype(float) / 255
    alpha = opacity * rgba[..., 3:]
    blended = 255 * ((1 - alpha) * grey + alpha * rgba[..., :3])  # what CSS does with two pictures and an opacity
    expected = render.overlay(picture, evidence, signed, opacity).astype(float)
    assert np.abs(blended - expected).max() <= 2


def test_a_blend_on_the_sharp_view_has_its_size(studio):
    picture = studio.open(small.file(400, 300))
    view, [panel] = picture.views["small"], last(studio, picture, wish())
    drawn = actions.blend(view, panel.evidence, panel.signed, 0.8)
    assert drawn.shape == (view.height, view.width, 3)
    plain = actions.blend(view, panel.evidence, panel.signed, 0.0)
    assert np.array_equal(plain, render.overlay(to_tensor(view), torch.zeros(view.height, view.width)))
    assert not np.array_equal(drawn, plain)


@pytest.mark.parametrize(("view", "columns", "rows"), [("one", 2, 1), ("two", 4, 1), ("methods", 3, 1)])
def test_a_sheet_holds_the_picture_and_all_panels(studio, view, columns, rows):
    picture = studio.open(small.file())
    panels = last(studio, picture, wish(view))
    sheets = [
        Image.open(io.BytesIO(actions.sheet(picture.views["small"], panels, "small", opacity))) for opacity in (0, 0.9)
    ]
    assert sheets[0].size == sheets[1].size
    assert sheets[0].width / sheets[0].height == pytest.approx(3.2 * columns / (3.55 * rows + 0.3), rel=0.02)
    assert sheets[0].tobytes() != sheets[1].tobytes()  # the opacity of the page is that of the file


def test_arrays_are_the_raw_maps(studio):
    picture = studio.open(small.file())
    panels = last(studio, picture, wish("two", 0, 3))
    saved = np.load(io.BytesIO(actions.arrays(picture, "small", panels)))
    assert saved["classes"].tolist() == [0, 3]
    assert saved["names"].tolist() == ["cat", "cup"]
    assert saved["methods"].tolist() == ["agf", "agf"]
    assert np.array_equal(saved["maps"], torch.stack([panel.evidence for panel in panels[:2]]).numpy())
    assert np.array_equal(saved["input"], picture.inputs["small"][0].numpy())
    methods = np.load(io.BytesIO(actions.arrays(picture, "small", last(studio, picture, wish("methods")))))
    assert (methods["methods"].tolist(), methods["names"].tolist()) == (["agf", "gradcam"], ["cat", "cat"])
    with pytest.raises(MethodError, match="no map"):
        actions.arrays(picture, "small", [Blank("rise", "no")])
