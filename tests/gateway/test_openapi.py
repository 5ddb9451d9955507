"""The documented API, tried by schemathesis: no answer is a server error or undocumented.

A short run; ``make api-fuzz`` sends 20,000 cases. Set ``API_FUZZ_EXAMPLES`` for another number per
operation.
"""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest
from gateway.rig import GatewayProcess

pytestmark = pytest.mark.usefixtures("synthetic_worker")

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


def run_schemathesis(gateway: GatewayProcess, examples: int, *flags: str) -> str:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json",
        "--checks", CHECKS, "--max-examples", str(examples), "--seed", "1", "--no-color",
        "--request-timeout", "20", "--continue-on-failure", *flags,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout


def test_the_api_is_as_it_is_documented(gateway: GatewayProcess) -> None:
    run_schemathesis(gateway, 5, "--phases", "fuzzing", "--no-shrink")


@pytest.mark.slow
def test_the_api_is_as_it_is_documented_in_many_cases(gateway: GatewayProcess) -> None:
    examples = int(os.environ.get("API_FUZZ_EXAMPLES", "3000"))
    print(run_schemathesis(gateway, examples)[-2000:])


def test_every_error_is_documented(gateway: GatewayProcess) -> None:
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "408", "413", "422", "429", "503", "504"} <= set(answers)
