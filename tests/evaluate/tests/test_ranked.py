from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from world import make_breeds

import classlens
from classlens.data.labels import imagenet, imagenet_wnids
from classlens.data.masks import IGNORE
from classlens.evaluate import TESTS, DataError, Settings, options_of_tests, run
from classlens.evaluate.store import Store, schemas
from classlens.evaluate.tables import headings, markdown
from classlens.evaluate.tests import perturbation, ranked

# ------------------------------------------------------------------------------------------------------- which classes


def test_the_superclasses_are_those_of_imagenet() -> None:
    dogs, cats = tuple(range(151, 269)), tuple(range(281, 286))
    assert ranked.members("pets", imagenet(), 1000) == dogs + cats
    assert ranked.members("dogs", None, 1000) == dogs  # a network without labels and 1000 outputs is ImageNet's
    assert ranked.members("cats", imagenet(), 1000) == cats
    birds = [imagenet()[index] for index in ranked.members("birds", imagenet(), 1000)]
    assert len(birds) == 59
    assert {"cock", "great grey owl", "black swan", "white stork", "albatross", "macaw"} <= set(birds)
    assert not {"stingray", "centipede", "tusker", "grey whale", "wombat"} & set(birds)
    for runs in ranked.SUPERCLASSES.values():
        assert all(wnid in imagenet_wnids() for run in runs for wnid in run)


def test_other_networks_are_known_by_their_labels() -> None:
    assert ranked.members("pets", ("car", "Siamese", "beagle", "egyptian_mau"), 4) == (1, 2, 3)
    assert ranked.members("dogs", ("car", "Siamese", "beagle", "egyptian_mau"), 4) == (2,)
    assert ranked.members("pets", ("n02099601", "n02958343"), 2) == (0,)
    assert ranked.members("pets", ("red", "green"), 2) == ()
    assert ranked.members("pets", None, 20) == ()


def test_the_likeliest_of_some_classes() -> None:
    logits = torch.tensor([9.0, 1.0, 3.0, 8.0, 2.0])
    assert ranked.likeliest(logits, (1, 2, 4)) == [2, 4, 1]
    assert ranked.likeliest(logits, (1, 3, 4), 2) == [3, 4]
    assert ranked.likeliest(torch.zeros(5), (4, 2, 1)) == [4, 2, 1]  # equal: in their order


# ----------------------------------------------------------------------------------------------------------- the scores


def slow_average_precision(score: np.ndarray, positive: np.ndarray) -> float:
    """The mean, over the positives, of the share of positives among all that score at least as much."""
    return float(np.mean([positive[score >= own].mean() for own in score[positive]]))


def slow_outline(mask: np.ndarray, reach: int) -> np.ndarray:
    """Pixel by pixel: something else within reach, and both sides within four times that."""
    found = np.zeros(mask.shape, bool)
    kinds = np.where(mask == IGNORE, "none", np.where(mask > 0, "object", "background"))
    for y, x in zip(*np.nonzero(mask != IGNORE), strict=True):
        close, wide = (
            set(kinds[max(0, y - away) : y + away + 1, max(0, x - away) : x + away + 1].ravel())
            for away in (reach, ranked.ACROSS * reach)
        )
        found[y, x] = bool(close - {kinds[y, x]}) and {"object", "background"} <= wide
    return found


def bordered(seed: int) -> np.ndarray:
    """A box of class 7 with an unlabelled border, and something unlabelled far from it."""
    random = np.random.default_rng(seed)
    mask = np.zeros((26, 30), np.uint8)
    top, left, border = random.integers(2, 6, 3)
    mask[top - border if top > border else 0 : top + 9 + border, : left + 8 + border] = IGNORE
    mask[top : top + 9, left : left + 8] = 7
    mask[-2:, -3:] = IGNORE
    return mask


@pytest.mark.parametrize(("seed", "reach"), list(itertools.product(range(4), (1, 2))))
def test_the_band_around_an_outline(seed: int, reach: int) -> None:
    mask = bordered(seed)
    band = ranked.outline(mask, reach)
    assert np.array_equal(band, slow_outline(mask, reach))
    assert not band[mask == IGNORE].any()
    if reach == 2:
        assert (mask[band] == 7).any()
        assert (mask[band] == 0).any()
        assert not band[-6:, -6:].any()  # what is unlabelled there is no outline


