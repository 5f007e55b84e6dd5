"""The server of the page: which requests it allows, what it sends, and how it stops.

The page needs few of gradio's URLs, and none that handles files: a picture arrives in the body of a request and is
decoded in memory; pictures and downloads are sent in responses. Only those URLs are allowed (`RequestFilter`). All
others, above all gradio's file URLs, are refused before gradio sees them.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from classlens.errors import ClasslensError

if TYPE_CHECKING:
    from types import FrameType

    import uvicorn
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from classlens.app.studio import Studio

# The URLs that the page's own script requests. No file=, upload, proxy=, stream, component_server, deep_link, ...
_OPEN = {
    "GET": re.compile(
        r"/|/(theme\.css|favicon\.ico|manifest\.json|config)|/(assets|static)/(?!.*\.\.)[\w./-]+"
        r"|/gradio_api/(startup-events|info|heartbeat/\w+|queue/data|theme\.css)"
    ),
    "POST": re.compile(r"/gradio_api/(queue/join|cancel|reset)/?"),
}
_OPEN["HEAD"] = _OPEN["GET"]

# The browser may load nothing from other servers, whatever a library's script requests.
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_LOCAL = ("localhost", "127.0.0.1", "::1")
_PATIENCE = 1.5  # seconds that work may take to end after Ctrl-C
_OUTSIDE = re.compile(rb"<(meta|link)\b[^>]*https?://[^>]*>")  # gradio's own preview pictures for social networks


class ServerError(ClasslensError):
    """The page cannot be served."""


def serve(names: Sequence[str], host: str, port: int, device: str, folders: Sequence[str] = ()) -> None:
    """Serve the page with these networks until Ctrl-C; concepts are found in the pictures of the folders."""
    from classlens.data.layouts import open_dataset, told_apart

    known = told_apart([open_dataset(folder) for folder in folders])  # refuses what is no folder of pictures
    with ExitStack() as stack:
        listening = stack.enter_context(_listen(host, port))
        # gradio wants a folder of its own, and asks for it when imported. The page puts only its concepts there.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="classlens-"))
        os.environ["GRADIO_TEMP_DIR"] = folder
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as tidy an end as that of Ctrl-C
        _quiet()
        try:
            import gradio  # noqa: F401
            import uvicorn
        except ImportError:
            raise ServerError("the page needs gradio: pip install 'classlens[web]'") from None
        from classlens.app.studio import Studio, samples
        from classlens.models import load

        studio = Studio(
            {name: load(name, device=device) for name in dict.fromkeys(names)},
            {dataset.name: data for dataset, data in zip(known, folders, strict=True)},
            Path(folder) / "concepts",
        )
        stack.callback(studio.close)
        studio.prefetch(
            studio.open(next(iter(samples().values()))), next(iter(studio.models)), 1
        )  # the first view of the page
        config = uvicorn.Config(
            application(studio, host), log_level="error", access_log=False, server_header=False,
            timeout_graceful_shutdown=1,  # a browser's open page keeps a connection for as long as it is open
        )  # fmt: skip
        _announce(listening, studio)
        server = uvicorn.Server(config)
        # At the end it logs an error for every page that is still open in a browser.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)
        with suppress(KeyboardInterrupt), _ends_in_time(server, folder):
            server.run(sockets=[listening])
        typer.echo("\nstopped")


@contextmanager
def _ends_in_time(server: uvicorn.Server, folder: str) -> Iterator[None]:
    """Once a signal came, a computation that goes on ends with the process; a thread cannot be stopped otherwise."""

    def give_up() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def stop(number: int, frame: FrameType | None) -> None:
        if not ending.is_alive():
            ending.start()
        handle(number, frame)

    ending, handle = threading.Timer(_PATIENCE, give_up), server.handle_exit
    ending.daemon = True
    server.handle_exit = stop  # type: ignore[method-assign, assignment]
    yield


def application(studio: Studio, host: str = "127.0.0.1") -> FastAPI:
    """The page behind its doors, as an ASGI application that listens on `host`."""
    _quiet()
    import gradio
    from fastapi import FastAPI

    from classlens.app.layout import HEAD, style, theme
    from classlens.app.page import build

    page = build(studio)
    page.state_session_capacity = 100  # visitors whose picture is kept in memory
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestFilter, host=host, functions=frozenset(page.fns))
    gradio.mount_gradio_app(
        app, page, path="/", footer_links=[], run_history=False, show_error=False, ssr_mode=False, pwa=False,
        mcp_server=False, enable_monitoring=False, theme=theme(), css=style(), head=HEAD,
    )  # fmt: skip
    return app


class RequestFilter:
    """A request filter that allows only what the page needs."""

    def __init__(self, app: ASGIApp, host: str, functions: frozenset[int]) -> None:
        self._app = app
        self._functions = functions
        self._names = {*_LOCAL, host.lower()} | (set() if host in _LOCAL else {n.lower() for n in _own_names()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":  # no websockets
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_ours(scope):
            await _refuse(send, 403, "the page is not served under this name; use the address that the command shows")
            return
        rule = _OPEN.get(scope["method"])
        if rule is None or not rule.fullmatch(scope["path"]):
            await _refuse(send, 404, "the page has no such URL")
            return
        if scope["method"] == "POST":
            body = await _body(receive)
            joins = scope["path"].rstrip("/").endswith("/join")
            if body is None or not _plain(body, self._functions if joins else None):
                known = (400, "the request is not one of the page's")
                await _refuse(send, *(known if body is not None else (413, "the request is too large")))
                return
            receive = _again(body, receive)
        if scope["path"] == "/":  # without its query, in which gradio would look for the name of a saved state
            await self._app({**scope, "query_string": b""}, receive, _Page(send))
        else:
            await self._app(scope, receive, _Answer(send))

    def _is_ours(self, scope: Scope) -> bool:
        """Whether a request names this machine, so that no other site can pass itself off as the page.

        Such a site has a name that its owner points at this machine (DNS rebinding). A number cannot be pointed.
        """
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1:
            return False
        name = re.sub(r":\d*$", "", hosts[0]).strip("[]").lower()
        return name in self._names or _is_number(name)


def _own_names() -> set[str]:
    name = socket.gethostname()
    return {name, f"{name}.local", socket.getfqdn()}


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _plain(body: bytes, functions: frozenset[int] | None = None) -> bool:
    """Whether a request's inputs are plain values, as the page's are, for one of the page's functions.

    In an object, gradio would look for a file on this machine or a URL to fetch.
    """
    try:
        asked = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return False
    if not isinstance(asked, dict):
        return False
    data, event = asked.pop("data", None) or [], asked.pop("event_data", None) or {}
    if functions is not None and (type(asked.get("fn_index")) is not int or asked["fn_index"] not in functions):
        return False
    # What tells of an event is an object itself; the rest are words and numbers.
    told = event.values() if isinstance(event, dict) else (None, {})
    return isinstance(data, list) and all(_is_value(value) for value in (*data, *told, *asked.values()))


def _is_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str | int | float | None) for item in value)
    return not isinstance(value, dict)


async def _body(receive: Receive) -> bytes | None:
    """The body of a request, or None if it is larger than the upload limit."""
    from classlens.app.studio import MAX_UPLOAD

    parts, size = [], 0
    while True:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_UPLOAD * 4 // 3 + 2**16:  # base64 turns three bytes into four
            return None
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Make a body readable a second time."""
    left = [body]

    async def read() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return read


class _Answer:
    """Forwards a response with our headers."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = _with_headers(message, _HEADERS)
        await self._send(message)


class _Page:
    """Forwards the page without the external URLs in its head."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body") or self._start is None:
            return
        page = _OUTSIDE.sub(b"", self._body)  # empty for a HEAD request
        await self._send(_with_headers(self._start, _HEADERS | {"content-length": str(len(page))}))
        await self._send({"type": "http.response.body", "body": page})


def _with_headers(start: Message, headers: dict[str, str]) -> Message:
    ours = [(name.encode(), value.encode()) for name, value in headers.items()]
    theirs = [(name, value) for name, value in start.get("headers", []) if name.lower().decode() not in headers]
    return {**start, "headers": theirs + ours}


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def _quiet() -> None:
    """Switch off gradio's analytics and version checks."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ServerError(f"cannot listen on {host}, port {port} ({error}): choose another --host or --port") from None


def _announce(listening: socket.socket, studio: Studio) -> None:
    host, port = listening.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    typer.echo(f"classlens shows {', '.join(studio.models)} at http://{where}:{port} (Ctrl-C stops it)")
    if host not in ("127.0.0.1", "::1"):
        typer.echo("note: anyone who can reach this machine can use the page; it has no password")
