"""The layout of the page, its style and its few lines of script. `page` connects the parts to actions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

import gradio as gr

from classlens.app import markup
from classlens.app.actions import VIEWS
from classlens.app.offers import KINDS, LONGEST_TEXT
from classlens.app.studio import DEFAULT_METHOD, FIRST_METHODS, MAX_UPLOAD, MOST_METHODS, NOTHING, Studio
from classlens.core.method_text import AUTO
from classlens.methods import METHODS

_OPACITY = 80  # percent, as `classlens explain` draws


def _file(name: str) -> str:
    return (files("classlens.app") / name).read_text(encoding="utf-8")


HEAD = f"{markup.icon()}<script>{_file('script.js')}</script>"

# The colours are a separate layer over the grey picture: the browser blends them, nothing is recomputed.
OPACITY_JS = "(percent) => { document.documentElement.style.setProperty('--opacity', percent / 100); }"
SAVE_JS = "(parcel) => classlens.save(parcel)"
REMEMBER_JS = "(address) => classlens.remember(address)"
# The page's script may be loaded after the page: without its answer the page would stay empty.
RECALL_JS = """async () => {
  while (typeof classlens === "undefined") await new Promise((later) => setTimeout(later, 10));
  return [classlens.recall()];
}"""
ARRIVED_JS = "() => classlens.dim(false)"

# A screen reader reads a new map's heading. Boxes and pixels of the picture can be clicked.
_STAGE_JS = "element.setAttribute('aria-live', 'polite'); classlens.watchPicture(element, trigger);"


def style() -> str:
    """The page's style sheet."""
    return _file("style.css")


def theme() -> gr.Theme:
    """Greys and system fonts: no font is downloaded, and red and blue are reserved for evidence."""
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
    return gr.themes.Base(
        primary_hue="slate", secondary_hue="slate", neutral_hue="slate", radius_size="md", font=fonts, font_mono=mono
    )


def says(kind: str) -> str:
    """What can be chosen, above the choices of a kind of network."""
    return markup.piece("says", heading=KINDS[kind].heading, hint=KINDS[kind].hint)


def title(view: str, kind: str) -> str:
    """The title of a tab: "One class", or "One box" with a detector."""
    return VIEWS[view].replace("classes", KINDS[kind].several).replace("class", KINDS[kind].one)


class Parts:
    """The parts of the page, created in their order on the page within a `gr.Blocks`."""

    def __init__(self, studio: Studio, samples: Mapping[str, bytes], turn: object) -> None:
        self.folders = studio.folders
        self.turn = gr.State(turn)  # each visitor gets a copy
        self.picture = gr.State(None, time_to_live=3600)
        self.chosen = gr.State(0)
        self.view = gr.State(next(iter(VIEWS)))
        self.given = gr.State(NOTHING)
        gr.HTML(markup.piece("top"), elem_id="top")
        with gr.Row(elem_id="body"):
            with gr.Column(elem_id="side", scale=0, min_width=320):
                self._side(list(studio.models), samples)
            with gr.Column(elem_id="main", min_width=480):
                self._views()
                self._strip()
        self.parcel = gr.JSON(visible="hidden")  # a download on its way to the browser
        self.address = gr.Textbox(visible="hidden", elem_id="address")  # this view as text, see `links`

    def _side(self, models: list[str], samples: Mapping[str, bytes]) -> None:
        box = markup.piece("drop", limit=MAX_UPLOAD, samples=markup.sample_row(samples))
        self.drop = gr.HTML(box, js_on_load="classlens.watchPictures(element, trigger);", elem_id="drop")
        self.notice = gr.HTML("", elem_id="notice")
        self.model = gr.Dropdown(models, value=models[0], label="Network", visible=len(models) > 1, elem_id="model")
        self.says = gr.HTML(says(next(iter(KINDS))), elem_id="says")
        self.text = gr.Textbox(
            label="Ask for a text", placeholder="a photo of a dog", max_length=LONGEST_TEXT, lines=1, max_lines=1,
            visible=False, elem_id="text",
        )  # fmt: skip
        self.bars = gr.HTML("", js_on_load="classlens.watchClasses(element, trigger);", elem_id="bars")
        self.search = gr.Dropdown([], label="Or any other class", elem_id="search", interactive=True)
        self.question = gr.Dropdown([], label="Evidence for", elem_id="question", interactive=True)

    def _views(self) -> None:
        self.tabs: dict[str, gr.Tab] = {}
        self.stages: dict[str, gr.HTML] = {}
        folders = list(self.folders)
        if not folders:
            self.folder = gr.Dropdown([], visible=False)
        with gr.Tabs(elem_id="views") as self.tab_row:
            for view, title in VIEWS.items():
                if view == "concepts" and not folders:
                    continue
                with gr.Tab(title, id=view) as self.tabs[view]:
                    if view == "two":
                        self.rival = gr.Dropdown([], label="Compared with", elem_id="rival", interactive=True)
                    if view == "concepts":
                        self.folder = gr.Dropdown(
                            folders, value=folders[0], label="Found in the pictures of", elem_id="folder",
                            interactive=True,
                        )  # fmt: skip
                    if view == "methods":
                        self.methods = gr.Dropdown(
                            list(METHODS), value=list(FIRST_METHODS), multiselect=True, max_choices=MOST_METHODS,
                            label="Methods", elem_id="methods",
                        )  # fmt: skip
                    self.stages[view] = gr.HTML("", js_on_load=_STAGE_JS, elem_id=f"stage-{view}", elem_classes="stage")

    def _strip(self) -> None:
        with gr.Row(elem_id="strip"):
            self.opacity = gr.Slider(0, 100, _OPACITY, step=1, label="Colours: faint to strong", elem_id="opacity")
            self.method = gr.Dropdown([*METHODS, AUTO], value=DEFAULT_METHOD, label="Method", elem_id="method")
            self.png = gr.Button("Save picture (PNG)", elem_id="png", min_width=100)
            self.npz = gr.Button("Save maps (NPZ)", elem_id="npz", min_width=100)
