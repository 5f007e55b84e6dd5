"""A diff in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from classlens.diff.collect import Collected, Row
from classlens.diff.places import Place
from classlens.evaluate.stats import Estimate
from classlens.report.spots import ninth
from classlens.report.words import Finding, count, percent

_UNSIGNED = ("moved", "predictions")  # shares of everything; the others are changes


def interval(found: Estimate, signed: bool = True) -> str:
    """A change in percentage points with its 95 % interval, or a share in per cent.

    >>> interval(Estimate(0.12, 0.08, 0.15, 40))
    '+12 points (+8 to +15)'
    """
    sign, unit = ("+", "points") if signed else ("-", "%")
    if math.isnan(found.value):
        return "–"
    value, low, high = (
        f"{100 * x:{sign}z.0f}" if math.isfinite(x) else "" for x in (found.value, found.low, found.high)
    )
    return f"{value} {unit} ({low} to {high})" if low else f"{value} {unit}"


def measure_text(name: str, found: Estimate) -> str:
    """A measure with its interval, in its own unit."""
    if name == "correlation":
        low = "" if math.isnan(found.low) else f" ({found.low:.2f} to {found.high:.2f})"
        return "–" if math.isnan(found.value) else f"{found.value:.2f}{low}"
    return interval(found, name not in _UNSIGNED)


def place_title(place: Place) -> str:
    """`Shortcut appeared: pug, bottom-left`."""
    spot = "a different place in each picture" if place.cells is None else ninth(place.cells)
    kind = "Shortcut" if place.shortcut else "Place that decides" if place.decides else "Evidence"
    verb = "appeared" if place.appeared else "gone"
    if kind == "Evidence":
        verb = "gathered" if place.appeared else "left"
    return f"{kind} {verb}: {place.name}, {spot}"


def place_sentence(place: Place, names: Sequence[str]) -> str:
    """Where the evidence went, what the network loses without the place, and what speaks against the object."""
    size = "" if place.cells is None else f" of the picture ({percent(float(place.cells.mean()))} of its area)"
    spot = "at the places of the largest change" if place.cells is None else f"in the {ninth(place.cells)}{size}"
    text = (
        f"In {count(len(place.rows), 'picture')}, {names[0]} has {percent(place.before)} of its evidence for "
        f"{place.name} {spot}, {names[1]} {percent(place.after)}, counted with the probability. Hiding it, rather than "
        f"as much elsewhere, costs {names[0]} {interval(place.falls[0], signed=False)} of the probability of "
        f"{place.name}, and {names[1]} {interval(place.falls[1], signed=False)}."
    )
    if place.on_object is not None:
        text += f" Of what {'came' if place.appeared else 'left'}, {percent(place.on_object)} lies on the object."
    if place.shortcut:
        user = names[1] if place.appeared else names[0]
        return f"{text} {user} uses something there that is hardly the object: a shortcut. Look at the pictures."
    return text if place.decides else f"{text} Neither network needs it much more than the other."


def row_verdict(row: Row, names: Sequence[str]) -> str:
    """What each network says, and how sure it is of the class in question."""
    if row.predicted[0] == row.predicted[1]:
        said = f"both say {row.predicted[0]}"
    else:
        said = f"{names[0]} says {row.predicted[0]}, {names[1]} says {row.predicted[1]}"
    return f"{said}; {row.name}: {percent(row.a.probability)} → {percent(row.b.probability)}"


def row_sentence(row: Row) -> str:
    """How much of the evidence moved, and from where to where."""
    text = f"{percent(row.moved)} of the evidence lies elsewhere (correlation {row.correlation:.2f})."
    if row.a.inside is not None and row.b.inside is not None:
        return f"{text} On the object: {percent(row.a.inside)} → {percent(row.b.inside)}."
    return f"{text} On the border: {percent(row.a.border)} → {percent(row.b.border)}."


# ------------------------------------------------------------------------------------------------------- summary


def findings(
    collected: Collected, found: Mapping[str, Estimate], places: Sequence[Place], names: Sequence[str]
) -> list[Finding]:
    """What the page says first."""
    return [
        *_shortcuts(places, names),
        _moved(found["moved"], found["correlation"]),
        _predictions(collected.rows, found, names),
        _object(found["off_object"]) if found["off_object"].n else _border(found["border"]),
    ]


def _shortcuts(places: Sequence[Place], names: Sequence[str]) -> list[Finding]:
    shortcuts = [place for place in places if place.shortcut]
    if not shortcuts:
        text = (
            "No place off the object was found where evidence gathered or vanished and that decides for one network "
            "only. A shortcut that few pictures of a class show may still be missed."
        )
        return [Finding("0", "shortcuts that appeared or went", text, "places")]
    return [_shortcut(place, names) for place in shortcuts[:3]]


def _shortcut(place: Place, names: Sequence[str]) -> Finding:
    user, other = (1, 0) if place.appeared else (0, 1)
    share = (place.before, place.after)
    spot = "at a different place in each picture" if place.cells is None else f"in the {ninth(place.cells)}"
    text = (
        f"{names[user]} has {percent(share[user])} of its evidence for {place.name} {spot}, {names[other]} "
        f"{percent(share[other])}. Hiding it costs {names[user]} {interval(place.falls[user], signed=False)} of the "
        f"probability, {names[other]} {interval(place.falls[other], signed=False)}."
    )
    return Finding(percent(share[user]), place_title(place), text, "places", alarming=place.appeared)


def _moved(moved: Estimate, correlation: Estimate) -> Finding:
    text = (
        f"On average {measure_text('moved', moved)} of the evidence for a class lies in other places, and the maps "
        f"correlate by {measure_text('correlation', correlation)}."
    )
    return Finding(percent(moved.value), "of the evidence moved", text, "pictures")


def _predictions(rows: Sequence[Row], found: Mapping[str, Estimate], names: Sequence[str]) -> Finding:
    changed = found["predictions"]
    text = f"{measure_text('predictions', changed)} of {count(changed.n, 'picture')} get another prediction."
    pairs = [said for said in {row.item.name: row.predicted for row in rows}.values() if said[0] != said[1]]
    if pairs:
        (first, second), times = max(((pair, pairs.count(pair)) for pair in set(pairs)), key=lambda one: (one[1], one))
        text += f" Most often {first} becomes {second} ({count(times, 'picture')})."
    right = found["accuracy"]
    if right.n:
        text += f" Right predictions: {interval(right)} from {names[0]} to {names[1]}."
    return Finding(percent(changed.value), "of the predictions changed", text, "pictures")


def _object(off: Estimate) -> Finding:
    text = f"The share of the evidence off the object changes by {interval(off)}."
    return Finding(interval(Estimate(off.value, math.nan, math.nan, off.n)), "off the object", text, "measures")


def _border(border: Estimate) -> Finding:
    text = f"The share of the evidence in the outer tenth of the picture changes by {interval(border)}."
    return Finding(interval(Estimate(border.value, math.nan, math.nan, border.n)), "on the border", text, "measures")
