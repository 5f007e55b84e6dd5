"""The entries of the page as HTML: cards with pictures, and tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape

from classlens.evaluate.embed import data_uri
from classlens.report import choose, words
from classlens.report.choose import Chosen, ClassView, Pair, Usual
from classlens.report.collect import Record
from classlens.report.draw import Drawn
from classlens.report.words import Names, count, percent

_ROWS = 1000  # of the table of all pictures

Cell = tuple[str, float | str | None]  # its HTML, and what it is sorted by


class Writer:
    """Writes cards; each picture can be linked to where it stands first."""

    def __init__(self, drawn: Mapping[str, Drawn], names: Names, reference: Usual) -> None:
        self._drawn, self._names, self._reference = drawn, names, reference
        self._linked: set[str] = set()

    def objects(self, records: Sequence[Record]) -> str:
        """Pictures with the object hidden beside them."""
        return self._cards(records, lambda record: words.object_sentence(record, self._names), self._without)

    def borders(self, records: Sequence[Record]) -> str:
        """Pictures with evidence on their border."""
        return self._cards(records, words.border_sentence, lambda record: "")

    def classes(self, views: Sequence[ClassView]) -> str:
        """The typical and the most surprising picture of each class."""
        return "".join(self._class(view) for view in views)

    def pairs(self, pairs: Sequence[Pair], labelled: bool) -> str:
        """Two classes on one picture: the photograph, both maps, and where they differ."""
        return "".join(self._pair(pair, labelled) for pair in pairs)

    def _cards(
        self, records: Sequence[Record], sentence: Callable[[Record], str], third: Callable[[Record], str]
    ) -> str:
        """Cards for the pictures that are not on the page yet, and links to those that are."""
        new = [record for record in records if record.item.name not in self._linked]
        seen = [_link(record.item.name) for record in records if record not in new]
        cards = [self._card(record, sentence(record), third(record), flag=_flagged(record)) for record in new]
        also = f"<p>{'Also' if cards else 'Shown'} above: {', '.join(seen)}.</p>" if seen else ""
        return (f"<div class=cards>{''.join(cards)}</div>" if cards else "") + also

    def _class(self, view: ClassView) -> str:
        cards = [self._card(view.typical, words.sentence(view.typical, self._names), tag="typical")]
        if view.surprising is not None and view.odd is not None:
            text = words.sentence(view.surprising, self._names, view.odd, self._reference)
            tag = "most surprising" if view.odd.unusual else "farthest from usual"
            cards.append(self._card(view.surprising, text, tag=tag, flag=view.odd.unusual))
        heading = f"{escape(self._names(view.predicted))} <small>{count(len(view.records), 'picture')}</small>"
        return f"<h3 id=class-{view.predicted}>{heading}</h3><div class=cards>{''.join(cards)}</div>"

    def _pair(self, pair: Pair, labelled: bool) -> str:
        record = pair.records[0]
        found = self._drawn[record.item.name]
        mine, theirs = (escape(self._names(index)) for index in (pair.predicted, pair.other))
        likely = (record.truth_confidence if labelled else record.second_confidence) or 0.0
        first, second = ("said", "true") if labelled else ("first", "second")
        figures = [
            _figure(found.photo, escape(record.item.name)),
            _figure(found.map, f"{first}: <b>{mine}</b> {percent(record.confidence)}"),
            _figure(found.others[pair.other], f"{second}: <b>{theirs}</b> {percent(likely)}"),
            _figure(found.differences[pair.other], f"red: more {mine}, blue: more {theirs}"),
        ]
        title = f"{theirs} taken for {mine}" if labelled else f"{mine} or {theirs}"
        overlap, leads = found.overlaps.get(pair.other), found.leads[pair.other]
        text = words.pair_sentence(record, pair.other, overlap, leads, self._names)
        return (
            f"<article class=pair{self._anchor(record)}>"
            f"<h3>{title} <small>{count(len(pair.records), 'picture')}</small></h3>"
            f"<div class=figures>{''.join(figures)}</div><p>{prose(text)}</p></article>"
        )

    def _card(self, record: Record, text: str, third: str = "", tag: str = "", flag: bool = False) -> str:
        found = self._drawn[record.item.name]
        mark = f"<span class=tag>{escape(tag)}</span>" if tag else ""
        state = {True: "right", False: "wrong", None: ""}[record.right]
        figures = _figure(found.photo, escape(record.item.name)) + _figure(found.map, _numbers(record)) + third
        return (
            f"<article class='card{' flag' if flag else ''}'{self._anchor(record)}><div class=figures>{figures}</div>"
            f"<p class='said {state}'>{mark}{prose(words.verdict(record, self._names))}</p>"
            f"<p>{prose(text)}</p></article>"
        )

    def _without(self, record: Record) -> str:
        hidden = self._drawn[record.item.name].hidden
        if hidden is None or record.hidden.instead is None:
            return ""
        return _figure(hidden, f"object hidden: <b>{escape(self._names(record.hidden.instead))}</b>")

    def _anchor(self, record: Record) -> str:
        """An id for the first entry of a picture."""
        if record.item.name in self._linked:
            return ""
        self._linked.add(record.item.name)
        return f" id='{_slug(record.item.name)}'"


def _flagged(record: Record) -> bool:
    return choose.is_off_object(record) or choose.is_on_border(record)


def prose(words: str) -> str:
    """Plain words as HTML; a number and its % stay together."""
    return escape(words).replace(" %", "&nbsp;%")


def _link(name: str) -> str:
    return f"<a href='#{_slug(name)}'>{escape(name)}</a>"


def _numbers(record: Record) -> str:
    where = record.where
    parts = [] if where.inside is None else [f"on object {percent(where.inside)}"]
    parts += [f"border {percent(where.border)}", f"half in {percent(where.half)}"]
    return " · ".join(map(prose, parts))


def _figure(jpeg: bytes, caption: str) -> str:
    alt = re.sub("<.*?>", "", caption)
    return f"<figure><img alt=\"{alt}\" src='{data_uri(jpeg, 'jpeg')}'><figcaption>{caption}</figcaption></figure>"


def _slug(name: str) -> str:
    return "picture-" + re.sub(r"\W+", "-", name)


# ------------------------------------------------------------------------------------------------------ tables


def _table(headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A sortable table; words stand left, numbers right."""
    words_or_number = [" class=text" if isinstance(value, str) else "" for _, value in rows[0]]
    heads = "".join(
        f"<th scope=col{kind}><button type=button>{escape(heading)}</button></th>"
        for heading, kind in zip(headings, words_or_number, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row, words_or_number))}</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(cell: Cell, kind: str) -> str:
    text, value = cell
    sorted_by = "" if value is None else escape(str(value), quote=True)
    return f'<td data-v="{sorted_by}"{kind}>{text}</td>'


