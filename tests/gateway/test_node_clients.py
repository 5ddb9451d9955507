"""OpenAI's client for Node.js and Vercel's AI SDK, unchanged, against a running gateway."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gateway.rig import GatewayProcess

pytestmark = [
    pytest.mark.usefixtures("demo_worker"),
    pytest.mark.skipif(
        shutil.which("npm") is None, reason="Node.js is not installed: apt-get install nodejs npm"
    ),
]


def test_node_clients(gateway: GatewayProcess, tmp_path: Path) -> None:
    shutil.copytree(
        Path(__file__).parent / "node", tmp_path / "node",
        ignore=shutil.ignore_patterns("node_modules"),
    )  # fmt: skip
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    subprocess.run(install, cwd=tmp_path / "node", check=True, timeout=100, capture_output=True)
    done = subprocess.run(
        ["node", "scenario.mjs"], cwd=tmp_path / "node", timeout=60, capture_output=True,
        text=True, env={**os.environ, "BASE_URL": f"{gateway.url}/v1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("openaiChat", "openaiResponses", "aiSdk"):
        assert found[name]["whole"]
        assert found[name]["whole"] == found[name]["streamed"], name
    assert found["refusal"] == {"status": 404, "code": "model_not_found"}
