from __future__ import annotations

from pathlib import Path

from classlens.data.layouts import Item
from classlens.report import choose, words
from classlens.report.collect import Hidden, Record, Where
from classlens.report.truth import Truth

NAMES = ("cat", "dog", "boat").__getitem__


def record(
    name: str,
    predicted: int = 0,
    confidence: float = 0.9,
    truth: int | None = None,
    inside: float | None = None,
    border: float = 0.1,
    half: float = 0.13,
    label: str | None = None,
    hidden: Hidden = Hidden(0.1, 0.8),  # noqa: B008 - frozen
    second: tuple[int, float] = (2, 0.05),
) -> Record:
    return Record(
        item=Item(name, Path(name)),
        predicted=predicted,
        confidence=confidence,
        second=second[0],
        second_confidence=second[1],
        truth=Truth(label, () if truth is None else (truth,)),
        truth_confidence=None if truth is None else 0.05,
        true_class=truth,
        where=Where(border, 0.36, half, 0.3, inside, None if inside is None else 0.4),
        hidden=hidden,
    )


def test_the_typical_one_is_right_sure_and_in_the_middle() -> None:
    group = [
        record("wrong", truth=1, inside=0.9),
        record("unsure", truth=0, inside=0.9, confidence=0.3),
        record("middle", truth=0, inside=0.88),
        record("far", truth=0, inside=0.5),
    ]
    assert choose.typical(group).item.name == "middle"
    assert choose.typical(group[:1]).item.name == "wrong"  # better than none


def test_the_surprising_one_is_sure_although_its_evidence_lies_elsewhere() -> None:
    group = [record(f"usual{i}", inside=0.9) for i in range(8)]
    group += [record("off", inside=0.3), record("unsure", inside=0.0, confidence=0.4)]
    group += [record("border", inside=0.9, border=0.6), record("spread", inside=0.9, half=0.4)]
    reference = choose.usual(group)
    found = choose.surprising(group, reference)
    assert found is not None
    assert found[0].item.name == "off"
    assert (found[1].measure, found[1].flagged) == ("outside", True)
    rest = [r for r in group if r.item.name not in ("off", "border")]
    found = choose.surprising(rest, reference)
    assert found is not None
    assert (found[0].item.name, found[1].measure, found[1].unusual) == ("spread", "spread", True)
    assert choose.surprising([record("unsure", confidence=0.4)], reference) is None


def test_nothing_is_unusual_where_all_are_alike() -> None:
    group = [record(str(i), inside=0.9 + 0.001 * i) for i in range(9)]
    reference = choose.usual(group)
    found = choose.surprising(group, reference)
    assert found is not None
    assert not found[1].unusual
    assert "Nothing unusual: 90 % of the evidence lies on the object" in words.sentence(
        found[0], NAMES, found[1], reference
    )


def test_more_on_the_object_than_usual_is_never_odd() -> None:
    reference = choose.usual([record(str(i), inside=0.5, border=0.3) for i in range(5)])
    assert choose.oddness(record("good", inside=1.0, border=0.0).where, reference).deviations <= 0


def test_a_class_view_shows_two_pictures() -> None:
    group = [record("a", 0, inside=0.9), record("b", 0, inside=0.2), record("c", 1, inside=0.9)]
    first, second = choose.class_views(group, choose.usual(group))
    assert (first.predicted, len(first.records)) == (0, 2)
    assert first.surprising is not None
    assert {first.typical.item.name, first.surprising.item.name} == {"a", "b"}
    assert (second.predicted, second.surprising) == (1, None)  # one picture is typical, and no surprise


def test_confusions_count_by_pair() -> None:
    group = [
        record("a", 1, 0.6, truth=0), record("b", 1, 0.8, truth=0), record("c", 2, 0.9, truth=0), record("d", truth=0),
        record("e", 1, label="whale"),
    ]  # fmt: skip
    pairs = choose.confusions(group)
    assert [(p.predicted, p.other, [r.item.name for r in p.records]) for p in pairs] == [
        (1, 0, ["b", "a"]),
        (2, 0, ["c"]),
    ]
    assert [(label, total, dict(said)) for label, total, said in choose.instead(group)] == [("whale", 1, {1: 1})]


