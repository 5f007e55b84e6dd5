"""The page of a diff: one self-contained HTML file. Its text is in templates/, its look is that of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from classlens.diff import words
from classlens.diff.collect import Both, Collected, Row
from classlens.diff.draw import Drawn, Key, crop, key, marked
from classlens.diff.measures import COUNTED, MEASURES, estimated
from classlens.diff.places import Place
from classlens.evaluate.stats import Estimate
from classlens.render.html import pages
from classlens.report.entries import Card, Cell, Figure, Table, link
from classlens.report.page import problems
from classlens.report.words import Finding, count, percent

CROPS = 6  # examples of a place
_ROWS = 1000  # of the table of all pictures


@dataclass(frozen=True)
class About:
    """Facts about the run."""

    names: tuple[str, str]
    data: str
    facts: dict[str, str]  # for the header
    made: dict[str, str]  # for the foot
    notes: tuple[str, ...]
    legend: bytes
    signed: bool


@dataclass(frozen=True)
class PlaceEntry:
    """A place: the strongest picture, what it is, and six examples."""

    title: str
    pictures: str
    figures: tuple[Figure, ...]
    text: str
    crops: tuple[Figure, ...]
    flag: bool


def page(
    about: About, both: Both, collected: Collected, found: Mapping[str, Estimate], places: Sequence[Place],
    most: Sequence[Row], drawn: Mapping[Key, Drawn], findings: Sequence[Finding], checked: Sequence[tuple[str, bool]],
) -> str:  # fmt: skip
    """The HTML of the page."""
    sections = {
        **({"places": "Where evidence gathered or vanished"} if places else {}),
        "measures": "What changed",
        "classes": "Classes",
        "moved": "Where most moved",
        "pictures": "All pictures",
        "made": "How this was made",
    }
    text = pages("diff", "report").get_template("diff.html").render(
        about=about, findings=findings, sections=sections, checked=checked,
        places=[place_entry(both, place, drawn, about.names) for place in places],
        measure_table=measure_table(found, places), class_table=class_table(collected.rows),
        moved=[card(row, drawn[key(row)], about.names) for row in most],
        picture_table=picture_table(collected.rows, {key(row) for row in most}),
        only=[(name, _listed(classes)) for name, classes in zip(
            about.names, (both.shared.only_a, both.shared.only_b), strict=True) if classes],
        skipped=problems(collected.skipped), without_mask=problems(collected.without_mask),
    )  # fmt: skip
    return text + "\n"


def place_entry(both: Both, place: Place, drawn: Mapping[Key, Drawn], names: tuple[str, str]) -> PlaceEntry:
    """The strongest picture of a place with both maps, and the place in six pictures."""
    first = place.rows[0]
    strongest = drawn[key(first)]
    figures = (
        Figure(marked(both, first, place), first.item.name),
        Figure(strongest.before, f"{names[0]}: {place.name} ", percent(first.a.probability)),
        Figure(strongest.after, f"{names[1]}: {place.name} ", percent(first.b.probability)),
        Figure(strongest.difference, f"red: more by {names[1]}, blue: more by {names[0]}"),
    )
    crops = tuple(Figure(crop(both, row, place), row.item.name) for row in place.rows[:CROPS])
    pictures = count(len(place.rows), "picture")
    text = words.place_sentence(place, names)
    return PlaceEntry(words.place_title(place), pictures, figures, text, crops, place.shortcut and place.appeared)


def card(row: Row, drawn: Drawn, names: tuple[str, str]) -> Card:
    """A picture in which much evidence moved."""
    figures = (
        Figure(drawn.photo, row.item.name),
        Figure(drawn.before, f"{names[0]}: ", percent(row.a.probability)),
        Figure(drawn.after, f"{names[1]}: ", percent(row.b.probability)),
        Figure(drawn.difference, f"red: more by {names[1]}"),
    )
    state = "" if row.right is None else "right" if row.right[1] else "wrong"
    return Card(figures, words.row_verdict(row, names), words.row_sentence(row), state, _anchor(row))


def _anchor(row: Row) -> str:
    return link(f"{row.item.name}-{row.name}")


# -------------------------------------------------------------------------------------------------------- tables


def measure_table(found: Mapping[str, Estimate], places: Sequence[Place]) -> Table:
    """Every measure with its interval, by the names that --fail-if takes."""
    rows = [
        [Cell(name, name), Cell(one.words, one.words), Cell(words.measure_text(name, found[name]), found[name].value),
         Cell(str(found[name].n), found[name].n)]
        for name, one in MEASURES.items() if found[name].n
    ]  # fmt: skip
    numbers = counted(places)
    rows += [
        [Cell(name, name), Cell(text, text), Cell(str(numbers[name]), numbers[name]), Cell("–", None)]
        for name, text in COUNTED.items()
    ]
    return Table(["measure", "meaning", "value (95 % interval)", "n"], rows)


def counted(places: Sequence[Place]) -> dict[str, int]:
    """How many classes have a shortcut that appeared, and one that went."""
    return {
        "appeared": len({place.name for place in places if place.shortcut and place.appeared}),
        "gone": len({place.name for place in places if place.shortcut and not place.appeared}),
    }


def class_table(rows: Sequence[Row]) -> Table:
    """A row for every class in question, those whose evidence moved most first."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.name].append(row)
    shown = ("moved", "correlation", "border", "off_object", "probability")
    made = []
    for name, group in groups.items():
        values = {m: estimated(group, MEASURES[m].value) for m in shown}
        cells = [Cell(words.measure_text(m, values[m]), values[m].value if values[m].n else None) for m in shown]
        made.append([Cell(name, name), Cell(str(len(group)), len(group)), *cells])
    made.sort(key=lambda cells: -float(cells[2].value or 0))
    return Table(["class", "pictures", "moved", "correlation", "border", "off object", "probability"], made)


def picture_table(rows: Sequence[Row], drawn: set[Key]) -> Table:
    """A row for every class of every picture."""
    made = []
    for row in rows[:_ROWS]:
        cells = [Cell(row.item.name, row.item.name, _anchor(row) if key(row) in drawn else "")]
        cells += [Cell(said, said) for said in (row.name, *row.predicted)]
        pairs = [(row.a.probability, row.b.probability), (row.a.border, row.b.border), (row.a.inside, row.b.inside)]
        cells.append(Cell(percent(row.moved), row.moved))
        for one, other in pairs:
            known = one is not None and other is not None
            text = f"{percent(one)} → {percent(other)}" if one is not None and other is not None else "–"
            cells.append(Cell(text, (other or 0.0) - (one or 0.0) if known else None))
        made.append(cells)
    headings = ["picture", "class", "A says", "B says", "moved", "probability", "border", "on object"]
    return Table(headings, made, f"The first {_ROWS} of {len(rows)}." if len(rows) > _ROWS else "")


def _listed(classes: Sequence[str], most: int = 12) -> str:
    more = f" and {len(classes) - most} more" if len(classes) > most else ""
    return ", ".join(classes[:most]) + more
