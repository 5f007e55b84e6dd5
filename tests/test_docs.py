"""What the docs say holds: examples run, commands parse, links lead somewhere, pages from the code are fresh."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image

from classlens.cli import app
from classlens.core.rules import RULES
from classlens.data.layouts import LAYOUTS
from classlens.demo import picture
from classlens.evaluate import TESTS
from classlens.methods import METHODS, method_names
from classlens.models._torchvision import import_torchvision
from networks import build

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- not run: (?P<why>[^\n]+) -->\n+ *)?```(?P<language>\w*)\n(?P<code>.*?)^ *```$", re.M | re.S
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


# ------------------------------------------------------------------------------------------------ pages from the code


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return tool("write_docs")


GENERATED = ["methods.md", "commands.md", "commands-explain.md", "commands-evaluate.md", "commands-train.md"]


@pytest.mark.parametrize("name", GENERATED)
def test_pages_from_the_code_are_fresh(name: str, writer: ModuleType) -> None:
    assert (ROOT / "docs" / name).read_text() == writer.PAGES[name](), "run python tools/write_docs.py"


MINUS = ", method − agf"


def test_tables_against_agf_mark_who_is_ahead(tmp_path: Path) -> None:
    rows = [
        ("agf", "", 80, 78, 82), ("ahead", "", 85, 83, 87), ("level", "", 79, 77, 81), ("behind", "", 60, 58, 62),
        ("ahead", MINUS, 5, 3, 7), ("level", MINUS, -1, -3, 1), ("behind", MINUS, -20, -24, -16),
    ]  # fmt: skip
    lines = ["model,data,test,settings,method,metric,better,value,low,high,n"]
    for method, minus, *numbers in rows:
        measured = ",".join(map(str, numbers))
        lines.append(f'net@ab,pets,segmentation,"Segmentation{minus}",{method},pixel accuracy,more,{measured},40')
    (tmp_path / "table.csv").write_text("\n".join(lines))
    table = tool("against_agf").tables([tmp_path])
    assert table.splitlines()[-4:] == [
        "| agf | 80.0 [78.0, 82.0] |", "| ahead | **85.0** [+3.0, +7.0] ▲ |", "| level | 79.0 [-3.0, +1.0] = |",
        "| behind | 60.0 [-24.0, -16.0] |",
    ]  # fmt: skip
    (tmp_path / "table.csv").write_text("\n".join(lines[:5]))
    with pytest.raises(SystemExit, match="evaluate with --against agf"):
        tool("against_agf").tables([tmp_path])


def test_tables_of_ranked_classes_mark_better_and_worse(tmp_path: Path) -> None:
    rows = [
        ("agf", "", "AP, rank 1", "more", 95, 93, 97), ("agf", "", "AP, rank 2", "more", 94, 92, 96),
        ("agf", "", "change, rank 1", "less", -2, -3, -1), ("agf", "", "correlation, rank 2", "", 0.9, 0.8, 1),
        ("cam", "", "AP, rank 1", "more", 90, 88, 92), ("cam", "", "AP, rank 2", "more", 95, 92, 97),
        ("cam", "", "change, rank 1", "less", -4, -5, -3), ("cam", "", "correlation, rank 2", "", -0.2, -0.3, 0),
        ("cam", MINUS, "AP, rank 1", "more", -5, -7, -3), ("cam", MINUS, "AP, rank 2", "more", 1, -1, 3),
        ("cam", MINUS, "change, rank 1", "less", -2, -3, -1),
        ("cam", MINUS, "correlation, rank 2", "", -1.1, -1.3, -1),
    ]  # fmt: skip
    lines = ["model,data,test,settings,method,metric,better,value,low,high,n"]
    for method, minus, metric, better, *numbers in rows:
        measured = ",".join(map(str, numbers))
        lines.append(f'net@ab,pets,ranked,"Ranked classes (pets){minus}",{method},"{metric}",{better},{measured},40')
    (tmp_path / "table.csv").write_text("\n".join(lines))
    table = tool("ranked_tables").table(tmp_path).splitlines()
    assert table[0] == "**net** (40 images)"
    assert table[-2:] == [
        "| agf | 95.0 94.0 |  |  | −2.00 |  | 0.90 |",
        "| cam | 90.0▼ 95.0 |  |  | −4.00▲ |  | −0.20 |",
    ]
    (tmp_path / "table.csv").write_text("\n".join(lines[:9]))
    with pytest.raises(SystemExit, match="evaluate ranked with --against agf"):
        tool("ranked_tables").table(tmp_path)


def test_tables_of_known_answers_have_all_networks_in_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    for network, value, low, high in (("one", -0.2, -0.3, -0.1), ("two", 0.1, -0.1, 0.3)):
        run = tmp_path / network
        run.mkdir()
        (run / "table.csv").write_text(
            "model,data,test,settings,method,metric,better,value,low,high,n\n"
            f"{network}@ab,pets,idsds,IDSDS,agf,rank correlation,more,0.5,0.4,0.6,8\n"
            f"{network}@ab,pets,idsds,IDSDS,cam,rank correlation,more,{0.5 + value},0.1,0.9,8\n"
            f'{network}@ab,pets,idsds,"IDSDS{MINUS}",cam,rank correlation,more,{value},{low},{high},8\n'
        )
    truth = tool("truth_tables")
    assert truth.table("idsds", *truth.read([tmp_path / "one", tmp_path / "two"])["idsds"]).splitlines() == [
        "**idsds**: one (8), two (8)", "", "| method | rank correlation |", "|---|---|",
        "| agf | 0.50 0.50 |", "| … 95 % | 0.40…0.60 0.40…0.60 |", "| cam | 0.30▼ 0.60 |",
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- examples


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page in one language, but for what is marked as not to be run."""
    found = [match for match in FENCE.finditer(page.read_text()) if match["language"] == language]
    return [textwrap.dedent(match["code"]) for match in found if not match["why"]]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What somebody has who tries the examples: a photograph, a folder of them, a network and its input."""
    for name in ("photo.jpg", "other.jpg"):
        (tmp_path / name).write_bytes(picture())
    small = Image.open(tmp_path / "photo.jpg").resize((96, 96))
    for folder in ("photos", "pairs"):
        (tmp_path / folder).mkdir()
    for turn in range(2):
        small.rotate(90 * turn).save(tmp_path / "photos" / f"{turn}.jpg")
    small.save(tmp_path / "pairs" / "cat.jpg")
    Image.fromarray(np.eye(96, dtype=np.uint8)).save(tmp_path / "pairs" / "cat.mask.png")
    monkeypatch.chdir(tmp_path)
    import_torchvision()  # with our care for its compiled operations; pytorch_grad_cam imports it without
    tables = [(table, dict(table)) for table in (METHODS, RULES, LAYOUTS, TESTS)]  # examples may add to them
    yield {"my_model": build("residual"), "images": torch.rand(2, 3, 64, 64), "torch": torch, "__name__": "example"}
    for table, before in tables:
        table.clear()
        table.update(before)  # type: ignore[arg-type]


ELSEWHERE = {"multilabel.md": "needs Pascal VOC; tests/training runs the same on small pictures"}
RUNNABLE = [page for page in PAGES if blocks(page, "python") and page.name not in ELSEWHERE]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda path: path.name)
def test_examples_run(page: Path, reader: dict[str, Any]) -> None:
    """All examples of a page, one after the other, as a reader would paste them."""
    for code in blocks(page, "python"):
        exec(compile(code, f"{page.name}: {code.splitlines()[0]}", "exec", dont_inherit=True), reader)


# ----------------------------------------------------------------------------------------------------------- commands


def command_lines(page: Path) -> list[str]:
    """Every line of a page's code that calls classlens."""
    text = page.read_text()
    code = [match["code"] for match in FENCE.finditer(text) if match["language"] in ("", "bash", "console")]
    code += re.findall(r"^    (classlens .*)$", text, re.M)
    joined = "\n".join(code).replace("\\\n", "")
    return [line.strip() for line in joined.splitlines() if line.strip().startswith("classlens ")]


def command_mentions(page: Path) -> list[str]:
    """Commands with options in the text. They may leave out what they are not about: `classlens explain --trace`."""
    spans = re.findall(r"`(classlens [^`]*? --[^`]*)`", FENCE.sub("", page.read_text()))
    return [" ".join(span.split()) for span in spans if "COMMAND" not in span]


COMMAND: Any = typer.main.get_command(app)
TAKE_AUTO = ("explain", "report", "masks")  # the commands that use the method of `classlens choose`


def parse(line: str) -> None:
    """Reads a command line as the command would, and stops before doing anything."""
    words, command = shlex.split(line, comments=True)[1:], COMMAND
    while hasattr(command, "commands"):
        while words[0].startswith("-"):  # --debug
            words.pop(0)
        command = command.commands[words.pop(0)]
    context = command.make_context(command.name, words)
    for name in ("method", "methods"):
        said = context.params.get(name)
        if said and not (said == "auto" and command.name in TAKE_AUTO):
            method_names(said)


@each_page
def test_commands_parse(page: Path) -> None:
    for line in (lines := command_lines(page)) + command_mentions(page):
        try:
            parse(line)
        except Exception as error:
            if line in lines or type(error).__name__ != "MissingParameter":
                raise AssertionError(f"{page.name}: {line}\n{type(error).__name__}: {error}") from error


