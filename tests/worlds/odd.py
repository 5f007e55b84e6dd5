"""Files that are no pictures but are called so, and names that are no text: what a data set on a real disk may hold."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LATIN = os.fsdecode(b"caf\xe9.png")  # a name as Latin-1 writes it: no UTF-8
SHOWN = r"caf\udce9.png"

REFUSED = {"dir.png": "is a folder", "zero.png": "pipe or a device", "pipe.png": "pipe or a device"}
if Path("/proc/self/mem").exists():
    REFUSED["io.png"] = "cannot be read: [Errno 5]"


@contextmanager
def odd_files(folder: Path) -> Iterator[None]:
    """A folder, a device, a FIFO and a file whose disk fails; who waits for the FIFO is let go, and the test fails."""
    (folder / "dir.png").mkdir()
    (folder / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.png")
    if "io.png" in REFUSED:
        (folder / "io.png").symlink_to("/proc/self/mem")  # a regular file; reading its first byte fails with EIO

    over, waited = threading.Event(), threading.Event()

    def let_go() -> None:
        while not over.wait(0.5):
            with suppress(OSError):  # nobody reads
                os.close(os.open(folder / "pipe.png", os.O_WRONLY | os.O_NONBLOCK))
                waited.set()

    rescue = threading.Thread(target=let_go)
    rescue.start()
    try:
        yield
    finally:
        over.set()
        rescue.join()
    assert not waited.is_set(), "something waited for the FIFO"


def rename_latin(picture: Path) -> Path:
    """The same file under a name that is no UTF-8."""
    return Path(shutil.move(picture, picture.with_name(LATIN)))


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; there is nearly nothing behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )
