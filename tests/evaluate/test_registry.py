"""What the registry promises of every test, and that one object is enough to add one."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from classlens.cli import app
from classlens.evaluate import TESTS, Settings, SettingsError, options_of_tests, run
from classlens.evaluate.metrics import Metric, floats, mean
from classlens.evaluate.registry import (
    NEEDS,
    Config,
    Subject,
    Test,
    Unit,
    Values,
    flag_of,
    option,
    register,
)
from classlens.evaluate.scene import Explained, Scene
from classlens.evaluate.settings import PLAIN
from classlens.evaluate.store import Store, schemas
from classlens.methods import METHODS, Case, Result
from classlens.selfsup.evaluation import OFFERS

SOURCES = Path(__file__).resolve().parents[2] / "src" / "classlens"
WIDE = {"COLUMNS": "240"}  # help is not wrapped
each_test = pytest.mark.parametrize("test", TESTS.values(), ids=list(TESTS))


def configs(test: Test) -> list[Config]:
    """Those of its default options, where masks are of one object."""
    subject = Subject(None, None, frozenset())  # type: ignore[arg-type]
    found = test.variants(test.options(), subject)
    return [Config(test.name, tuple((values | dict(test.constants)).items()), test.options()) for values in found]


@pytest.fixture
def registry() -> Iterator[None]:
    """Takes out again what a test of ours has put in."""
    before = dict(TESTS)
    yield
    TESTS.clear()
    TESTS.update(before)


# ------------------------------------------------------------------------------------------------------- the promises


@each_test
def test_every_test_says_what_it_is(test: Test) -> None:
    assert test.question.endswith("?")
    assert test.needs <= NEEDS.keys()
    assert test.serves(PLAIN.offers) or test.serves(OFFERS)
    assert {"model", "method", "image", "config", *test.columns} <= set(schemas()[test.kind].names)
    for config in configs(test):
        assert test.title(config)
        assert test.remark(config).endswith(".")
        assert test.metrics(config)
        assert {metric.better for metric in test.metrics(config)} <= {1, -1, 0}
        assert config.to_json()["test"] == test.kind
        json.dumps(config.to_json())
    assert (test.picture_score is None) == (not test.picture_score_name)
    assert test.picture_score is None or "explained" in test.columns
    assert test.group is None or test.group in test.columns


@each_test
def test_every_module_holds_the_test_of_its_name(test: Test) -> None:
    assert (SOURCES / "evaluate" / "tests" / f"{test.name}.py").is_file()


@each_test
def test_the_name_of_a_test_stands_in_its_module_alone(test: Test) -> None:
    """Other rooms have things of these names: a family of methods, a figure, a key of COCO, a measure of trust."""
    apart = "methods", "render", "interop", "trust"
    others = [path for path in SOURCES.rglob("*.py") if path.relative_to(SOURCES).parts[0] not in apart]
    for path in others:
        constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert test.name not in constants or path.stem == test.name, path


@each_test
def test_its_options_are_flags_of_the_command(test: Test) -> None:
    command = ["evaluate"] if test.serves(PLAIN.offers) else ["selfsup", "evaluate"]
    offers = PLAIN.offers if test.serves(PLAIN.offers) else OFFERS
    said = CliRunner().invoke(app, [*command, "--help"], env=WIDE).output
    assert f"{test.name}: {test.question}" in " ".join(said.replace("│", " ").split())
    for field in fields(test.options):
        flag = flag_of(field)
        line = next(line for line in said.splitlines() if line.startswith(f"│    --{field.name.replace('_', '-')} "))
        assert not flag.needs or flag.needs in offers
        owners, _, words = line.partition(": ")  # a flag may be that of several tests
        assert test.name in owners.casefold().replace(",", " ").split()
        assert words.startswith(flag.help.replace("`", "")[:40])


def test_flags_that_make_no_sense_with_an_explainer_are_not_there() -> None:
    said = CliRunner().invoke(app, ["selfsup", "evaluate", "--help"], env=WIDE).output
    assert "--fill" in said
    assert "--threshold" not in said
    assert "the most likely class of the contrast" in said  # its own --explain, not that of a test
    assert "planted" not in CliRunner().invoke(app, ["evaluate", "--help"], env=WIDE).output


def test_a_test_that_the_explainer_cannot_serve_is_refused() -> None:
    with pytest.raises(SettingsError, match="planted needs maps that contrast an image with its neighbour"):
        Settings(tests=("planted",), data=("x",), methods=("agf",))
    with pytest.raises(SettingsError, match="no test has an option 'colour'"):
        options_of_tests(colour="red")


HASHES = {
    "perturbation": ["50fb1fc15da4"],
    "segmentation": ["7d121c7a4783"],
    "pointing": ["13d080a28d02", "ad1cf7b5be0b", "4ec72c3f74ac"],
    "sanity": ["792bead42eb0"],
}  # fmt: skip


@pytest.mark.parametrize("name", HASHES)
def test_rows_of_older_folders_are_found_again(name: str) -> None:
    """The fingerprints that runs with default settings have had from the beginning."""
    found = [replace(c, values=(*c.values, ("frame", "model"), ("seed", 0))) for c in configs(TESTS[name])]
    assert [config.hash for config in found] == HASHES[name]


# ------------------------------------------------------------------------------------------------ one object is enough


@dataclass(frozen=True)
class FocusOptions:
    """How much of the evidence."""

    part: tuple[str, ...] = option(("0.5",), "share of the evidence that is looked for", each="part")
    focus_images: int = option(9, "pictures at most", least=1, decides=False)


def focus_units(subject: Subject, items: Any, config: Config, predictions: Any) -> list[Unit]:
    return [Unit(item.name, (item,), (item.name,)) for item in items[: config.options.focus_images]]


def focus(scene: Scene, config: Config, found: Explained) -> list[Values]:
    positive = found.of("predicted").double().clamp(min=0).flatten(1).sort(1, descending=True).values
    enough = positive.cumsum(1) < float(config["part"]) * positive.sum(1, keepdim=True)
    areas = enough.double().mean(1).tolist()
    return [{"explained": e, "area": area} for e, area in zip(found.explained("predicted"), areas, strict=True)]


FOCUS = Test(
    name="focus",
    question="how small is the part of the picture that holds the evidence?",
    columns={"explained": "int32", "area": "float64"},
    metrics=lambda config: (Metric("area", -1, lambda rows: mean(floats(rows, "area"))),),
    title=lambda config: f"Focus ({config['part']})",
    remark=lambda config: "Area that holds the evidence, in per cent.",
    options=FocusOptions,
    units=focus_units,
    score=focus,
    picture_score=lambda rows: floats(rows, "area"),
    picture_score_name="the area",
)


def evaluate(*words: str) -> str:
    done = CliRunner().invoke(app, ["evaluate", *words], env=WIDE)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.usefixtures("registry")
def test_one_object_adds_a_test_to_the_command(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(FOCUS)
    assert "Focus: share of the evidence that is looked for (commas)." in evaluate("--help")
    words = ["focus", "--model", "world:make", "--methods", "gradcam,lrp", "--device", "cpu", "--threads", "1"]
    common = (*words, "--data", str(labelled), "--out", str(tmp_path))
    said = evaluate(*common, "--part", "0.5,0.9", "--focus-images", "4")
    assert "Focus (0.5): classes" in said
    assert "Focus (0.9): classes" in said
    rows = Store(tmp_path).read("focus").to_pylist()
    assert len(rows) == 2 * 2 * 4
    area = {(r["method"], r["image"], r["config"]): r["area"] for r in rows}
    assert min(area.values()) > 0
    page = (tmp_path / "report.html").read_text()
    assert "The number under each map is its score on this image, from 0 to 1: the area." in page

    asked: list[int] = []
    monkeypatch.setitem(TESTS, "focus", replace(FOCUS, score=lambda *a: asked.append(len(a[0].seen)) or focus(*a)))
    evaluate(*common, "--part", "0.5,0.9", "--focus-images", "4")
    assert not asked  # nothing is done twice
    evaluate(*common, "--focus-images", "6")
    after = {(r["method"], r["image"], r["config"]): r["area"] for r in Store(tmp_path).read("focus").to_pylist()}
    assert len(after) == len(area) + 2 * 2
    assert {key: after[key] for key in area} == area


@pytest.mark.usefixtures("registry")
def test_it_runs_beside_the_others(labelled: Path, masked: Path, tmp_path: Path) -> None:
    register(FOCUS)
    common = {"data": (str(labelled), str(masked)), "methods": ("gradcam",), "model": "world:make", "limit": 5}
    report = run(
        Settings(
            tests=tuple(name for name, test in TESTS.items() if name not in ("planted", "quantus") and not test.own),
            everything=True,
            **common,
        ),
        tmp_path / "a",
    )
    assert {table.config.test for table in report.tables} == {
        "perturbation",
        "idsds",
        "road",
        "segmentation",
        "pointing",
        "disconnected",
        "cue",
        "sanity",
        "repeatability",
        "removal",
        "focus",
    }
    alone = run(Settings(tests=("focus",), **common), tmp_path / "b")
    together = next(table for table in report.tables if table.config.test == "focus")
    assert next(iter(alone.tables)).rows == together.rows


@pytest.mark.usefixtures("registry")
def test_a_test_alone_has_batches_of_its_own(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks for does not show in the rows of others, even where a method's maps depend on that."""
    entry = METHODS["random"]

    def counting(case: Case, **options: Any) -> Result:
        result = entry.run(case, **options)
        return replace(result, maps=result.maps * case.targets.shape[1] + case.images.mean(1, keepdim=True))

    monkeypatch.setitem(METHODS, "counting", replace(entry, name="counting", run=counting))
    wanting = replace(
        FOCUS, classes=lambda scene, config: {"predicted": scene.predicted, "next": (scene.predicted + 1) % 3}
    )
    rows = []
    for test in (None, replace(wanting, alone=True), wanting):
        TESTS.pop("focus", None)
        tests = ("perturbation",) if test is None else ("perturbation", register(test).name)
        settings = Settings(tests=tests, data=(str(labelled),), methods=("counting",), model="world:make", limit=4)
        run(settings, tmp_path / str(len(rows)))
        rows.append(Store(tmp_path / str(len(rows))).read("perturbation").to_pylist())
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