def test_a_wrong_command_is_noticed() -> None:
    for line in ("classlens explain a.jpg --clas x", "classlens explian a.jpg", "classlens compare a.jpg --methods ag",
                 "classlens compare a.jpg --methods auto"):  # fmt: skip
        with pytest.raises(Exception, match=r"."):
            parse(line)


# -------------------------------------------------------------------------------------------------------------- links


@each_page
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@each_page
def test_pages_speak_of_the_product_alone(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(?:work|home|root|tmp|mnt|Users)/|localhost:\d", page.read_text())


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        code = "".join(match["code"] for match in FENCE.finditer(page.read_text()))
        named = set(re.findall(r"^ *make (\w+)", code, re.M))
        assert named <= targets, f"{page.name} names make {', '.join(named - targets)}"


# --------------------------------------------------------------------------------------------------------------- site


FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "video": "src"}


class Loads(HTMLParser):
    """Collects what a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("canonical", "next", "prev"):
            return  # addresses that are named, not fetched
        self.addresses += [values[name] or "" for name in (FETCHED.get(tag), "srcset") if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the site is built with mkdocs-material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(  # not --quiet: what is not logged is not counted, and --strict would let it pass
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


def test_site_has_every_page_and_the_reference(site: Path) -> None:
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in site.glob("*.html")}
    reference = (site / "api-explain.html").read_text()
    assert 'id="classlens.explanation.explain"' in reference
    assert "Show where a network finds each class" in reference


def test_search_finds_how_to_install_and_my_own_model(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    # Without its stop words "my own model" would be "model", and stems hide whole words: "install" finds nothing.
    assert index["config"]["pipeline"] == ["trimmer"]
    for words, page in ((["install"], "install.html"), (["my", "own", "model"], "models.html")):
        found = [
            entry["location"]
            for entry in index["docs"]
            if all(word in f"{entry['title']} {entry['text']}".lower().split() for word in words)
            and entry.get("boost", 1) > 1
        ]
        assert page in found


def test_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.addresses
        for address in loads.addresses:
            assert not re.match(r"(https?:)?//", address), f"{page.name} fetches {address}"
            if not address.startswith("data:") and page.name != "404.html":  # that one's addresses begin at the root
                assert (page.parent / address.partition("?")[0].partition("#")[0]).exists(), f"{page.name}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text()), sheet.name


def test_reference_shows_examples_as_code_and_fields_with_their_comments(site: Path) -> None:
    docstrings = tool("docstrings")
    text = "Says.\n\n    >>> 1 + 1\n    2\n\nMore."
    assert docstrings.fenced(text) == "Says.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    assert (
        docstrings.described({"a": ["a: int  # how many"], "b": ["b: int"]}) == "Attributes:\n    a: how many\n    b: –"
    )
    assert docstrings.described({"a": ["a = f()  # type: ignore"]}) == ""
    reference = (site / "api-explain.html").read_text()
    assert "<blockquote>" not in reference
    assert "positive for the class, negative against it" in reference


# ------------------------------------------------------------------------------------------------------ beside the docs


def test_what_stands_beside_the_docs_agrees() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with mkdocs")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version("classlens")
    assert version("classlens") in (ROOT / "CHANGELOG.md").read_text()
    assert [author["family-names"] for author in citation["preferred-citation"]["authors"]] == ["Gur", "Ali", "Wolf"]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in local["hooks"]:  # the same tools as make's, from the same place, and no network
        assert hook["language"] == "system"
        assert hook["entry"].split()[0].removeprefix(".venv/bin/") in re.findall(r"\$\(BIN\)/([\w-]+)", makefile)


def test_the_picture_of_the_house_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "house.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
