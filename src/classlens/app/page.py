"""The event handlers of the page: every click changes a setting (a picture, a class, a view), then one function draws.

Actions are in `actions`, the layout in `layout`, the style of results in `markup` and `style.css`.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import gradio as gr

from classlens.app import actions, links, markup
from classlens.app.actions import Blank, Panel, Wish
from classlens.app.layout import ARRIVED_JS, OPACITY_JS, RECALL_JS, REMEMBER_JS, SAVE_JS, Parts
from classlens.app.links import Link
from classlens.app.studio import OutOfDate, Picture, Studio, decode, fingerprint, pick_sample, samples, too_large
from classlens.core.targets import RIVALS
from classlens.errors import ClasslensError, ImageError, TargetError
from classlens.progress import reporting

_ROWS = 8  # class bars
_AT_ONCE = 4  # concurrent drawings; more wait in the queue
ITSELF = "itself"  # the question for the evidence for the class by itself
_BUG = "something went wrong; see the terminal of the server"

Updates = dict[Any, Any]  # part of the page -> its new value
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
        parts.picture, parts.chosen, parts.search, parts.rival, parts.question, parts.notice, parts.bars, *stages
    ]  # fmt: skip
    classes = [parts.picture, parts.model, parts.chosen, parts.rival]
    choice = [parts.chosen, parts.rival, parts.notice]
    looks = [parts.view, parts.method, parts.opacity, parts.question]
    settings = (parts.rival, parts.question, parts.method, parts.methods)
    shown_now = [parts.model, parts.view]
    linked = [*about_picture, parts.model, parts.tab_row, parts.methods, *looks]
    steps: list[tuple[Any, ...]] = [
        (partial(page.load, js=RECALL_JS), do.open_link, [parts.address], linked),
        (parts.drop.upload, do.receive, shown_now, about_picture),
        (parts.drop.select, do.try_sample, shown_now, about_picture),
        (parts.model.input, do.change_model, [parts.picture, *shown_now], about_picture),
        (parts.bars.select, do.pick, classes, choice),
        (parts.search.input, do.pick_named, [*classes, parts.search], choice),
        *((tab.select, do.look(view), None, looks) for view, tab in parts.tabs.items()),
        *((part.input, do.clear, None, [parts.notice]) for part in settings),
    ]
    wanted = [parts.picture, parts.model, parts.view, parts.chosen, *settings]
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


class Turn:
    """Lets only the latest click draw in a visitor's browser."""

    def __init__(self) -> None:
        self._latest = 0

    def take(self) -> Callable[[], None]:
        """Start a new drawing; the returned function raises `OutOfDate` once another has started."""
        self._latest += 1
        mine = self._latest

        def still_wanted() -> None:
            if mine != self._latest:
                raise OutOfDate

        return still_wanted


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
            return self._follow(links.read(address or "", self.studio.models, self.samples))
        except Exception as error:
            return self._follow(Link()) | self.tell(error)

    def _follow(self, link: Link) -> Updates:
        model = link.model or next(iter(self.studio.models))
        name = link.sample or next(iter(self.samples))
        opened = self.studio.recall(link.picture) if link.picture else self.studio.open(self.samples[name])
        for index in (link.index, link.rival, link.rather_than):
            if isinstance(index, int):  # a link may name any number
                self._check_class(opened, model, index)
        chosen = {}
        if link.index is not None:
            chosen = {self.parts.chosen: link.index, self.parts.bars: self._bars(opened, model, link.index)}
        settings = {
            self.parts.rival: link.rival,
            self.parts.question: link.rather_than,
            self.parts.method: link.method,
            self.parts.methods: list(link.methods),
        }
        return _together(
            {self.parts.notice: "", self.parts.model: model, self.parts.tab_row: gr.update(selected=link.view)},
            self._show(opened, model, link.view),
            self.look(link.view)(),
            {part: gr.update(value=value) for part, value in settings.items() if value is not None},
            chosen,
        )

    @_politely
    def try_sample(self, model: str, view: str, event: gr.EventData) -> Updates:
        """A sample was clicked."""
        return self._show(self.studio.open(pick_sample(self.samples, _told(event, "index"))), model, view)

    @_politely
    def receive(self, model: str, view: str, event: gr.EventData) -> Updates:
        """A picture file came in."""
        if _told(event, "large"):  # the browser did not even send it
            raise too_large()
        return self._show(self.studio.open(decode(_told(event, "content"))), model, view)

    @_politely
    def change_model(self, picture: Picture | None, model: str, view: str) -> Updates:
        """Another network was selected."""
        return self._show(_there(picture), model, view)

    def _show(self, picture: Picture, model: str, view: str) -> Updates:
        """A new picture with its classes, and no map yet: an old map beside new classes would be wrong."""
        likely = [index for index, _ in self.studio.likeliest(picture, model, _ROWS)]
        names = [(f"{name}  ·  {i}", i) for i, name in enumerate(self.studio.labels(picture, model))]
        waiting = dict.fromkeys(self.parts.stages.values(), "")
        waiting[self.parts.stages[view]] = markup.waiting(picture.views[model])
        return waiting | {
            self.parts.picture: picture,
            self.parts.chosen: likely[0],
            self.parts.bars: self._bars(picture, model, likely[0]),
            self.parts.search: gr.update(choices=names, value=None, label=f"Or any other of its {len(names)} classes"),
            self.parts.rival: gr.update(choices=names, value=likely[:2][-1]),
            self.parts.question: gr.update(choices=questions(names, likely), value=ITSELF),
        }

    # -------------------------------------------------------------------------------------------------- classes

    @_politely
    def pick(self, picture: Picture | None, model: str, chosen: int, rival: int | None, event: gr.EventData) -> Updates:
        """A class bar was clicked."""
        return self._choose(_there(picture), model, _told(event, "index"), chosen, rival)

    @_politely
    def pick_named(self, picture: Picture | None, model: str, chosen: int, rival: int | None, index: object) -> Updates:
        """A class was found by its name."""
        return {} if index is None else self._choose(_there(picture), model, index, chosen, rival)

    def _choose(self, picture: Picture, model: str, index: object, chosen: int, rival: int | None) -> Updates:
        self._check_class(picture, model, index)
        # A click on the class of the comparison swaps the two.
        swapped = {self.parts.rival: chosen} if index == rival else {}
        return {self.parts.chosen: index, **swapped}

    def _check_class(self, picture: Picture, model: str, index: object) -> None:
        if not isinstance(index, int) or not 0 <= index < len(self.studio.labels(picture, model)):
            raise TargetError("there is no such class; pick one from the list")

    # ------------------------------------------------------------------------------------------------- drawing

    def clear(self) -> Updates:
        """A setting was changed: clear the old message."""
        return {self.parts.notice: ""}

    def look(self, view: str) -> Callable[[], Updates]:
        """A tab was opened; settings without effect there are hidden."""
        return lambda: {
            self.parts.view: view,
            self.parts.method: gr.update(visible=view != "methods"),
            self.parts.opacity: gr.update(visible=view != "layers"),
            self.parts.question: gr.update(visible=view != "two"),
        }

    def draw(
        self, turn: Turn, picture: Picture | None, model: str, view: str, index: int, rival: int | None,
        question: int | str, method: str, methods: list[str], progress: gr.Progress = gr.Progress(),  # noqa: B008 (gradio knows it by its default)
    ) -> Iterator[Updates]:  # fmt: skip
        """Draw the current settings; panels appear one by one, until the settings change."""
        if picture is None:
            return
        wish = _wish(model, view, index, rival, question, method, methods)
        still_wanted = turn.take()

        def tell(label: str, done: int, total: int) -> None:
            still_wanted()
            self.studio.check_open()
            progress((done, total), desc=label)

        try:
            bars = {
                self.parts.bars: self._bars(picture, model, index),
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
            if view in ("one", "two") and self.studio.is_quick(picture, model, index, method, wish.rivals):
                self.studio.prefetch(picture, model, _ROWS, method)
        except OutOfDate:
            return
        except Exception as error:
            yield self.tell(error)

    def _bars(self, picture: Picture, model: str, chosen: int) -> str:
        shown = self.studio.likeliest(picture, model, _ROWS)
        if chosen not in dict(shown):
            shown.append((chosen, self.studio.probability(picture, model, chosen)))
        labels = self.studio.labels(picture, model)
        return markup.bars([(index, labels[index], share) for index, share in shown], chosen)

    def _address(self, picture: Picture, wish: Wish) -> str:
        sample, model = self.sample_names.get(picture.digest), wish.model if len(self.studio.models) > 1 else ""
        return links.write("sample" if sample else "picture", sample or picture.digest, wish, model)

    def _stage(self, picture: Picture, wish: Wish, panels: Sequence[Panel | Blank]) -> str:
        labels, view = self.studio.labels(picture, wish.model), picture.views[wish.model]
        if wish.view == "one":
            lead = markup.found(wish.model, panels)
            return markup.stage(lead, view, panels, picture=True, facts=markup.facts(panels))
        lead = markup.lead(wish.view, labels[wish.index], labels[wish.rival], panels)
        if wish.view == "layers":
            return markup.figure(lead, self._decomposition(picture, wish))
        return markup.stage(lead, view, panels)

    def _decomposition(self, picture: Picture, wish: Wish) -> bytes:
        method = actions.agf_method(wish.method)
        return self.studio.decomposition(picture, wish.model, wish.index, method, wish.rather_than)

    # ----------------------------------------------------------------------------------------------- downloads

    @_politely
    def save_png(self, opacity: float, picture: Picture | None, *wanted: Any) -> Updates:
        """The current view as a PNG."""
        wish = _wish(*wanted)
        *_, panels = actions.panels(self.studio, _there(picture), wish)
        if wish.view == "layers":
            content = self._decomposition(_there(picture), wish)
        else:
            about = wish.model if wish.view == "methods" else f"{wish.model}  ·  {wish.method}"
            content = actions.sheet(_there(picture).views[wish.model], panels, about, opacity / 100)
        return self._parcel("classlens.png", "image/png", content)

    @_politely
    def save_npz(self, opacity: float, picture: Picture | None, *wanted: Any) -> Updates:
        """The raw maps of the current view as an NPZ."""
        wish = _wish(*wanted)
        *_, panels = actions.panels(self.studio, _there(picture), wish)
        content = actions.arrays(_there(picture), wish.model, panels)
        return self._parcel("classlens.npz", "application/octet-stream", content)

    def _parcel(self, name: str, kind: str, content: bytes) -> Updates:
        return {self.parts.parcel: {"name": name, "kind": kind, "content": base64.b64encode(content).decode()}}


def _told(event: gr.EventData, name: str) -> Any:
    """What an event says; a request may hold anything."""
    return event._data.get(name) if isinstance(event._data, dict) else None


def _together(*changes: Updates) -> Updates:
    """Changes one after the other; properties of a part that a later one does not name are kept."""
    merged: Updates = {}
    for part, change in (item for changed in changes for item in changed.items()):
        before = merged.get(part)
        merged[part] = {**before, **change} if isinstance(change, dict) and isinstance(before, dict) else change
    return merged


def _there(picture: Picture | None) -> Picture:
    if picture is None:
        raise ImageError("there is no picture: choose one")
    return picture


def questions(names: Sequence[tuple[str, int]], likely: Sequence[int]) -> list[tuple[str, int | str]]:
    """The possible questions about the selected class, as text and as values; likely rivals come first."""
    rivals = [names[i] for i in likely] + [found for found in names if found[1] not in likely]
    first = [("the class", ITSELF), ("the class rather than its rivals", RIVALS)]
    return [*first, *((f"rather than {name}", index) for name, index in rivals)]


def _wish(
    model: str, view: str, index: int, rival: int | None, question: int | str, method: str, methods: list[str]
) -> Wish:
    compared, than = index if rival is None else rival, None if question == ITSELF else question
    return Wish(model, view, index, compared, method, tuple(methods), than)
