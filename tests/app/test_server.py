"""The page's doors: what the server answers, and what it does not."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from app import small
from classlens.app.server import ServerError, application
from classlens.app.server import serve as run
from classlens.app.studio import MAX_UPLOAD
from classlens.cli import main


@pytest.fixture(scope="module")
def client():
    studio = small.studio()
    with small.gradio_leaks():
        app = application(studio)
    with TestClient(app, base_url="http://127.0.0.1:7860") as made:
        yield made
    studio.close()


def test_the_page_is_served_and_names_nobody_else(client):
    answer = client.get("/")
    assert answer.status_code == 200
    addresses = set(re.findall(r"https?://[^\s\"'<>\\]+", answer.text))
    assert {re.match(r"https?://[^/]+", address)[0] for address in addresses} <= {
        "http://127.0.0.1:7860", "http://www.w3.org",  # itself, and the name (no address) of the SVG format
    }  # fmt: skip
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_fonts_and_styles_come_from_here(client):
    css = client.get("/theme.css").text
    assert "url(" not in css or not re.search(r"url\(['\"]?https?:", css)
    assert "googleapis" not in css


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        f"/gradio_api/file={__file__}",
        "/gradio_api/file=README.md",
        "/gradio_api/file=pyproject.toml",
        "/gradio_api/file/etc/passwd",
        "/file=/etc/passwd",
        "/gradio_api/proxy=http://127.0.0.1/",
        "/gradio_api/stream/a/b/c/playlist.m3u8",
        "/gradio_api/deep_link",
        "/gradio_api/openapi.json",
        "/static/../../../../etc/passwd",
        "/assets/..%2f..%2f..%2fetc/passwd",
        "/svelte/x",
        "/monitoring",
        "/docs",
    ],
)
def test_no_file_of_the_server_can_be_fetched(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.text == "the page has no such URL"


@pytest.mark.parametrize(
    "path", ["/gradio_api/upload", "/gradio_api/component_server", "/gradio_api/run/draw", "/gradio_api/call/draw", "/"]
)
def test_nothing_can_be_sent_elsewhere(client, path):
    assert client.post(path, json={}).status_code == 404
    assert client.put(path, json={}).status_code == 404


def join(client, **more):
    return client.post("/gradio_api/queue/join", json={"data": [], "fn_index": 0, "session_hash": "abc"} | more)


@pytest.mark.parametrize(
    "value",
    [
        {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
        {"path": "http://127.0.0.1:1/x", "meta": {"_type": "gradio.FileData"}},
        [{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}],
        [["/etc/passwd"]],
    ],
)
def test_inputs_that_could_name_a_file_are_refused(client, value):
    assert join(client, data=[value]).status_code == 400
    assert join(client, data=["small", None, 3, ["agf", "lrp"]]).status_code == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b'"text"', b"\xff\xfe", b'{"data": 5}', b'{"data": {"a": {}}}'])
def test_what_is_no_request_of_the_page_is_refused(client, body):
    answer = client.post("/gradio_api/queue/join", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "event",
    [
        {"path": {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}},
        {"content": [["/etc/passwd"]]},
        ["/etc/passwd"],
        "text",
        5,
    ],
)
def test_what_tells_of_an_event_is_checked_like_the_inputs(client, event):
    assert join(client, event_data=event).status_code == 400
    assert join(client, event_data={"index": 0, "value": "cat", "selected": True}).status_code == 200


@pytest.mark.parametrize("index", [-1, 10**6, None, "0", 0.0, True, [0]])
def test_an_unknown_function_is_refused_before_gradio_sees_it(client, index):
    assert join(client, fn_index=index).status_code == 400


@pytest.mark.parametrize("key", ["data", "event_data", "session_hash", "other"])
@pytest.mark.parametrize("depth", [3, 900, 99999])
def test_nested_requests_are_refused_before_gradio_sees_them(client, key, depth):
    body = f'{{"fn_index": 0, "{key}": {"[" * depth}{"]" * depth}}}'
    answer = client.post("/gradio_api/queue/join", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_another_site_cannot_pass_itself_off_as_the_page(client, host):
    for answer in (
        client.get("/", headers={"host": host}),
        client.post("/gradio_api/queue/join", headers={"host": host}, json={"data": [], "fn_index": 0}),
    ):
        assert answer.status_code == 403
    for own in ("localhost:7860", "127.0.0.1", "[::1]:7860", "192.168.0.7:80"):
        assert client.get("/", headers={"host": own}).status_code == 200


def test_the_page_cannot_be_framed(client):
    headers = client.get("/").headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"


def test_a_request_is_no_larger_than_a_picture_may_be(client):
    assert join(client, event_data={"content": "a" * (MAX_UPLOAD * 4 // 3 + 2**17)}).status_code == 413


def test_a_saved_state_cannot_be_asked_for(client):
    assert client.get("/?deep_link=../../x").text == client.get("/").text


def test_a_bad_event_gives_no_details(client):
    """The data are of the wrong shape, so gradio itself fails."""
    joined = join(client, data=["nonsense"] * 99, fn_index=1)
    assert joined.status_code == 200
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": "abc"}) as stream:
        told = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    text = json.dumps(told)
    assert any(message["msg"] == "process_completed" and not message["success"] for message in told)
    assert "Traceback" not in text
    assert ".py" not in text


# ------------------------------------------------------------------------------------------------------- command


def serve(capsys, *arguments):
    """What the command prints on stderr when it gives up."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_port_in_use_is_said_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = serve(capsys, "--port", str(taken.getsockname()[1]))
    assert said.count("\n") == 1
    assert "--port" in said


def test_an_unknown_model_is_said_in_one_line_and_leaves_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")  # put back afterwards
    said = serve(capsys, "--port", "0", "--model", "no-such-network")
    assert said.count("\n") == 1
    assert said.startswith("error: there is no model 'no-such-network'")
    # torch makes a cache of its own there when a library of networks is imported, to look for a similar name.
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []


def test_without_gradio_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ServerError, match=r"pip install 'classlens\[web\]'"):
        run(["efficientnet-lite0"], "127.0.0.1", 0, "cpu")


SLOW = """
import time
from app import small

def loaded():
    made = small.loaded()
    made.model.register_forward_pre_hook(lambda *_: time.sleep(3600) if started else None)
    started.append(1)
    return made

started = []
"""


def test_the_end_does_not_wait_for_a_slow_network(tmp_path):
    """It computes for an hour, which no thread can be kept from. How soon the end comes depends on the load."""
    (tmp_path / "slow.py").write_text(SLOW)
    paths = [str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "classlens", "serve", "--port", "0", "--model", "slow:loaded"]
    where = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=where, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            said = process.stdout.readline()
            assert "at http://" in said, said + process.stderr.read()
            time.sleep(1)  # the server is up, and the first picture is being computed
            process.send_signal(signal.SIGTERM)
            said, complained = process.communicate(timeout=240)
        finally:
            process.kill()
    assert (process.returncode, said.strip(), complained) == (0, "stopped", "")
    assert not list(tmp_path.glob("classlens-*"))
