"""What is ready to run elsewhere: the workflows and the container call commands that exist."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from classlens.cli import app

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_is_there(workflow: Path) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert ".ci/run" in commands
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in commands if command.startswith("make ")} <= targets


def test_a_tag_must_be_the_version() -> None:
    release = steps(ROOT / ".github" / "workflows" / "release.yml")
    (check,) = [step["run"] for step in release if "version" in step.get("name", "")]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for tag, agrees in ((f"v{version}", True), ("v0.0.0", False), (f"v{version}1", False)):
        done = subprocess.run(["bash", "-c", check], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag}, check=False)
        assert (done.returncode == 0) is agrees, tag


def test_the_container_starts_the_page() -> None:
    command = re.findall(r'"([^"]+)"', (ROOT / "Dockerfile").read_text().splitlines()[-1])
    assert command[:2] == ["classlens", "serve"]
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    with serve.make_context("serve", command[2:], resilient_parsing=False) as context:
        assert (context.params["host"], context.params["port"]) == ("0.0.0.0", 7860)