def test_without_labels_the_runner_up_stands_in() -> None:
    group = [record("sure"), record("torn", 0, 0.4, second=(1, 0.3)), record("fair", 0, 0.6, second=(1, 0.3))]
    assert [(p.predicted, p.other, len(p.records)) for p in choose.undecided(group)] == [(0, 1, 1)]
    chosen = choose.choose_all(group, 5)
    assert not chosen.labelled
    assert chosen.wanted()["torn"][1] == [1]


def test_sections_hold_flagged_pictures_or_a_few() -> None:
    good = [record(f"good{i}", inside=0.9) for i in range(6)]
    assert len(choose.choose_all(good, 12).off_object) == 3
    off = [record(f"off{i}", inside=0.1 * i) for i in range(4)]
    chosen = choose.choose_all(good + off, 3)
    assert [r.item.name for r in chosen.off_object] == ["off0", "off1", "off2"]
    assert choose.choose_all([record("a")], 3).off_object == []  # no mask


def test_the_summary_counts() -> None:
    group = [record(f"good{i}", 1, truth=1, inside=0.9) for i in range(7)]
    still = Hidden(0.1, 0.8, 0.7, 0)
    group += [record(f"off{i}", 0, 0.4 + 0.2 * i, truth=1, inside=0.2, hidden=still) for i in range(2)]
    group += [record("odd", 2, truth=None, label="whale", inside=0.1, border=0.8)]
    found = {finding.title: finding for finding in words.findings(group, NAMES)}
    assert found["right"].text.startswith("The model is right on 7 of 9 pictures with a label that it knows.")
    assert "dog called cat, 2 times" in found["right"].text
    assert found["off the object"].text == (
        "For 3 of 10 pictures more than half of the evidence lies outside of the object, most often called cat (2). "
        "The model is sure of itself (50 % or more) in 2 of them."
    )
    assert found["known by the surroundings"].text.startswith(
        "With the object hidden the model still says the same of 2 of 2 pictures, all of them called cat"
    )
    assert found["on the border"].number == "1"
    assert found["on the object"].number == "90 %"
    assert found["outside of its classes"].text == "1 picture of 1 label that match no class of the model."
    assert "The maps show what the model uses." in found["with the evidence hidden"].text


def test_maps_that_do_not_matter_to_the_model_are_said_to() -> None:
    group = [record(str(i), hidden=Hidden(0.7, 0.7)) for i in range(3)]
    trust = words.findings(group, NAMES)[-1]
    assert trust.alarming
    assert trust.text.endswith("Read these maps with caution.")


def test_what_two_maps_say_of_one_picture() -> None:
    wrong = record("a", 0, truth=1)
    assert words.pair_sentence(wrong, 1, 0.9, ("top", "bottom"), NAMES) == (
        "90 % of the evidence for the two lies in the same places: both classes are found on the same thing. "
        "Of the two, cat leads in the top, dog in the bottom."
    )
    assert words.pair_sentence(wrong, 1, 0.1, ("top", "top"), NAMES) == (
        "Only 10 % of the evidence for the two lies in the same places: the classes are found on different things."
    )
    for overlap in (0.1, 0.9):  # from a contrast, or from maps that are the same for every class, nothing follows
        assert words.pair_sentence(wrong, 1, overlap, ("top", "top"), NAMES, locates=False) == (
            f"{words.percent(overlap)} of the evidence for the two lies in the same places."
        )
    assert words.pair_sentence(wrong, 1, None, ("", ""), NAMES) == "There is no evidence for dog in this picture."


def test_percentages_never_round_to_nothing_or_all() -> None:
    assert [words.percent(x) for x in (0, 0.001, 0.5, 0.996, 1)] == ["0 %", "<1 %", "50 %", ">99 %", "100 %"]
