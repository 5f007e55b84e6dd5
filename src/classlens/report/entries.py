"""The entries of the page: cards with pictures, and tables. How they look is in templates/."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from classlens.report import choose, words
from classlens.report.choose import Chosen, ClassView, Pair, Usual
from classlens.report.collect import Record
from classlens.report.draw import Drawn
from classlens.report.words import Names, count, percent

_ROWS = 1000  # of the table of all pictures


@dataclass(frozen=True)
class Figure:
    """A picture and its caption, in which something may be bold."""

    jpeg: bytes
    before: str
    bold: str = ""
    after: str = ""

    @property
    def alt(self) -> str:
        """The caption, for those who do not see the picture."""
        return self.before + self.bold + self.after


@dataclass(frozen=True)
class Card:
    """A picture with its map, what the model says of it, and what is to be said about that."""

    figures: tuple[Figure, ...]
    verdict: str
    text: str
    state: str  # right, wrong, or nothing where that is not known
    anchor: str
    tag: str = ""
    flag: bool = False


@dataclass(frozen=True)
class Cards:
    """The cards of a section, and links to pictures that have one further up."""

    cards: tuple[Card, ...]
    above: Mapping[str, str]  # name -> link


@dataclass(frozen=True)
class ClassEntry:
    """The typical and the most surprising picture of a class."""

    index: int
    name: str
    pictures: str
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class PairEntry:
    """Two classes on one picture: the photograph, both maps, and where they differ."""

    title: str
    pictures: str
    figures: tuple[Figure, ...]
    text: str
    anchor: str


class Writer:
    """Makes entries, in the order of the page; a picture is linked to where it stands first."""

    def __init__(self, drawn: Mapping[str, Drawn], names: Names, reference: Usual, locates: bool) -> None:
        self._drawn, self._names, self._reference, self._locates = drawn, names, reference, locates
        self._linked: set[str] = set()

    def objects(self, records: Sequence[Record]) -> Cards:
        """Pictures with the object hidden beside them."""
        return self._cards(records, lambda record: words.object_sentence(record, self._names), self._without)

    def borders(self, records: Sequence[Record]) -> Cards:
        """Pictures with evidence on their border."""
        return self._cards(records, words.border_sentence, lambda record: ())

    def classes(self, views: Sequence[ClassView]) -> list[ClassEntry]:
        """The typical and the most surprising picture of each class."""
        return [self._class(view) for view in views]

    def pairs(self, pairs: Sequence[Pair], labelled: bool) -> list[PairEntry]:
        """Two classes on one picture: the photograph, both maps, and where they differ."""
        return [self._pair(pair, labelled) for pair in pairs]

    def _cards(
        self,
        records: Sequence[Record],
        sentence: Callable[[Record], str],
        third: Callable[[Record], tuple[Figure, ...]],
    ) -> Cards:
        """Cards for the pictures that are not on the page yet, and links to those that are."""
        new = [record for record in records if record.item.name not in self._linked]
        above = {record.item.name: link(record.item.name) for record in records if record not in new}
        cards = [self._card(record, sentence(record), third(record), flag=_flagged(record)) for record in new]
        return Cards(tuple(cards), above)

    def _class(self, view: ClassView) -> ClassEntry:
        cards = [self._card(view.typical, words.sentence(view.typical, self._names), tag="typical")]
        if view.surprising is not None and view.odd is not None:
            text = words.sentence(view.surprising, self._names, view.odd, self._reference)
            tag = "most surprising" if view.odd.unusual else "farthest from usual"
            cards.append(self._card(view.surprising, text, tag=tag, flag=view.odd.unusual))
        pictures = count(len(view.records), "picture")
        return ClassEntry(view.predicted, self._names(view.predicted), pictures, tuple(cards))

    def _pair(self, pair: Pair, labelled: bool) -> PairEntry:
        record, other = pair.records[0], pair.other
        found = self._drawn[record.item.name]
        mine, theirs = self._names(pair.predicted), self._names(other)
        likely = (record.truth_confidence if labelled else record.second_confidence) or 0.0
        first, second = ("said", "true") if labelled else ("first", "second")
        figures = (
            Figure(found.photo, record.item.name),
            Figure(found.map, f"{first}: ", mine, f" {percent(record.confidence)}"),
            Figure(found.others[other], f"{second}: ", theirs, f" {percent(likely)}"),
            Figure(found.differences[other], f"red: more {mine}, blue: more {theirs}"),
        )
        title = f"{theirs} taken for {mine}" if labelled else f"{mine} or {theirs}"
        overlap, leads = found.overlaps.get(other), found.leads[other]
        text = words.pair_sentence(record, other, overlap, leads, self._names, self._locates)
        return PairEntry(title, count(len(pair.records), "picture"), figures, text, self._anchor(record))

    def _card(
        self, record: Record, text: str, third: tuple[Figure, ...] = (), tag: str = "", flag: bool = False
    ) -> Card:
        found = self._drawn[record.item.name]
        figures = (Figure(found.photo, record.item.name), Figure(found.map, _numbers(record)), *third)
        state = {True: "right", False: "wrong", None: ""}[record.right]
        return Card(figures, words.verdict(record, self._names), text, state, self._anchor(record), tag, flag)

    def _without(self, record: Record) -> tuple[Figure, ...]:
        hidden = self._drawn[record.item.name].hidden
        if hidden is None or record.hidden.instead is None:
            return ()
        return (Figure(hidden, "object hidden: ", self._names(record.hidden.instead)),)

    def _anchor(self, record: Record) -> str:
        """An id for the first entry of a picture."""
        if record.item.name in self._linked:
            return ""
        self._linked.add(record.item.name)
        return link(record.item.name)


def _flagged(record: Record) -> bool:
    return choose.is_off_object(record) or choose.is_on_border(record)


def _numbers(record: Record) -> str:
    where = record.where
    parts = [] if where.inside is None else [f"on object {percent(where.inside)}"]
    return " · ".join([*parts, f"border {percent(where.border)}", f"half in {percent(where.half)}"])


def link(name: str) -> str:
    """The id of a picture's first entry."""
    return "picture-" + re.sub(r"\W+", "-", name)


