"""What error messages and docs say about installation exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from unit.pages import DOCS, ROOT

from penstock.producer.cli.app import EXTRA_OF
from penstock.shared.distribution import install_command, version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FOLDERS = ("gpu_worker", "producer", "shared", "tools")


def test_commands_name_the_distribution_and_an_extra_of_it() -> None:
    sources = [path.read_text("utf-8") for f in FOLDERS for path in (ROOT / f).rglob("*.py")]
    call = re.compile(r"install_command\([\"'](\w+)[\"']\)")
    extras = {name for text in sources for name in call.findall(text)}
    assert extras == {"worker", "embedded", "gateway", "plot"}
    extras.update(EXTRA_OF.values())
    assert extras == {"batch", "worker", "embedded", "gateway", "plot"}
    for extra in extras:
        assert install_command(extra) == f"pip install '{PROJECT['name']}[{extra}]'"
    with pytest.raises(ValueError, match="no extra 'turbine'"):
        install_command("turbine")
    assert version() == PROJECT["version"]


def test_pages_name_no_other_distribution() -> None:
    pages = [*DOCS.glob("*.md"), ROOT / "README.md"]
    named = [
        found
        for page in pages
        for found in re.findall(r"([\w.-]*)\[(\w+)(?:,\w+)*\]'", page.read_text("utf-8"))
    ]
    assert named
    for name, extra in named:
        assert name in (".", PROJECT["name"])
        assert extra in PROJECT["optional-dependencies"]


START_GATEWAY = """\
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # importing one of these fails
import penstock.producer.gateway.serving.gateway_processes
"""


def test_the_gateway_starts_with_its_own_extra() -> None:
    required = " ".join(PROJECT["optional-dependencies"]["gateway"]).replace("-", "_")
    brought = {"starlette", *re.findall(r"[a-z]\w+", required)}  # starlette comes with fastapi
    absent = sorted(EXTRA_OF.keys() - brought)
    assert {"arq", "httpx", "torch"} <= set(absent)
    run = subprocess.run(
        [sys.executable, "-c", START_GATEWAY, *absent], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
