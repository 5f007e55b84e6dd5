"""Pictures with bytes that were changed, cut or doubled: each is read as a picture or skipped with a reason."""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Iterator

import world
from arena import Arena, Wrong
from PIL import Image
from registry import attack

from classlens.app.studio import Studio
from classlens.errors import ClasslensError

_KINDS = {"png": "PNG", "jpg": "JPEG", "gif": "GIF", "webp": "WEBP", "tif": "TIFF", "bmp": "BMP"}


def fuzzed(arena: Arena) -> tuple[str, bytes]:
    """The ending and the bytes of a file that was a picture."""
    ending = arena.dice.choice(list(_KINDS))
    buffer = io.BytesIO()
    Image.fromarray(world.picture("red", arena.dice.randint(0, 9))[0]).save(buffer, _KINDS[ending])
    content = bytearray(buffer.getvalue())
    for _ in range(arena.dice.choice([0, 1, 3, 30])):
        content[arena.dice.randrange(len(content))] = arena.dice.randrange(256)
    cut = arena.dice.choice([len(content), len(content), arena.dice.randrange(len(content))])
    return ending, bytes(content[:cut]) + arena.dice.choice([b"", b"", bytes(content)])


@attack("fuzzed pictures: evaluate")
def fuzzed_evaluate(arena: Arena) -> Iterator[str]:
    """The pictures that were not touched keep the rows that they have without the others."""
    clean = arena.pictures("clean", 1)
    expected = arena.fresh(clean)
    for number in arena.rounds():
        data, out = arena.folder / f"data{number}" / "pics", arena.folder / f"run{number}"
        shutil.copytree(clean, data)
        for i in range(12):
            ending, content = fuzzed(arena)
            (data / arena.dice.choice(list(world.COLOURS)) / f"fuzzed{i}.{ending}").write_bytes(content)
        yield arena.evaluate(data, out).check_clean()
        for path in data.rglob("fuzzed*"):
            path.unlink()
        arena.check_rows(data, out, expected)
        yield "done"


@attack("fuzzed pictures: report")
def fuzzed_report(arena: Arena) -> Iterator[str]:
    """The page is made of the pictures that can be read."""
    for number in arena.rounds():
        data = arena.pictures(f"data{number}", 1)
        for i in range(6):
            ending, content = fuzzed(arena)
            (data / "green" / f"fuzzed{i}.{ending}").write_bytes(content)
        out = arena.folder / f"report{number}"
        yield arena.classlens(
            "report", "--data", data, "--model", "deadly:make", "--method", "gradcam", "--out", out
        ).check_clean()


@attack("fuzzed pictures: the page")
def fuzzed_page(arena: Arena) -> Iterator[str]:
    """What a visitor uploads is opened or refused by one line."""
    studio = Studio({"colours": world.make()})
    warnings.simplefilter("ignore")
    try:
        for _ in arena.rounds():
            _, content = fuzzed(arena)
            try:
                studio.open(content)
                yield "done"
            except ClasslensError as error:
                if "\n" in str(error):
                    raise Wrong(f"more than one line: {str(error)!r}") from error
                yield "refused"
    finally:
        studio.close()
