"""The page: one self-contained HTML file. Its text and style are in templates/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from classlens.render.html import pages
from classlens.report import choose
from classlens.report.choose import Chosen
from classlens.report.collect import Collected, Record
from classlens.report.draw import Drawn
from classlens.report.entries import Writer, class_table, instead_table, picture_table
from classlens.report.groups import Group, group_entry
from classlens.report.made_of import MadeOf
from classlens.report.words import Finding, Names, count, percent

_LISTED = 50  # unusable images, by name


@dataclass(frozen=True)
class About:
    """Facts about the run."""

    model: str
    data: str
    facts: dict[str, str]  # for the header
    made: dict[str, str]  # for the foot: command, versions
    notes: tuple[str, ...]
    legend: bytes
    signed: bool
    locates: bool  # whether the maps of two classes may be compared by position


def page(
    about: About, findings: Sequence[Finding], collected: Collected, chosen: Chosen, drawn: Mapping[str, Drawn],
    names: Names, groups: Sequence[Group] = (), made_of: MadeOf | None = None,
) -> str:  # fmt: skip
    """The HTML of the page."""
    records = collected.records
    write = Writer(drawn, names, chosen.reference, about.locates)
    entries: dict[str, Any] = {  # in the order of the page: an entry may refer to one above
        "off_object": write.objects(chosen.off_object),
        "hidden": write.objects(chosen.same),
        "border": write.borders(chosen.border),
        "confused": write.pairs(chosen.pairs, chosen.labelled),
        "instead": instead_table(records, names),
        "shown": write.classes(chosen.shown),
        "groups": [group_entry(group, drawn) for group in groups],
    }
    text = pages("report").get_template("page.html").render(
        entries, about=about, findings=findings, sections=_sections(chosen, entries, made_of), made_of=made_of,
        counts=_counts(records, chosen), labelled=chosen.labelled, sure=percent(choose.SURE),
        even_border=percent(records[0].where.even_border),
        class_table=class_table(chosen, names), picture_table=picture_table(records, set(drawn), names),
        skipped=problems(collected.skipped), without_mask=problems(collected.without_mask),
    )  # fmt: skip
    return text + "\n"


def _sections(chosen: Chosen, entries: Mapping[str, Any], made_of: MadeOf | None) -> dict[str, str]:
    """The non-empty sections, by their anchors."""
    headings = {
        "groups": ("Groups of pictures", entries["groups"]),
        "object": ("Off the object", chosen.off_object),
        "hidden": ("Without the object", chosen.same),
        "border": ("On the border", chosen.border),
        "confused": (
            "Confused classes" if chosen.labelled else "Undecided between classes",
            chosen.labelled or entries["confused"] or entries["instead"],
        ),
        "classes": ("Typical and surprising", chosen.shown),
        "concepts": ("What classes are made of", made_of),
        "tables": ("All classes", True),
        "pictures": ("All pictures", True),
        "made": ("How this was made", True),
    }
    return {name: heading for name, (heading, there) in headings.items() if there}


def _counts(records: Sequence[Record], chosen: Chosen) -> dict[str, int]:
    masked = [record for record in records if record.where.inside is not None]
    return {
        "maps": len(records),
        "masked": len(masked),
        "off_object": sum(choose.is_off_object(record) for record in masked),
        "on_border": sum(choose.is_on_border(record) for record in records),
        "classes": len(chosen.views),
        "unusual": sum(view.odd is not None and view.odd.unusual for view in chosen.views),
    }


def problems(found: Mapping[str, str]) -> dict[str, Any]:
    """Images with a problem: their number, the first ones with the reason, and how many more."""
    return {
        "total": count(len(found), "picture") if found else "",
        "listed": list(found.items())[:_LISTED],
        "more": max(0, len(found) - _LISTED),
    }