def test_a_mask_of_one_kind_has_no_outline() -> None:
    for value in (0, 3, IGNORE):
        mask = np.full((9, 9), value, np.uint8)
        assert not ranked.outline(mask, 2).any()
        assert ranked.detail(np.random.default_rng(0).random((9, 9)), mask) is None


def test_detail_is_the_precision_within_the_band() -> None:
    mask = np.zeros((56, 60), np.uint8)
    mask[10:40, 12:44] = 1
    evidence = np.random.default_rng(1).random(mask.shape) + 0.3 * mask
    band = slow_outline(mask, 2)  # 56 / 28
    assert ranked.detail(evidence, mask) == pytest.approx(slow_average_precision(evidence[band], mask[band] > 0))
    assert ranked.detail(mask.astype(float), mask) == 1.0
    y, x = np.mgrid[:56, :60]
    blob = -np.hypot(y - 24.5, x - 27.5)  # lies on the object, but does not know its outline
    whole = slow_average_precision(blob.ravel(), mask.ravel() > 0)
    assert (ranked.detail(blob, mask) or 1) < whole - 0.1


def test_a_class_has_its_own_mask() -> None:
    mask = np.array([[0, 3, 7, IGNORE]], np.uint8)
    assert ranked.mask_of(mask, 7).tolist() == [[0, 0, 1, IGNORE]]
    assert ranked.mask_of(mask, 9).tolist() == [[0, 0, 0, IGNORE]]


def test_correlation_is_pearson() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(5, 1, (2, 20, 30)).astype(np.float32)
    assert ranked.correlation(a, b) == pytest.approx(np.corrcoef(a.ravel(), b.ravel())[0, 1], abs=1e-6)
    assert ranked.correlation(a, 3 - 2 * a) == pytest.approx(-1)
    assert ranked.correlation(a, np.ones_like(a)) is None


def test_the_reddest_pixels_are_replaced() -> None:
    random = torch.Generator().manual_seed(0)
    images, maps = torch.rand(2, 3, 10, 10, generator=random), torch.randn(2, 10, 10, generator=random)
    changed = ranked.without_reddest(images, maps, torch.full_like(images, 7.0))
    for image, evidence, now in zip(images, maps, changed, strict=True):
        reddest = sorted(evidence.flatten().tolist())[-15:]
        for y, x in np.ndindex(10, 10):
            expected = torch.full((3,), 7.0) if float(evidence[y, x]) in reddest else image[:, y, x]
            assert torch.equal(now[:, y, x], expected)


def test_own_changes_by_hand() -> None:
    """Rows are maps, columns classes. The second class falls more by the first map than by its own."""
    changes = torch.tensor([[-5.0, -4.0, -1.0], [-2.0, -3.0, 0.0], [0.0, -1.0, -2.0]])
    assert ranked.own_changes(changes) == [-5 - (-2 + 0) / 2, -3 - (-4 - 1) / 2, -2 - (-1 + 0) / 2]
    assert ranked.own_changes(torch.full((3, 3), -2.0)) == [0, 0, 0]  # the same map whichever class is asked
    assert ranked.own_changes(torch.tensor([[-2.0]])) == [None]


# ---------------------------------------------------------------------------------------------------------- in a run


def settings(*data: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "tests": ("ranked",), "data": tuple(map(str, data)), "methods": ("gradcam", "agf-release"),
        "model": "world:make_breeds", "batch_size": 4, "threads": 1, "limit": 5,
    }  # fmt: skip
    return Settings(**(values | changes))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """images/ and masks/ of a red and a paler blue square: the maps of the three pets differ."""
    root = tmp_path_factory.mktemp("pairs")
    for folder in ("images", "masks"):
        (root / folder).mkdir()
    for number in range(5):
        pixels, mask = squares(number)
        Image.fromarray(pixels).save(root / "images" / f"{number}.png")
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
    return root