def _share(value: float | None) -> Cell:
    return ("–" if value is None else escape(percent(value)), value)


def class_table(chosen: Chosen, names: Names) -> str:
    """A row for every class that was predicted."""
    shown = {view.predicted for view in chosen.shown}
    headings = ["class", "pictures", "right", "on object", "border", "half in", "off the object", "on the border"]
    rows: list[list[Cell]] = []
    for view in chosen.views:
        group, name = view.records, names(view.predicted)
        known = [record.right for record in group if record.right is not None]
        link = f"<a href='#class-{view.predicted}'>{escape(name)}</a>" if view.predicted in shown else escape(name)
        off = sum(choose.is_off_object(r) for r in group)
        border = sum(choose.is_on_border(r) for r in group)
        middle = choose.usual(group).middle
        rows.append([
            (link, name), (str(len(group)), len(group)),
            (f"{sum(known)} of {len(known)}", sum(known) / len(known)) if known else ("–", None),
            _share(1 - middle["outside"] if "outside" in middle else None), _share(middle["border"]),
            _share(middle["spread"]), (str(off) if off else "–", off), (str(border) if border else "–", border),
        ])  # fmt: skip
    return _table(headings, rows)


def picture_table(records: Sequence[Record], drawn: set[str], names: Names) -> str:
    """A row for every picture; those that are drawn are linked."""
    headings = ["picture", "said", "sure", "label", "right", "on object", "object covers", "border", "half in",
                "evidence hidden", "object hidden"]  # fmt: skip
    marks: dict[bool | None, Cell] = {True: ("✓", 1), False: ("✗", 0), None: ("–", None)}
    rows: list[list[Cell]] = []
    for record in records[:_ROWS]:
        name, said, where = record.item.name, names(record.predicted), record.where
        link = _link(name) if name in drawn else escape(name)
        label = record.truth.label or "–"
        rows.append([
            (link, name), (escape(said), said), _share(record.confidence), (escape(label), label), marks[record.right],
            _share(where.inside), _share(where.area), _share(where.border), _share(where.half),
            _share(record.hidden.evidence), _share(record.hidden.object),
        ])  # fmt: skip
    more = f"<p>The first {_ROWS} of {len(records)}.</p>" if len(records) > _ROWS else ""
    return _table(headings, rows) + more


def instead_table(records: Sequence[Record], names: Names) -> str:
    """A row for every label that matches no class of the model."""
    found = choose.instead(records)
    if not found:
        return ""
    rows: list[list[Cell]] = []
    for label, total, said in found:
        listed = ", ".join(f"{names(index)} {times}" for index, times in said.most_common(4))
        rows.append([(escape(label), label), (str(total), total), (escape(listed), listed)])
    return (
        "<h3>Labels that match no class of the model, and what it says instead</h3>"
        f"{_table(['label', 'pictures', 'said'], rows)}"
    )
