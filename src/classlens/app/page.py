"""The event handlers of the page: every click changes a setting (a picture, a class, a view), then one function draws.

Actions are in `actions`, the layout in `layout`, the style of results in `markup` and `style.css`.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import gradio as gr

from classlens import render
from classlens.app import actions, links, markup
from classlens.app.actions import Blank, Panel, Wish
from classlens.app.choices import ITSELF, ROWS, aims_of, bars_of, numbered, questions, wished
from classlens.app.layout import ARRIVED_JS, OPACITY_JS, RECALL_JS, REMEMBER_JS, SAVE_JS, Parts, says, title
from classlens.app.links import Link
from classlens.app.offers import Given, Offer, with_text
from classlens.app.studio import (
    NOTHING,
    OutOfDate,
    Picture,
    Studio,
    decode,
    fingerprint,
    pick_sample,
    samples,
    too_large,
)  # fmt: skip
from classlens.app.turn import Turn
from classlens.app.updates import Updates, together
from classlens.concept import Concepts
from classlens.concept.gather import packed
from classlens.errors import ClasslensError, ImageError, TargetError
from classlens.progress import reporting
from classlens.trust import Trust

_AT_ONCE = 4  # concurrent drawings; more wait in the queue
_BUG = "something went wrong; see the terminal of the server"

P = ParamSpec("P")


def build(studio: Studio) -> gr.Blocks:
    """The page of these networks."""
    pictures = samples()
    page = gr.Blocks(analytics_enabled=False, title="classlens", fill_width=True)
    with page:
        parts = Parts(studio, pictures, Turn())
        _wire(page, parts, Handlers(studio, parts, pictures))
    page.queue(max_size=64, api_open=False)
    return page


def _wire(page: gr.Blocks, parts: Parts, do: Handlers) -> None:
    stages = list(parts.stages.values())
    about_picture = [
        parts.picture, parts.chosen, parts.given, parts.says, parts.text, parts.search, parts.rival, parts.question,
        parts.notice, parts.bars, *stages, *parts.tabs.values(),
    ]  # fmt: skip
    choices = [parts.picture, parts.model, parts.chosen, parts.rival, parts.given]
    choice = [parts.chosen, parts.rival, parts.given, parts.notice]
    typed = [*choice, parts.question, parts.text]
    looks = [parts.view, parts.method, parts.opacity, parts.question]
    settings = (parts.rival, parts.question, parts.method, parts.methods)
    shown_now = [parts.model, parts.view, parts.given]
    linked = [*about_picture, parts.model, parts.tab_row, parts.methods, *looks]
    steps: list[tuple[Any, ...]] = [
        (partial(page.load, js=RECALL_JS), do.open_link, [parts.address], linked),
        (parts.drop.upload, do.receive, shown_now, about_picture),
        (parts.drop.select, do.try_sample, shown_now, about_picture),
        (parts.model.input, do.change_model, [parts.picture, *shown_now], about_picture),
        *((part.select, do.pick, choices, choice) for part in (parts.bars, *stages)),
        (parts.search.input, do.pick_named, [*choices, parts.search], choice),
        (parts.text.submit, do.add_text, [*choices[:2], parts.given, parts.text], typed),
        *((tab.select, do.look(view), choices[:2], looks) for view, tab in parts.tabs.items()),
        *((part.input, do.clear, None, [parts.notice]) for part in (*settings, parts.folder)),
    ]
    wanted = [parts.picture, parts.model, parts.view, parts.chosen, *settings, parts.given, parts.folder]
    drawn = [parts.bars, parts.notice, parts.address, *stages]
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    shown = quiet | {"show_progress": "minimal", "show_progress_on": stages}
    shown |= {"concurrency_id": "draw", "concurrency_limit": _AT_ONCE}
    for on, step, give, take in steps:
        asked = on(step, give, take, **quiet)
        asked.then(None, None, None, js=ARRIVED_JS, **quiet)
        asked.then(do.draw, [parts.turn, *wanted], drawn, **shown)
    parts.address.change(None, [parts.address], None, js=REMEMBER_JS, **quiet)
    parts.opacity.input(None, [parts.opacity], None, js=OPACITY_JS, **quiet)
    for button, save in ((parts.png, do.save_png), (parts.npz, do.save_npz)):
        saved = button.click(save, [parts.opacity, *wanted], [parts.parcel, parts.notice], **quiet)
        saved.then(None, [parts.parcel], None, js=SAVE_JS, **quiet)


def _politely(handler: Callable[Concatenate[Handlers, P], Updates]) -> Callable[Concatenate[Handlers, P], Updates]:
    """A handler that shows an error as one line on the page instead of raising it."""

    @wraps(handler)
    def polite(self: Handlers, /, *args: P.args, **kwargs: P.kwargs) -> Updates:
        try:
            return {self.parts.notice: "", **handler(self, *args, **kwargs)}
        except Exception as error:
            return self.tell(error)

    return polite


class Handlers:
    """The event handlers of the page; each returns the parts that change."""

    def __init__(self, studio: Studio, parts: Parts, samples: Mapping[str, bytes]) -> None:
        self.studio, self.parts, self.samples = studio, parts, samples
        self.sample_names = {fingerprint(content): name for name, content in samples.items()}

    def tell(self, error: Exception) -> Updates:
        """One line for the visitor; unexpected errors are logged in full on the server."""
        if not isinstance(error, ClasslensError):
            logging.getLogger(__name__).error("the page failed", exc_info=error)
        return {self.parts.notice: markup.notice(str(error) if isinstance(error, ClasslensError) else _BUG)}

    # ------------------------------------------------------------------------------------------------- pictures

    def open_link(self, address: str) -> Updates:
        """The page opens with the view that its address or a reload names, otherwise with a sample to click on."""
        try:
            return self._follow(
                links.read(address or "", self.studio.models, self.samples, self.parts.tabs, self.studio.folders)
            )
        except Exception as error:
            return self._follow(Link()) | self.tell(error)

    def _follow(self, link: Link) -> Updates:
        model = link.model or next(iter(self.studio.models))
        name = link.sample or next(iter(self.samples))
        opened = self.studio.recall(link.picture) if link.picture else self.studio.open(self.samples[name])
        offer = self.studio.offer(opened, model, link.given)
        for index in (link.index, link.rival, link.rather_than):
            if isinstance(index, int):  # a link may name any number
                offer.check(index)
        chosen = {}
        if link.index is not None:
            bars = bars_of(self.studio, opened, model, link.index, link.given)
            chosen = {self.parts.chosen: link.index, self.parts.bars: bars, self.parts.given: link.given}
        settings = {
            self.parts.rival: link.rival,
            self.parts.question: link.rather_than,
            self.parts.method: link.method,
            self.parts.methods: list(link.methods),
            self.parts.folder: link.folder,
        }
        return together(
            {self.parts.notice: "", self.parts.model: model, self.parts.tab_row: gr.update(selected=link.view)},
            self._show(opened, model, link.view, link.given),
            self.look(link.view)(opened, model),
            {part: gr.update(value=value) for part, value in settings.items() if value is not None},
            chosen,
        )

    @_politely
    def try_sample(self, model: str, view: str, given: Given, event: gr.EventData) -> Updates:
        """A sample was clicked."""
        return self._show(self.studio.open(pick_sample(self.samples, _told(event, "index"))), model, view, given)

    @_politely
    def receive(self, model: str, view: str, given: Given, event: gr.EventData) -> Updates:
        """A picture file came in."""
        if _told(event, "large"):  # the browser did not even send it
            raise too_large()
        return self._show(self.studio.open(decode(_told(event, "content"))), model, view, given)

    @_politely
    def change_model(self, picture: Picture | None, model: str, view: str, given: Given) -> Updates:
        """Another network was selected."""
        return self._show(_there(picture), model, view, given)

    def _show(self, picture: Picture, model: str, view: str, given: Given) -> Updates:
        """A new picture with its choices, and no map yet: an old map beside new choices would be wrong."""
        given = replace(given, place=None)
        offer = self.studio.offer(picture, model, given)
        likely = [index for index, _ in offer.likeliest(ROWS)]
        waiting = dict.fromkeys(self.parts.stages.values(), "")
        aims = aims_of(self.studio, picture, model, likely[0] if likely else -1, given)
        waiting[self.parts.stages[view]] = markup.waiting(picture.views[model], aims, bool(likely))
        return waiting | {
            self.parts.picture: picture,
            self.parts.given: given,
            self.parts.chosen: likely[0] if likely else 0,
            self.parts.bars: bars_of(self.studio, picture, model, likely[0], given) if likely else "",
            self.parts.says: says(offer.kind),
            self.parts.text: gr.update(visible=offer.kind == "text", value=""),
            self.parts.search: self._found_by_name(offer),
            **self._others(offer, likely),
            **{tab: gr.update(label=title(name, offer.kind)) for name, tab in self.parts.tabs.items()},
        }

    def _found_by_name(self, offer: Offer) -> Updates:
        label = f"Or any other of its {len(offer.names)} {offer.words.several}"
        hidden = len(offer.names) > ROWS or offer.kind != "box"  # all boxes may be in sight already
        return gr.update(choices=numbered(offer), value=None, label=label, visible=offer.words.searched and hidden)

    def _others(self, offer: Offer, likely: Sequence[int]) -> Updates:
        """The choices that the selected one can be compared with."""
        names = numbered(offer)
        asked = questions(names, likely, offer.words.one, every=offer.kind == "class")
        return {
            self.parts.rival: gr.update(choices=names, value=likely[:2][-1] if likely else None),
            self.parts.question: gr.update(choices=asked, value=ITSELF, visible=offer.words.rivals),
        }

    # -------------------------------------------------------------------------------------------------- choices

    @_politely
    def pick(
        self, picture: Picture | None, model: str, chosen: int, rival: int | None, given: Given, event: gr.EventData
    ) -> Updates:
        """A bar, a box of the picture or a pixel was clicked."""
        x, y = _told(event, "x"), _told(event, "y")
        if x is None or y is None:
            return self._choose(_there(picture), model, _told(event, "index"), chosen, rival, given)
        if not all(isinstance(share, int | float) and 0 <= share < 1 for share in (x, y)):
            raise TargetError("this pixel lies outside the picture; click inside it")
        height, width = _there(picture).inputs[model].shape[-2:]
        place = int(x * width), int(y * height)
        index = self.studio.offer(_there(picture), model, given).at(place, (height, width))
        return {self.parts.chosen: index, self.parts.given: replace(given, place=place)}

    @_politely
    def pick_named(
        self, picture: Picture | None, model: str, chosen: int, rival: int | None, given: Given, index: object
    ) -> Updates:
        """A choice was found by its name."""
        return {} if index is None else self._choose(_there(picture), model, index, chosen, rival, given)

    def _choose(
        self, picture: Picture, model: str, index: object, chosen: int, rival: int | None, given: Given
    ) -> Updates:
        self.studio.offer(picture, model, given).check(index)
        # A click on the class of the comparison swaps the two.
        swapped = {self.parts.rival: chosen} if index == rival else {}
        return {self.parts.chosen: index, self.parts.given: replace(given, place=None), **swapped}

    @_politely
    def add_text(self, picture: Picture | None, model: str, given: Given, words: str) -> Updates:
        """A text was typed: it is the first of the texts, and chosen."""
        more = with_text(given, words)
        offer = self.studio.offer(_there(picture), model, more)
        likely = list(range(len(offer.names)))
        return {self.parts.chosen: 0, self.parts.given: more, self.parts.text: "", **self._others(offer, likely)}

    # ------------------------------------------------------------------------------------------------- drawing

    def clear(self) -> Updates:
        """A setting was changed: clear the old message."""
        return {self.parts.notice: ""}

    def look(self, view: str) -> Callable[[Picture | None, str], Updates]:
        """A tab was opened; settings without effect there are hidden."""

        def opened(picture: Picture | None, model: str) -> Updates:
            rivals = picture is not None and self.studio.offer(picture, model).words.rivals
            return {
                self.parts.view: view,
                self.parts.method: gr.update(visible=view not in ("methods", "concepts")),
                self.parts.opacity: gr.update(visible=view not in ("layers", "concepts")),
                self.parts.question: gr.update(visible=rivals and view not in ("two", "concepts")),
            }

        return opened

    def draw(
        self, turn: Turn, picture: Picture | None, model: str, view: str, index: int, rival: int | None,
        question: int | str, method: str, methods: list[str], given: Given = NOTHING, folder: str | None = None,
        progress: gr.Progress = gr.Progress(),  # noqa: B008 (gradio knows it by its default)
    ) -> Iterator[Updates]:  # fmt: skip
        """Draw the current settings; panels appear one by one, until the settings change."""
        if picture is None:
            return
        wish = wished(model, view, index, rival, question, method, methods, given, folder)
        still_wanted = turn.take()

        def tell(label: str, done: int, total: int) -> None:
            still_wanted()
            self.studio.check_open()
            progress((done, total), desc=label)

        try:
            bars = {
                self.parts.bars: bars_of(self.studio, picture, model, index, given),
                self.parts.address: self._address(picture, wish),
            }
            yield bars
            steps = actions.panels(self.studio, picture, wish)
            while True:
                with reporting(tell):  # not around the loop: gradio may continue in another context after each yield
                    panels = next(steps, None)
                still_wanted()
                if panels is None:
                    break
                # The bars again: a browser may show only the second of two updates in quick succession.
                yield bars | {self.parts.stages[view]: self._stage(picture, wish, panels)}
            if view in ("one", "two") and self.studio.is_quick(picture, model, index, method, wish.rivals, given):
                self.studio.prefetch(picture, model, ROWS, method, replace(given, place=None))
        except OutOfDate:
            return
        except Exception as error:
            yield self.tell(error)

    def _address(self, picture: Picture, wish: Wish) -> str:
        sample, model = self.sample_names.get(picture.digest), wish.model if len(self.studio.models) > 1 else ""
        wish = replace(wish, folder=wish.folder if len(self.studio.folders) > 1 else "")
        return links.write("sample" if sample else "picture", sample or picture.digest, wish, model)

    def _stage(self, picture: Picture, wish: Wish, panels: Sequence[Panel | Blank]) -> str:
        labels, view = self.studio.offer(picture, wish.model, wish.given).names, picture.views[wish.model]
        if wish.view == "one":
            lead = markup.found(wish.model, panels)
            aims = aims_of(self.studio, picture, wish.model, wish.index, wish.given)
            return markup.stage(lead, view, panels, picture=True, facts=markup.facts(panels), aims=aims)
        if wish.view == "trust":
            tested = all(isinstance(panel, Panel) for panel in panels)
            card = self._trust(picture, wish) if tested else None
            return markup.trust(markup.lead_trust(labels[wish.index], panels, card), view, panels, card)
        if wish.view == "concepts":
            return markup.concepts(wish.model, self._concepts(picture, wish))
        lead = markup.lead(wish.view, labels[wish.index], labels[wish.rival], panels)
        if wish.view == "layers":
            return markup.figure(lead, self._decomposition(picture, wish))
        return markup.stage(lead, view, panels)

    def _concepts(self, picture: Picture, wish: Wish) -> Concepts:
        return self.studio.concepts(picture, wish.model, wish.index, wish.folder, wish.given)

    def _trust(self, picture: Picture, wish: Wish) -> Trust:
        return self.studio.trust(picture, wish.model, wish.index, wish.method, wish.rivals, wish.given)

    def _decomposition(self, picture: Picture, wish: Wish) -> bytes:
        method = actions.agf_method(wish.method)
        return self.studio.decomposition(picture, wish.model, wish.index, method, wish.rather_than, wish.given)

    # ----------------------------------------------------------------------------------------------- downloads

    @_politely
    def save_png(self, opacity: float, picture: Picture | None, *wanted: Any) -> Updates:
        """The current view as a PNG."""
        wish = wished(*wanted)
        *_, panels = actions.panels(self.studio, _there(picture), wish)
        if wish.view == "layers":
            content = self._decomposition(_there(picture), wish)
        elif wish.view == "trust":
            content = render.png(self._trust(_there(picture), wish).figure())
        elif wish.view == "concepts":
            content = render.png(self._concepts(_there(picture), wish).figure())
        else:
            about = wish.model if wish.view == "methods" else f"{wish.model}  ·  {wish.method}"
            content = actions.sheet(_there(picture).views[wish.model], panels, about, opacity / 100)
        return self._parcel("classlens.png", "image/png", content)

    @_politely
    def save_npz(self, opacity: float, picture: Picture | None, *wanted: Any) -> Updates:
        """The raw maps of the current view as an NPZ."""
        wish = wished(*wanted)
        *_, panels = actions.panels(self.studio, _there(picture), wish)
        if wish.view == "concepts":
            content = packed(self._concepts(_there(picture), wish).arrays())
        else:
            maps = panels[:1] if wish.view == "trust" else panels  # a faded map is no raw map
            content = actions.arrays(_there(picture), wish.model, maps)
        return self._parcel("classlens.npz", "application/octet-stream", content)

    def _parcel(self, name: str, kind: str, content: bytes) -> Updates:
        return {self.parts.parcel: {"name": name, "kind": kind, "content": base64.b64encode(content).decode()}}


def _told(event: gr.EventData, name: str) -> Any:
    """What an event says; a request may hold anything."""
    return event._data.get(name) if isinstance(event._data, dict) else None


def _there(picture: Picture | None) -> Picture:
    if picture is None:
        raise ImageError("there is no picture: choose one")
    return picture