def squares(shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(48,48,3) and its mask: a red square, 3 as VOC's bird, and a smaller, paler blue one, 9 as its chair."""
    pixels, mask = np.full((48, 48, 3), 100, np.uint8), np.zeros((48, 48), np.uint8)
    pixels[6:20, 6 + shift : 20 + shift], mask[6:20, 6 + shift : 20 + shift] = (200, 60, 60), 3
    pixels[28:36, 28:36], mask[28:36, 28:36] = (80, 80, 140), 9
    return pixels, mask


@pytest.fixture(scope="module")
def measured(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranked")
    run(settings(pairs, against="gradcam"), out)
    return out


@pytest.mark.parametrize("method", ["gradcam", "agf-release"])
def test_what_the_rows_say_is_true(measured: Path, pairs: Path, method: str) -> None:
    """One picture, done again by hand."""
    row = next(r for r in Store(measured).read("ranked").to_pylist() if r["method"] == method)
    loaded = make_breeds()
    image = loaded.preprocess(pairs / "images" / row["image"])[None]
    mask = np.asarray(Image.open(pairs / "masks" / row["image"])) > 0
    clean = loaded.model(image)[0].detach()
    assert row["explained"] == clean[:3].argsort(descending=True).tolist()
    e = classlens.explain(loaded, image, torch.tensor([row["explained"]]), method)
    maps = e.maps[0].numpy()
    blur = perturbation.replacement(image, "blur", loaded.preprocess)
    after = []
    for evidence in e.maps[0]:
        order = perturbation.ranks(evidence[None])[0]
        gone = order >= order.numel() - int(0.15 * order.numel())
        with torch.no_grad():
            after.append(loaded.model(torch.where(gone, blur, image))[0])
    for rank, index in enumerate(row["explained"]):
        evidence = maps[rank]
        assert row["ap"][rank] == pytest.approx(slow_average_precision(evidence.ravel(), mask.ravel()))
        threshold = 0 if method == "agf-release" else evidence.mean()
        assert row["accuracy"][rank] == pytest.approx(((evidence > threshold) == mask).mean())
        band = slow_outline(mask.astype(np.uint8), 2)
        assert row["detail"][rank] == pytest.approx(slow_average_precision(evidence[band], mask[band]))
        change = [float(logits[index] - clean[index]) for logits in after]
        assert row["change"][rank] == pytest.approx(change[rank], abs=1e-4)
        others = [change[other] for other in range(3) if other != rank]
        assert row["own"][rank] == pytest.approx(change[rank] - sum(others) / 2, abs=1e-4)
        expected = np.corrcoef(evidence.ravel(), maps[0].ravel())[0, 1]
        assert row["correlation"][rank] == pytest.approx(expected, abs=1e-5)
    assert row["correlation"][2] < 0.999  # or nothing above would tell the ranks apart


def test_its_table_has_every_measure_of_every_rank(measured: Path, pairs: Path) -> None:
    table, less = run(settings(pairs, against="gradcam"), measured).tables
    names = [f"{m}, rank {k}" for m in ("AP", "accuracy", "detail", "change", "own", "correlation") for k in (1, 2, 3)]
    assert [metric.name for metric in table.metrics] == [name for name in names if name != "correlation, rank 1"]
    heads = headings(table)
    assert heads[1] == "AP, rank 1 ↑"
    assert heads[10] == "change, rank 1 ↓"
    assert heads[-2] == "correlation, rank 3"  # neither more nor less is better, and nobody leads
    assert [bool(table.best(i)) for i in (0, 15, 16)] == [True, False, False]
    assert ",correlation," not in (measured / "table.csv").read_text()
    assert '"correlation, rank 2",,' in (measured / "table.csv").read_text()
    assert "correlation, rank 2 |" in markdown([table])
    assert less.rows.keys() == {"agf-release"}
    found = Store(measured).read("ranked").to_pylist()
    mine = [row["ap"][1] for row in found if row["method"] == "gradcam"]
    assert table.rows["gradcam"][1].value == pytest.approx(100 * float(np.mean(mine)))


def test_the_report_shows_the_maps_of_all_ranks(measured: Path) -> None:
    drawn = list((measured / "pictures").iterdir())
    assert drawn
    for path in drawn:
        with Image.open(path) as image:
            assert image.width == 3 * image.height
    assert "explained: beagle, basset, Siamese cat" in (measured / "report.html").read_text()


def test_images_are_judged_by_the_ranks_after_the_first() -> None:
    kind = schemas()["ranked"]
    rows = kind.empty_table().from_pylist(
        [{"ap": [0.9, 0.2, 0.4]}, {"ap": [0.9, None, 0.7]}, {"ap": [0.9, None]}], kind
    )
    judge = TESTS["ranked"].picture_score
    assert judge is not None
    assert judge(rows.slice(0, 2)).tolist() == pytest.approx([0.3, 0.7])
    assert np.isnan(judge(rows.slice(2)))  # no class was missed


def test_pictures_of_something_else_are_left_out(masked: Path, tmp_path: Path) -> None:
    """Where the likeliest class is none of the superclass there is nothing to rank."""
    out = tmp_path / "out"
    report = run(settings(masked, model="world:make_nothing"), out)
    assert not len(Store(out).read("ranked"))
    assert "In no image of masked is the most likely class one of the superclass" in report.notes[-1]


def test_what_it_cannot_do_is_refused_in_one_line(labelled: Path, masked: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs a model with 3 classes of pets .*; this one has 0: choose another"):
        run(settings(masked, model="world:make"), tmp_path / "a")
    dogs = options_of_tests(superclass="dogs")
    with pytest.raises(DataError, match=r"3 classes of dogs .*; this one has 2"):
        run(settings(masked, options=dogs), tmp_path / "b")
    with pytest.raises(DataError, match=r"ranked needs masks, and classes .* has none"):
        run(settings(labelled), tmp_path / "c")


def test_in_all_it_is_left_out_with_the_reason(masked: Path, tmp_path: Path) -> None:
    both = settings(masked, tests=("segmentation", "ranked"), everything=True, model="world:make", limit=2)
    report = run(both, tmp_path)
    assert [table.config.test for table in report.tables] == ["segmentation"]
    assert any(note.startswith("ranked was skipped: ranking needs a model with") for note in report.notes)


def draw_voc(root: Path) -> Path:
    """The same squares with masks of both, of none, and of the paler one alone."""
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    pixels, mask = squares()
    for name, truth in (("a", mask), ("b", np.zeros_like(mask)), ("c", np.where(mask == 9, 9, 0).astype(np.uint8))):
        Image.fromarray(pixels).save(root / "JPEGImages" / f"{name}.jpg", quality=100, subsampling=0)
        Image.fromarray(truth).save(root / "SegmentationClass" / f"{name}.png")
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("a\nb\nc\n")
    return root


def test_classes_that_are_there_are_found_or_missed(tmp_path: Path) -> None:
    voc = draw_voc(tmp_path / "voc")
    report = run(settings(voc, model="world:make_voc", methods=("gradcam",)), tmp_path / "out")
    a, b, c = sorted(Store(tmp_path / "out").read("ranked").to_pylist(), key=lambda row: row["image"])
    assert [row["explained"] for row in (a, b, c)] == [[2, 8], [2], [8]]
    assert b["ap"] == b["change"] == [None, None]  # what is found there is in no mask
    assert c["ap"] == [None, pytest.approx(a["ap"][1])]
    loaded = classlens.load("world:make_voc")
    image = loaded.preprocess(voc / "JPEGImages" / "a.jpg")[None]
    mask = np.asarray(Image.open(voc / "SegmentationClass" / "a.png"))
    probability = loaded.model(image)[0].sigmoid()
    assert probability[2] > 0.5 > probability[8]
    maps = classlens.explain(loaded, image, torch.tensor([[2, 8]]), "gradcam", multilabel=True).maps[0].numpy()
    for place, number in enumerate((3, 9)):
        evidence, own = maps[place], mask == number
        assert a["ap"][place] == pytest.approx(slow_average_precision(evidence.ravel(), own.ravel()))
        assert a["accuracy"][place] == pytest.approx(((evidence > evidence.mean()) == own).mean())
    names = [metric.name for metric in report.tables[0].metrics]
    assert names == [f"{m}, {part}" for m in ("AP", "accuracy", "detail", "change") for part in ("found", "missed")]
    easier = settings(voc, model="world:make_voc", methods=("gradcam",), options=options_of_tests(threshold=0.001))
    run(easier, tmp_path / "easier")
    found = next(r for r in Store(tmp_path / "easier").read("ranked").to_pylist() if r["image"] == a["image"])
    assert found["ap"] == [pytest.approx(np.mean(a["ap"])), None]