# ------------------------------------------------------------------------------------------------------ tables


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its words, what it is sorted by, and where it leads."""

    text: str
    value: float | str | None
    link: str = ""

    @property
    def sorted_by(self) -> str:
        """For the script that sorts."""
        return "" if self.value is None else str(self.value)


@dataclass(frozen=True)
class Table:
    """A sortable table; words stand left, numbers right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """Each heading, and whether words stand below it."""
        return [(head, isinstance(cell.value, str)) for head, cell in zip(self.headings, self.rows[0], strict=True)]


def _share(value: float | None) -> Cell:
    return Cell("–" if value is None else percent(value), value)


def _number(value: int) -> Cell:
    return Cell(str(value) if value else "–", value)


def class_table(chosen: Chosen, names: Names) -> Table:
    """A row for every class that was predicted."""
    shown = {view.predicted for view in chosen.shown}
    headings = ["class", "pictures", "right", "on object", "border", "half in", "off the object", "on the border"]
    rows = []
    for view in chosen.views:
        group, name = view.records, names(view.predicted)
        known = [record.right for record in group if record.right is not None]
        middle = choose.usual(group).middle
        rows.append([
            Cell(name, name, f"class-{view.predicted}" if view.predicted in shown else ""), _number(len(group)),
            Cell(f"{sum(known)} of {len(known)}", sum(known) / len(known)) if known else Cell("–", None),
            _share(1 - middle["outside"] if "outside" in middle else None), _share(middle["border"]),
            _share(middle["spread"]), _number(sum(choose.is_off_object(r) for r in group)),
            _number(sum(choose.is_on_border(r) for r in group)),
        ])  # fmt: skip
    return Table(headings, rows)


def picture_table(records: Sequence[Record], drawn: set[str], names: Names) -> Table:
    """A row for every picture; those that are drawn are linked."""
    headings = ["picture", "said", "sure", "label", "right", "on object", "object covers", "border", "half in",
                "evidence hidden", "object hidden"]  # fmt: skip
    marks = {True: Cell("✓", 1), False: Cell("✗", 0), None: Cell("–", None)}
    rows = []
    for record in records[:_ROWS]:
        name, said, where = record.item.name, names(record.predicted), record.where
        label = record.truth.label or "–"
        rows.append([
            Cell(name, name, link(name) if name in drawn else ""), Cell(said, said), _share(record.confidence),
            Cell(label, label), marks[record.right], _share(where.inside), _share(where.area), _share(where.border),
            _share(where.half), _share(record.hidden.evidence), _share(record.hidden.object),
        ])  # fmt: skip
    return Table(headings, rows, f"The first {_ROWS} of {len(records)}." if len(records) > _ROWS else "")


def instead_table(records: Sequence[Record], names: Names) -> Table | None:
    """A row for every label that matches no class of the model."""
    rows = []
    for label, total, said in choose.instead(records):
        listed = ", ".join(f"{names(index)} {times}" for index, times in said.most_common(4))
        rows.append([Cell(label, label), _number(total), Cell(listed, listed)])
    return Table(["label", "pictures", "said"], rows) if rows else None
