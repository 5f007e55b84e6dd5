"""Pictures say what the maps say: signs, zero, places, and files that are whole."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from classlens import render
from classlens.core.targets import Contrast
from classlens.errors import MethodError
from classlens.explanation import Explanation, Report
from classlens.methods import UNRELIABLE, LayerTrace

LABELS = ("tabby", "espresso", "$100 bill", "crane", "crane")


def explanation(maps: torch.Tensor, targets: list[list[int]], *, signed: bool = True, **extra: object) -> Explanation:
    rows, classes, height, width = maps.shape
    nothing = torch.full((rows, classes), math.nan, dtype=torch.float64)
    report = Report(nothing, nothing, nothing, nothing, ops={"conv2d": 3}, seconds=1.5, notes=("a note",))
    return Explanation(
        maps=maps,
        targets=torch.tensor(targets),
        logits=torch.zeros(rows, len(LABELS)),
        pictures=torch.rand(rows, 3, height, width, generator=torch.Generator().manual_seed(0)),
        labels=LABELS,
        method="agf",
        signed=signed,
        report=report,
        model="toy",
        **extra,  # type: ignore[arg-type]
    )


def random_maps(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------------ colours


def test_zero_is_white_in_a_heatmap_whatever_the_range() -> None:
    assert render.heatmap(np.array([[-1.0, 0.0, 100.0]]))[0, 1].tolist() == [255, 255, 255]
    assert (render.heatmap(np.zeros((4, 5))) == 255).all()


def test_positive_is_red_and_negative_is_blue() -> None:
    against, _, for_it = render.heatmap(np.array([[-2.0, 0.0, 2.0]]))[0].astype(int)
    assert for_it[0] > for_it[2] + 100
    assert against[2] > against[0] + 100


def test_the_scale_is_symmetric() -> None:
    """Half the evidence is half as strong on either side, even when one side is never reached."""
    one_sided = render.heatmap(np.array([[-0.5, 1.0]]))
    both = render.heatmap(np.array([[-0.5, 1.0], [-1.0, 0.5]]))
    np.testing.assert_array_equal(one_sided[0], both[0])


def test_a_few_outliers_do_not_darken_the_rest() -> None:
    evidence = np.ones((100, 100))
    calm = render.heatmap(evidence)[50, 50].tolist()
    evidence[0, 0] = 1e6
    assert render.heatmap(evidence)[50, 50].tolist() == calm


def test_a_single_place_is_seen_though_the_percentile_is_zero() -> None:
    evidence = np.zeros((100, 100))
    evidence[3, 4] = 1e-9
    shown = render.heatmap(evidence)
    assert shown[3, 4].tolist() != [255, 255, 255]
    assert (shown != 255).any(2).sum() == 1


def test_the_size_of_a_map_does_not_change_its_picture() -> None:
    evidence = random_maps(8, 8)
    np.testing.assert_array_equal(render.heatmap(evidence), render.heatmap(evidence * 1e-6))


def test_unsigned_maps_run_from_dark_to_bright() -> None:
    dark, middle, bright = render.heatmap(np.array([[0.0, 0.5, 1.0]]), signed=False)[0].astype(int).sum(1)
    assert dark < middle < bright


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("draw", [render.heatmap, render.where, render.shares])
def test_a_map_that_is_not_finite_is_an_error(draw: object, bad: float) -> None:
    with pytest.raises(MethodError, match="NaN or infinite"):
        draw(torch.tensor([[1.0, bad]]))  # type: ignore[operator]


def test_bfloat16_maps_are_drawn() -> None:
    evidence = torch.tensor([[-1.0, 0.0, 1.0]])
    np.testing.assert_array_equal(render.heatmap(evidence.bfloat16()), render.heatmap(evidence))


# ----------------------------------------------------------------------------------------------- overlays


def grey(picture: torch.Tensor) -> np.ndarray:
    red, green, blue = picture.double().numpy()
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    return (luminance[..., None].repeat(3, 2) * 255).round()


@pytest.mark.parametrize("signed", [True, False])
def test_without_evidence_the_overlay_is_the_grey_photograph(signed: bool) -> None:
    picture = torch.rand(3, 6, 7, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(render.overlay(picture, torch.zeros(6, 7), signed), grey(picture))


def test_colour_appears_only_where_there_is_evidence() -> None:
    picture = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    evidence = torch.zeros(4, 4)
    evidence[0, 0], evidence[3, 3] = 1.0, -1.0
    shown = render.overlay(picture, evidence).astype(int)
    coloured = np.ptp(shown, axis=2) > 0
    assert coloured.sum() == 2
    assert shown[0, 0, 0] > shown[0, 0, 2]
    assert shown[3, 3, 2] > shown[3, 3, 0]


def test_more_evidence_hides_more_of_the_photograph() -> None:
    evidence = torch.linspace(0, 1, 5)[None, :]
    dark, bright = (render.overlay(torch.full((3, 1, 5), v), evidence).astype(int) for v in (0.0, 1.0))
    photograph = (bright - dark).sum(2)[0]
    assert photograph[0] == 3 * 255
    assert (np.diff(photograph) < 0).all()
    assert photograph[-1] == pytest.approx(3 * 255 * 0.2, abs=3)  # opacity 0.8: the photograph never disappears


# -------------------------------------------------------------------------------------------------- where


def test_cells_hold_their_share_of_the_positive_evidence() -> None:
    evidence = torch.zeros(9, 9)
    evidence[0, 0], evidence[4, 4], evidence[8, 1], evidence[1, 8] = 5.0, 3.0, 2.0, -10.0
    cells, against = render.shares(evidence)
    assert cells["top-left"] == pytest.approx(0.5)
    assert cells["centre"] == pytest.approx(0.3)
    assert cells["bottom-left"] == pytest.approx(0.2)
    assert cells["top-right"] == 0.0
    assert sum(cells.values()) == pytest.approx(1.0)
    assert against == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (np.zeros((5, 5)), "no evidence for the class"),
        (-np.ones((5, 5)), "no evidence for the class; all of it is against"),
        (np.diag([1.0, 0, 0]), "top half 100 %, mostly top-left (100 %); 0 % of all evidence is against"),
        (np.diag([3.0, 0, -1]), "top half 100 %, mostly top-left (100 %); 25 % of all evidence is against"),
        (np.diag([7.0, 2, 1]), "top half 80 %, mostly top-left (70 %); 0 % of all evidence is against"),
        (np.array([[0, 0, 2.0], [0, 0, 5], [0, 1, 2]]), "right half 95 %, mostly centre-right (50 %); 0 % of all"),
        (np.diag([1.0, 2, 1]), "mostly centre (50 %); 0 % of all evidence is against"),
        (np.ones((9, 9)), "spread out, strongest in top-left (11 %)"),
        (np.diag([1.0, 0, -0.001]), "top half 100 %, mostly top-left (100 %); <1 % of all evidence is against"),
    ],
)
def test_where_says_it_in_words(evidence: np.ndarray, text: str) -> None:
    assert render.where(evidence).startswith(text)


def test_where_says_nothing_about_signs_to_methods_that_have_none() -> None:
    assert render.where(np.diag([1.0, 0, 0]), signed=False) == "top half 100 %, mostly top-left (100 %)"


def test_a_picture_smaller_than_the_grid_still_has_places() -> None:
    cells, _ = render.shares(torch.tensor([[1.0, 3.0]]))
    assert {name: share for name, share in cells.items() if share} == {"top-left": 0.25, "top-centre": 0.75}


# ------------------------------------------------------------------------------------------------ figures


def titles(figure: object) -> list[tuple[str, str]]:
    return [(a.get_title("left"), a.get_title("right")) for a in figure.axes if a.get_title("left")]  # type: ignore[attr-defined]


def test_the_figure_names_each_class_with_its_probability() -> None:
    figure = render.figure(explanation(random_maps(2, 2, 6, 8), [[0, 1], [2, 3]]))
    assert titles(figure) == [
        ("picture", ""), ("tabby", "20.0 %"), ("espresso", "20.0 %"),
        ("picture", ""), ("$100 bill", "20.0 %"), ("crane", "20.0 %"),
    ]  # fmt: skip


def test_the_figure_shows_photograph_and_overlays() -> None:
    shown = explanation(random_maps(1, 2, 6, 8), [[0, 1]])
    axes = render.figure(shown).axes
    photograph = (shown.pictures[0].permute(1, 2, 0).double().numpy() * 255).round()
    np.testing.assert_array_equal(axes[0].images[0].get_array(), photograph)
    np.testing.assert_array_equal(axes[2].images[0].get_array(), render.overlay(shown.pictures[0], shown.maps[0, 1]))


@pytest.mark.parametrize(("signed", "ends"), [(True, {"against", "for"}), (False, {"none", "for"})])
def test_the_colour_bar_says_what_the_colours_mean(signed: bool, ends: set[str]) -> None:
    figure = render.figure(explanation(random_maps(1, 1, 6, 8).abs(), [[0]], signed=signed))
    assert ends <= {text.get_text() for text in figure.texts}


def contrast(rivals: tuple[int, ...] | None, rows: int = 1) -> Explanation:
    shown = explanation(random_maps(rows, 2, 6, 8), [[0, 3]] * rows)
    asked = ((Contrast(0, rivals), Contrast(3, rivals)),) * rows
    return replace(shown, asked=asked, logits=torch.tensor([[0.0, 2.0, 1.0, 0.0, 0.0]] * rows))


def words(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.findobj(Text)}


def test_figures_warn_of_unreliable_maps() -> None:
    sound = explanation(random_maps(1, 1, 6, 8), [[0]])
    poor = replace(sound, report=replace(sound.report, notes=("a note", f"12% is unaccounted for; {UNRELIABLE}")))
    assert poor.report.warnings == poor.report.notes[1:]
    assert "agf  ·  toy" in words(render.figure(sound))
    assert "agf  ·  toy  ·  unreliable: see the notes" in words(render.figure(poor))
    assert titles(render.comparison({"a": sound, "b": poor}))[1:] == [
        ("a", "1.5 s"),
        ("b", "unreliable: see the notes"),
    ]


def test_the_figure_says_which_question_was_asked() -> None:
    assert "evidence for the class" in words(render.figure(explanation(random_maps(1, 1, 6, 8), [[0]])))
    chance = f"{100 * float(torch.tensor([0.0, 2.0, 1.0, 0.0, 0.0]).softmax(0)[1]):.1f} %"
    figure = render.figure(contrast((1,)))
    assert {"evidence for the class rather than espresso", f"rather than espresso ({chance})"} <= words(figure)
    assert {"for rivals", "for it"} <= words(figure)
    assert titles(figure)[1][0] == "tabby"
    figure = render.figure(contrast(None))
    assert {"rather than its rivals", f"(most likely: espresso, {chance})"} <= words(figure)
    compared = render.comparison({"agf": contrast((1, 2))})
    assert "evidence for the class rather than espresso or $100 bill" in words(compared)
    assert f"(most likely: espresso, {chance})" in words(compared)


def test_headings_with_rivals_stay_clear_of_panels_and_of_each_other() -> None:
    """Lines below a heading lie under it and over the picture, on every row of panels."""
    figure = render.figure(contrast(None, rows=2))
    figure.canvas.draw()
    for axes in figure.axes[1:3] + figure.axes[4:6]:
        boxes = sorted((t.get_window_extent() for t in axes.texts), key=lambda box: box.y0)
        title = axes.title if axes.get_title() else axes._left_title  # type: ignore[attr-defined]
        boxes.append(title.get_window_extent())
        assert boxes[0].y0 >= axes.get_window_extent().y1
        assert all(low.y1 <= high.y0 + 2 for low, high in itertools.pairwise(boxes))
    above, below = figure.axes[1], figure.axes[4]
    assert below._left_title.get_window_extent().y1 <= above.get_window_extent().y0  # type: ignore[attr-defined]


def test_the_report_and_the_summary_say_what_was_asked(tmp_path: Path) -> None:
    shown = contrast((1,))
    render.save(shown, tmp_path)
    entry = json.loads((tmp_path / "report.json").read_text())["images"][0]["classes"][0]
    assert (entry["name"], entry["question"]) == ("tabby", "evidence for tabby rather than espresso")
    assert (entry["rival"]["name"], entry["rival"]["index"]) == ("espresso", 1)
    assert entry["rival"]["probability"] == pytest.approx(float(shown.logits[0].softmax(0)[1]))
    assert (tmp_path / "0-0-tabby-rather-than-espresso.png").exists()
    with np.load(tmp_path / "maps.npz") as saved:
        assert saved["names"].tolist() == [["tabby rather than espresso", "crane rather than espresso"]]
    assert "rather than espresso (" in render.summary(shown).splitlines()[0]
    assert render.summary(shown).splitlines()[0].endswith(" % of all evidence is for its rivals")
    plain = render.describe(explanation(random_maps(1, 1, 6, 8), [[1]]))[0]
    assert (plain["question"], plain["rival"]) == ("evidence for espresso", None)


@pytest.mark.parametrize(
    ("arrived", "absorbed", "text"),
    [
        (
            [0.5, 0.5],
            [0.5, 0.5],
            "relevance: 50 % reached the picture, the rest stayed in biases; 0.1 % is unaccounted for",
        ),
        (
            [1e-4, 2e-4],
            [0.9999, 0.9998],
            "relevance: 0.01 % to 0.02 % reached the picture, the rest stayed in biases; ",
        ),
        ([1.0, 1.0], [0.0, 0.0], "relevance: all of it reached the picture; 0.1 % is unaccounted for"),
        ([-0.5, 1.0], [0.5, 1.0], "relevance: 0.1 % is unaccounted for"),  # no shares of a whole
    ],
)
def test_how_much_arrived_in_words(arrived: list[float], absorbed: list[float], text: str) -> None:
    numbers = (torch.tensor([values]).double() for values in ([0.001, 0.0], [1.0, 1.0], arrived, absorbed))
    report = Report(*numbers, ops={}, seconds=1.0)
    shown = replace(explanation(random_maps(1, 2, 6, 8), [[0, 1]]), report=report)
    assert render.arrival_text(shown).startswith(text)
    assert render.arrival_text(explanation(random_maps(1, 1, 6, 8), [[0]])) == ""


def test_long_names_are_cut() -> None:
    shown = explanation(random_maps(1, 1, 4, 4), [[0]])
    object.__setattr__(shown, "labels", ("a_name_without_any_space_that_never_ends", *LABELS[1:]))
    assert titles(render.figure(shown))[1][0] == "a_name_without_any_space_t…"


def test_a_figure_too_long_for_matplotlib_is_drawn_smaller_not_refused() -> None:
    figure = render.figure(explanation(random_maps(1, 1, 400, 2), [[0]]))
    width, height = figure.get_size_inches() * figure.dpi
    assert 50_000 < height < 2**16
    assert width < 1_000


@pytest.mark.parametrize(
    ("probability", "text"), [(0.1423, "14.2 %"), (1.0, "100.0 %"), (0.0004, "<0.1 %"), (0.0, "<0.1 %")]
)
def test_probabilities_read_well(probability: float, text: str) -> None:
    assert render.probability_text(probability) == text


# ----------------------------------------------------------------------------------------- decomposition


def traced(names: list[str]) -> Explanation:
    def layer(name: str, edge: int) -> LayerTrace:
        channels = {"C": 3, "A": 3, "F_x": 1, "F_dx": 1, "M": 1, "Phi": 3}
        return LayerTrace(name, "conv2d", {term: random_maps(2, 1, c, edge, edge) for term, c in channels.items()})

    flat = LayerTrace("classifier", "linear", {"C": random_maps(2, 1, 9), "Phi": random_maps(2, 1, 9)})
    trace = (flat, *(layer(name, 2 + i) for i, name in enumerate(names)))
    return explanation(random_maps(1, 2, 6, 6), [[0, 1]], trace=trace)


def test_the_decomposition_draws_each_term_summed_over_channels() -> None:
    shown = traced(["deep", "shallow"])
    figure = render.decomposition(shown, k=1)
    assert [name for name, _ in titles(figure)] == ["C", "A", "F(x)", "F(∇x)", "M", "Φ"]
    assert [a.get_ylabel() for a in figure.axes if a.get_ylabel()] == ["deep\n2×2", "shallow\n3×3"]
    expected = render.heatmap(shown.trace[1].terms["A"][1, 0].sum(0))
    np.testing.assert_array_equal(figure.axes[1].images[0].get_array(), expected)


def test_a_rule_without_a_is_drawn_without_it() -> None:
    shown = traced(["deep", "shallow"])
    for layer in shown.trace:
        layer.terms.pop("A", None)
    assert [name for name, _ in titles(render.decomposition(shown))] == ["C", "F(x)", "F(∇x)", "M", "Φ"]


def test_layers_are_picked_evenly_or_by_name() -> None:
    shown = traced([f"layer{i}" for i in range(9)])

    def names(layers: object) -> list[str]:
        axes = render.decomposition(shown, layers=layers).axes  # type: ignore[arg-type]
        return [a.get_ylabel().split("\n")[0] for a in axes if a.get_ylabel()]

    assert names(3) == ["layer0", "layer4", "layer8"]
    assert names(["layer7", "layer2"]) == ["layer7", "layer2"]
    assert len(names(100)) == 9


def test_what_cannot_be_decomposed_is_an_error() -> None:
    with pytest.raises(MethodError, match="trace=True"):
        render.decomposition(explanation(random_maps(1, 1, 4, 4), [[0]]))
    with pytest.raises(MethodError, match=r"'classifier'.*choose from deep"):
        render.decomposition(traced(["deep"]), layers=["classifier"])


# -------------------------------------------------------------------------------------------------- files


def test_save_writes_everything_and_the_report_last(tmp_path: Path) -> None:
    shown = explanation(random_maps(2, 2, 6, 8), [[0, 1], [3, 4]])
    paths = render.save(shown, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [
        "0-0-tabby.png", "0-1-espresso.png", "1-3-crane.png", "1-4-crane.png", "figure.png", "maps.npz", "report.json",
    ]  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == sorted(path.name for path in paths)
    with Image.open(paths[1]) as overlay:
        np.testing.assert_array_equal(overlay, render.overlay(shown.pictures[0], shown.maps[0, 1]))


def test_maps_are_saved_raw(tmp_path: Path) -> None:
    shown = explanation(1e-8 * random_maps(1, 2, 6, 8), [[0, 1]])
    render.save(shown, tmp_path)
    with np.load(tmp_path / "maps.npz") as saved:
        np.testing.assert_array_equal(saved["maps"], shown.maps.numpy())
        np.testing.assert_array_equal(saved["targets"], shown.targets.numpy())
        np.testing.assert_array_equal(saved["logits"], shown.logits.numpy())
        assert saved["names"].tolist() == [["tabby", "espresso"]]


def test_the_report_is_strict_json_and_complete(tmp_path: Path) -> None:
    evidence = torch.zeros(1, 1, 3, 3)
    evidence[0, 0, 0, 0] = 1.0
    render.save(explanation(evidence, [[1]]), tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["versions"]) == {"classlens", "torch"}
    assert (report["model"], report["method"]) == ("toy", "agf")
    (entry,) = report["images"][0]["classes"]
    assert (entry["name"], entry["index"], entry["probability"]) == ("espresso", 1, pytest.approx(0.2))
    assert entry["where"] == "top half 100 %, mostly top-left (100 %); 0 % of all evidence is against"
    assert report["report"]["conservation"] == [[None]]
    assert report["report"]["notes"] == ["a note"]


def test_the_same_explanation_gives_the_same_bytes(tmp_path: Path) -> None:
    shown = explanation(random_maps(1, 1, 6, 8), [[0]])
    first, second = render.save(shown, tmp_path / "a"), render.save(shown, tmp_path / "b")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figure.png"
    render.write_png(path, np.zeros((2, 2, 3), np.uint8))
    before = path.read_bytes()
    original = Path.write_bytes

    def interrupted(self: Path, content: bytes) -> int:
        original(self, content[: len(content) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render.write_png(path, np.ones((2, 2, 3), np.uint8))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["figure.png"]


def test_a_failed_save_leaves_no_report(tmp_path: Path) -> None:
    maps = random_maps(1, 2, 6, 8)
    maps[0, 1, 0, 0] = math.nan
    with pytest.raises(MethodError):
        render.save(explanation(maps, [[0, 1]]), tmp_path)
    assert not (tmp_path / "report.json").exists()


def test_figures_do_not_touch_the_state_of_pyplot() -> None:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    render.figure(explanation(random_maps(1, 1, 4, 4), [[0]])).savefig(buffer)
    assert pyplot.get_fignums() == []


def test_the_summary_has_a_line_for_each_class() -> None:
    lines = render.summary(explanation(torch.zeros(1, 2, 3, 3), [[0, 1]])).splitlines()
    assert lines == [
        "  tabby (0)     20.0 %  no evidence for the class",
        "  espresso (1)  20.0 %  no evidence for the class",
    ]
