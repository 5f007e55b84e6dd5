"""Groups of maps: planted in drawn maps, and in pictures with a watermark that a network uses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tagged
import torch
from PIL import Image
from torch import Tensor, nn

from classlens.models import LoadedModel
from classlens.report import report
from classlens.report.alike import alike_somewhere, likeness, together
from classlens.report.groups import LEAST, off_object, stand_out
from classlens.report.measure import covered
from classlens.report.spectral import affinity, clusters, described, eigengaps, embedding, k_means, spectrum
from classlens.report.spots import central, connected, elsewhere, ninth, smoothed


def blobs(count: int, y: float, x: float, seed: int, width: float = 2.5, jitter: float = 1.0) -> np.ndarray:
    """Maps (count,16,16) whose evidence lies around a place that moves a little."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:16, 0:16]
    middle = random.normal((y, x), jitter, (count, 2))
    apart = (rows - middle[:, 0, None, None]) ** 2 + (columns - middle[:, 1, None, None]) ** 2
    maps = np.exp(-apart / (2 * width**2)) * random.uniform(0.5, 1.5, (count, 16, 16))
    return np.asarray(maps / maps.sum((1, 2), keepdims=True))


def drawn(marked: int, of: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Maps and pictures of objects in the middle; the last ones also have a watermark in the lower left corner."""
    maps, random = blobs(of, 8, 8, seed), np.random.default_rng(seed)
    looks = random.uniform(0, 1, (of, 3, 32, 32)).astype(np.float16)
    if marked:
        maps[of - marked :] = 0.55 * maps[of - marked :] + 0.45 * blobs(marked, 14, 1, seed + 1, width=1.5, jitter=0.4)
        looks[of - marked :, :, 24:, :8] = np.random.default_rng(9).integers(0, 2, (3, 8, 8))
    return maps, looks


@pytest.mark.parametrize("seed", range(4))
def test_a_twentieth_of_the_pictures_is_found(seed: int) -> None:
    (found,) = (cluster for cluster in stand_out(*drawn(5, 100, seed), None, seed) if off_object(cluster))
    assert set(found.members) == set(range(95, 100))
    assert ninth(found.cells) == "bottom-left"
    assert found.share > 0.25
    assert found.others < 0.02


def test_nothing_planted_is_no_alarm() -> None:
    alarms = [cluster for seed in range(6) for cluster in stand_out(*drawn(0, 60, seed), None, seed)]
    assert not any(off_object(cluster) for cluster in alarms)


def test_evidence_on_the_object_is_no_alarm_wherever_it_lies() -> None:
    maps, looks = drawn(6, 60, 0)
    objects = np.zeros((60, 16, 16))
    objects[:, 4:12, 4:12] = 1
    assert [off_object(cluster) for cluster in stand_out(maps, looks, objects)] == [True]
    objects[54:, 11:, :5] = 1  # these pictures show the object in the corner
    assert [off_object(cluster) for cluster in stand_out(maps, looks, objects)] == [False]


def test_clusters_are_those_of_scikit_learn() -> None:
    """The same graph, given to another solver: the same groups up to their numbers."""
    from sklearn.cluster import SpectralClustering

    random = np.random.default_rng(0)
    points = np.repeat(np.eye(3), (20, 12, 8), axis=0) + random.uniform(0, 0.3, (40, 3))
    vectors = points / np.linalg.norm(points, axis=1, keepdims=True)
    (ours,) = clusters(vectors, neighbours=10)
    assert np.bincount(ours).tolist() == [20, 12, 8]  # the eigengap says three, and the largest comes first
    solver = SpectralClustering(3, affinity="precomputed", random_state=0)
    theirs = solver.fit_predict(affinity(vectors, 10) + 1e-6)
    assert len(set(zip(ours.tolist(), theirs.tolist(), strict=True))) == 3


def test_only_what_both_pictures_have_evidence_for_is_alike() -> None:
    looks = np.zeros((3, 3, 4, 4))
    looks[:, :, :2, :2] = np.random.default_rng(0).uniform(0, 1, (3, 2, 2))  # the same corner in all
    grids = np.array([[[1.0, 0], [0, 0]], [[1.0, 0], [0, 0]], [[0, 0], [0, 1.0]]])
    vectors = described(grids, looks.astype(np.float16))
    assert (vectors @ vectors.T)[0] == pytest.approx([1, 1, 0], abs=1e-6)


def test_the_embedding_tells_parts_without_a_link_apart() -> None:
    weights = np.zeros((6, 6))
    weights[:3, :3] = weights[3:, 3:] = 1
    np.fill_diagonal(weights, 0)
    values, vectors = spectrum(weights)
    assert eigengaps(values, 1) == [2]
    points = embedding(vectors, 2)
    assert points @ points.T == pytest.approx(np.kron(np.eye(2), np.ones((3, 3))), abs=1e-9)


def test_k_means_of_equal_points() -> None:
    assert k_means(np.zeros((5, 2)), 2, np.random.default_rng(0)).shape == (5,)


def test_places() -> None:
    cells = np.zeros((16, 16), bool)
    cells[0:2, 0:2] = cells[10, 10:13] = True
    assert sorted(part.sum() for part in connected(cells)) == [3, 4]
    assert (ninth(cells[:, ::-1] & (np.arange(16) > 8)), central(cells)) == ("top-right", True)
    corner = np.zeros((16, 16), bool)
    corner[:3, :3] = True
    assert not central(corner)
    for place in elsewhere(corner, 3, 0):
        assert place.sum() == 9
        assert not (place & corner).any()
    assert smoothed(np.eye(3) * 9)[1, 1] == 3


def test_covered_counts_labelled_pixels_only() -> None:
    mask = np.zeros((32, 32), np.uint8)
    mask[0, 0], mask[0, 1], mask[1, :2] = 1, 255, 0
    assert covered(mask)[0, 0] == pytest.approx(1 / 3)
    assert covered(np.full((32, 32), 255, np.uint8)).sum() == 0


# ------------------------------------------------------------------------------------------------------ the report


class Either(nn.Module):
    """Red if the square or the tag is red."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.tag = tagged.Reader(*tagged.SQUARE), tagged.Reader(slice(0, 4), slice(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(self.square(x), self.tag(x))


def test_the_report_names_and_shows_the_group(tmp_path: Path) -> None:
    """All squares are red or pale; where they are pale, the tag decides."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(LEAST + 4):
        random = np.random.default_rng(number)
        pixels = np.repeat(random.integers(90, 110, (tagged.SIDE, tagged.SIDE, 1)), 3, 2).astype(np.uint8)
        if number < 4:
            pixels[:4, :4] = tagged.COLOURS["red"]
        else:
            pixels[tagged.SQUARE] = tagged.COLOURS["red"]
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    model = LoadedModel("either", Either().eval(), tagged.make_honest().preprocess, tagged.make_honest().labels)
    made = report(model, folder, tmp_path / "r.html", top=3)
    (finding,) = (finding for finding in made.findings if finding.section == "groups")
    assert finding.alarming
    assert finding.number == "4"
    assert finding.title == "a group: red, top-left"
    assert f"4 of {LEAST + 4} pictures predicted as red" in finding.text
    text = made.path.read_text()
    section = text.split("<section id=groups>")[1].split("</section>")[0]
    assert all(f"{number:02d}.png" in section for number in range(4))
    assert section.count("<figure>") == 8  # four pictures and their maps


def test_few_pictures_have_no_section(world: Path, tmp_path: Path) -> None:
    made = report(tagged.make_cheat(), world / "plain", tmp_path / "r.html", limit=3, top=1)
    assert "<section id=groups>" not in made.path.read_text()
    assert torch.is_grad_enabled()


# ------------------------------------------------------------------------------------------------- alike at one place


@pytest.mark.parametrize("seed", range(3))
def test_three_pictures_of_sixty_are_found(seed: int) -> None:
    found = [cluster for cluster in stand_out(*drawn(3, 60, seed), None, seed) if off_object(cluster)]
    assert [set(cluster.members) for cluster in found] == [{57, 58, 59}]


def test_pictures_are_alike_by_their_pattern_and_not_by_their_brightness() -> None:
    random = np.random.default_rng(0)
    pattern, other = random.uniform(0, 1, (2, 3, 8, 8))
    alike = likeness(np.stack([pattern, 0.5 * pattern + 0.3, other, np.full_like(other, 0.9), 1 - pattern]))
    assert alike[0, 1] == pytest.approx(1)
    assert abs(alike[0, 2]) < 0.3
    assert alike[0, 3] == pytest.approx(0, abs=1e-9)
    assert alike[0, 4] == pytest.approx(-1)


def test_a_place_without_evidence_is_nobodys_likeness() -> None:
    maps, looks = drawn(3, 60, 0)
    maps[57:] = maps[54:57]  # the pattern is there, but the evidence lies elsewhere
    assert not any(set(group) & {57, 58, 59} for group in alike_somewhere(maps, looks))


def test_groups_by_average_linkage_are_those_of_scipy() -> None:
    from scipy.cluster.hierarchy import fcluster, linkage

    random = np.random.default_rng(3)
    patches = np.repeat(random.uniform(0, 1, (4, 3, 4, 4)), (5, 3, 2, 4), axis=0) + random.uniform(
        0, 1.2, (14, 3, 4, 4)
    )
    alike = likeness(patches)
    apart = (1 - alike)[np.triu_indices(14, 1)]
    for least in (0.2, 0.5, 0.8):
        ours = {tuple(group.tolist()) for group in together(alike, least)}
        labels = fcluster(linkage(apart, "average"), 1 - least, "distance")
        assert ours == {tuple(np.flatnonzero(labels == label).tolist()) for label in set(labels)}
        assert 1 < len(ours) <= 14
