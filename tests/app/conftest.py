"""The page in a browser: one server and one browser for the tests of a file."""

import pytest

from app.browsing import Server, open_browser


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = open_browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.quit()
