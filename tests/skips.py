"""`pytest --listed-skips`, or CI=true: a run fails if a test is skipped that allowed_skips.toml does not list."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("allowed_skips.toml")


@dataclass(frozen=True, order=True)
class Skipped:
    """A test, or a whole file, and the reason that it gave."""

    test: str
    reason: str


@dataclass(frozen=True)
class Allowed:
    """An entry of the list."""

    test: str  # how the test's id begins
    reason: str  # what its reason holds
    why: str
    ci: bool  # also in CI


def read_list(path: Path = LIST) -> list[Allowed]:
    return [Allowed(**entry) for entry in tomllib.loads(path.read_text())["skip"]]


def unlisted(skipped: Iterable[Skipped], allowed: Iterable[Allowed], in_ci: bool) -> list[Skipped]:
    """What was skipped and may not be."""
    valid = [entry for entry in allowed if entry.ci or not in_ci]
    return sorted(
        one
        for one in skipped
        if not any(one.test.startswith(entry.test) and entry.reason in one.reason for entry in valid)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--listed-skips", action="store_true", help="fail if a test is skipped that is not on the list")


def pytest_configure(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI", "").lower() in ("1", "true")
    in_worker = hasattr(config, "workerinput")  # of pytest-xdist, which hands all reports to the process that began it
    if (in_ci or config.getoption("--listed-skips")) and not in_worker:
        config.pluginmanager.register(Watch(in_ci))


class Watch:
    """Notes every skip, and fails the run in the end if one of them is not listed."""

    def __init__(self, in_ci: bool) -> None:
        self.in_ci = in_ci
        self.skipped: set[Skipped] = set()

    def unlisted(self) -> list[Skipped]:
        return unlisted(self.skipped, read_list(), self.in_ci)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            _, _, reason = report.longrepr  # type: ignore[misc]  # a skip's is (file, line, reason)
            self.skipped.add(Skipped(report.nodeid, reason))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self.unlisted():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if found := self.unlisted():
            terminalreporter.section(f"skipped, but not in tests/{LIST.name}", red=True)
            for one in found:
                terminalreporter.write_line(f"{one.test}: {one.reason}")
