"""The page: one HTML file with everything in it, that can be mailed. What it says is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from classlens.evaluate.embed import data_uri
from classlens.report import choose
from classlens.report.choose import Chosen
from classlens.report.collect import Collected, Record
from classlens.report.draw import Drawn
from classlens.report.entries import Writer, class_table, instead_table, picture_table, prose
from classlens.report.words import Finding, Names, count, percent

_LISTED = 50  # pictures that could not be used, by name


@dataclass(frozen=True)
class About:
    """What was run."""

    model: str
    data: str
    facts: dict[str, str]  # for the header
    made: dict[str, str]  # for the foot: command, versions
    notes: tuple[str, ...]
    legend: bytes
    signed: bool


@dataclass(frozen=True)
class _Section:
    name: str  # its anchor
    heading: str
    intro: str  # HTML
    content: str  # HTML; without any, there is no section

    def html(self) -> str:
        intro = f"<p class=intro>{self.intro}</p>" if self.intro else ""
        return f"<section id={self.name}><h2>{escape(self.heading)}</h2>{intro}{self.content}</section>"


def page(
    about: About, findings: Sequence[Finding], collected: Collected, chosen: Chosen, drawn: Mapping[str, Drawn],
    names: Names,
) -> str:  # fmt: skip
    """The whole file."""
    records = collected.records
    write = Writer(drawn, names, chosen.reference)  # in the order of the page: an entry may refer to one above
    sections = [
        _Section("object", "Off the object", _object_intro(records), write.objects(chosen.off_object)),
        _Section("hidden", "Without the object", _HIDDEN, write.objects(chosen.same)),
        _Section("border", "On the border", _border_intro(records), write.borders(chosen.border)),
        _confused(records, chosen, write, names),
        _Section("classes", "Typical and surprising", _classes_intro(chosen), write.classes(chosen.shown)),
        _Section("tables", "All classes", _table_intro(chosen), class_table(chosen, names)),
        _Section("pictures", "All pictures", _PICTURES, picture_table(records, set(drawn), names)),
        _Section("made", "How this was made", _DEFINITIONS, _made(about, collected)),
    ]
    there = [section for section in sections if section.content]
    navigation = "".join(f"<a href='#{section.name}'>{escape(section.heading)}</a>" for section in there)
    body = (
        f"{_header(about)}{_summary(findings, about.notes)}<nav>{navigation}</nav>"
        f"{''.join(section.html() for section in there)}<script>{_asset('page.js')}</script>"
    )
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(f'{about.model} on {about.data}')}</title><style>{_asset('page.css')}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


# ------------------------------------------------------------------------------------------------------- parts

_HIDDEN = (
    "The object was filled from its surroundings, and the model asked again. It still says the same of these pictures, "
    "so it knows them by what is around – or by the shape of the hole."
)
_CONFUSED = (
    "What the model said and what it should have said, on the same picture: two maps of one forward pass. The last "
    "picture shows where one class has more of its evidence than the other."
)
_UNDECIDED = (
    "No label is known, so these are the likeliest class and the runner-up, where one is less than twice as likely as "
    "the other. The last picture shows where one has more of its evidence than the other."
)
_PICTURES = (
    "Half in: the smallest part of the picture that holds half of the evidence. Hidden: the class's probability once "
    "that part, or the object, is filled from its surroundings."
)
_CLASSES = (
    "Pictures that the model calls the same. <em>Typical</em>: the map nearest to the class's medians, among its surer "
    f"half. <em>Surprising</em>: the model is sure ({percent(choose.SURE)} or more) although the evidence lies off the "
    "object, on the border, or is unusually spread."
)
_DEFINITIONS = (
    "The map of the likeliest class of each picture was measured. <em>Evidence</em> is its positive "
    "part. <em>On the object</em>: the share inside of the mask, of what lies on labelled pixels. <em>Border</em>: the "
    "share in the outer tenth of each side of what the network sees. <em>Half in</em>: the fewest cells of a 16 × 16 "
    "grid that hold half of it. <em>Hidden</em>: filled with a blur of the visible pixels alone; hidden evidence is "
    "compared with as many cells drawn from the rest. A map is no proof: the hidden parts are the test."
)


def _header(about: About) -> str:
    facts = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in about.facts.items())
    ends = ("against", "for the class") if about.signed else ("none", "most")
    key = (
        f"<p class=key><span>{ends[0]}</span><img alt='from {ends[0]} to {ends[1]}' "
        f"src='{data_uri(about.legend, 'jpeg')}'><span>{ends[1]}</span>"
        "<span class=quiet>Each map is scaled by itself: colours compare places, not amounts. "
        "A white line is the outline of the object.</span></p>"
    )
    return (
        f"<header><p class=over>classlens report</p><h1>Where {escape(about.model)} finds its classes</h1>"
        f"<dl>{facts}</dl>{key}</header>"
    )


def _summary(findings: Iterable[Finding], notes: Iterable[str]) -> str:
    tiles = "".join(
        f"<a class='tile{' alarm' if f.alarming else ''}' href='#{f.section}'><b>{escape(f.number)}</b>"
        f"<span>{escape(f.title)}</span><p>{prose(f.text)}</p></a>"
        for f in findings
    )
    remarks = "".join(f"<p class=note>{escape(note)}</p>" for note in notes)
    return f"<section id=short><h2>In short</h2><div class=tiles>{tiles}</div>{remarks}</section>"


def _object_intro(records: Sequence[Record]) -> str:
    masked = [record for record in records if record.where.inside is not None]
    off = sum(choose.is_off_object(record) for record in masked)
    if not off:
        return "Nowhere does more than half of the evidence lie beside the object. These come nearest to it."
    return (
        f"More than half of the evidence of {off} of {len(masked)} maps lies beside the object, "
        "the least on the object first."
    )


def _border_intro(records: Sequence[Record]) -> str:
    there = sum(choose.is_on_border(record) for record in records)
    even = percent(records[0].where.even_border)
    if there:
        return (
            f"More than half of the evidence of {there} of {len(records)} maps lies in the outer tenth of what the "
            f"network sees ({even} of its area)."
        )
    return (
        "Nowhere does more than half of the evidence lie in the outer tenth of what the network sees "
        f"({even} of its area). These come nearest to it."
    )


def _confused(records: Sequence[Record], chosen: Chosen, write: Writer, names: Names) -> _Section:
    content = write.pairs(chosen.pairs, chosen.labelled) + instead_table(records, names)
    if chosen.labelled:
        return _Section("confused", "Confused classes", _CONFUSED, content or "<p>It was never wrong.</p>")
    return _Section("confused", "Undecided between classes", _UNDECIDED, content)


def _classes_intro(chosen: Chosen) -> str:
    unusual = sum(view.odd is not None and view.odd.unusual for view in chosen.views)
    if not unusual:
        return f"{_CLASSES} In none of the {len(chosen.views)} classes is a sure answer that unusual."
    return f"{_CLASSES} That holds for {unusual} of the {len(chosen.views)} classes; they come first."


def _table_intro(chosen: Chosen) -> str:
    return (
        f"The {len(chosen.views)} classes that the model named. On the object, border and half: medians. "
        "A click on a heading sorts."
    )


def _made(about: About, collected: Collected) -> str:
    facts = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in about.made.items())
    return (
        f"<dl class=made>{facts}</dl>"
        f"{_problems('could not be used', collected.skipped)}"
        f"{_problems('had no mask that can be read, and were used without', collected.without_mask)}"
    )


def _problems(what: str, found: Mapping[str, str]) -> str:
    if not found:
        return ""
    lines = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in list(found.items())[:_LISTED])
    more = f"<li>and {len(found) - _LISTED} more</li>" if len(found) > _LISTED else ""
    return f"<h3>{count(len(found), 'picture')} {what}</h3><ul>{lines}{more}</ul>"


def _asset(name: str) -> str:
    return (files("classlens") / "report" / name).read_text(encoding="utf-8")