@pytest.mark.usefixtures("registry")
def test_a_test_that_fails_to_declare_itself_is_told() -> None:
    with pytest.raises(TypeError, match="focus: give score or score_together"):
        register(replace(FOCUS, score=None))
    with pytest.raises(TypeError, match="focus needs luck; known are masks"):
        register(replace(FOCUS, needs=frozenset({"luck"})))

    @dataclass(frozen=True)
    class Undeclared:
        part: float = 0.5

    with pytest.raises(TypeError, match="declare part with option"):
        register(replace(FOCUS, options=Undeclared))


@pytest.mark.usefixtures("registry")
def test_two_tests_may_share_a_flag_but_not_disagree_about_it() -> None:
    register(FOCUS)
    register(replace(FOCUS, name="blur"))
    assert "Blur, focus: share of the evidence" in evaluate("--help")

    @dataclass(frozen=True)
    class Other:
        part: float = option(0.5, "something else")

    register(replace(FOCUS, name="blur", options=Other))
    with pytest.raises(TypeError, match="focus and blur declare --part differently"):
        CliRunner().invoke(app, ["evaluate", "--help"], catch_exceptions=False)


@pytest.mark.usefixtures("registry")
def test_a_test_cannot_take_a_flag_that_the_command_has() -> None:
    @dataclass(frozen=True)
    class Taken:
        limit: int = option(3, "of something")

    register(replace(FOCUS, options=Taken))
    with pytest.raises(TypeError, match="focus declares --limit, which the command has already"):
        CliRunner().invoke(app, ["evaluate", "--help"], catch_exceptions=False)


def test_a_flag_of_another_test_is_refused(labelled: Path, tmp_path: Path) -> None:
    words = ["evaluate", "sanity", "--data", str(labelled), "--out", str(tmp_path / "run"), "--explain", "target"]
    done = CliRunner().invoke(app, words, env=WIDE)
    assert done.exit_code == 2
    assert "--explain is for perturbation; do not use it with sanity" in done.output
    assert not (tmp_path / "run").exists()


def test_options_by_their_names() -> None:
    assert options_of_tests() == ()
    made, also = options_of_tests(max_grids=3)  # of pointing, and of another test with such a flag
    assert also.max_grids == 3
    assert made.max_grids == 3
    chosen = Settings(tests=("pointing", "sanity"), data=("x",), methods=("agf",), options=(made,))
    assert chosen.options_of("pointing") is made
    assert chosen.options_of("sanity").sanity_images == 50
    assert chosen.to_json()["max_grids"] == 3
