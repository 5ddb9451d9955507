"""Storms at the gateway: gateways, workers and Redis are killed under clients that resume.

Each test prints the storm's figures (``pytest -s``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults.rig import mutated

from penstock.tools.chaos.gateway.gateway_storm import GatewayStormOptions, run_gateway_storm
from penstock.tools.report import Report

pytestmark = pytest.mark.timeout(600)

SHORT = GatewayStormOptions(seconds=6, clients=24, workers=2, tokens=200, seed=1)
RESUMES_AT = 'read_index(request.headers.get("last-event-id", "0"), "Last-Event-ID")'


async def storm(options: GatewayStormOptions) -> Report:
    report = await run_gateway_storm(options, lambda *_: None)
    print(json.dumps(report.figures))
    return report


def check_held(report: Report, options: GatewayStormOptions) -> None:
    """No token lost, doubled or changed, and nothing billed twice; how much ran is no matter."""
    figures = report.figures
    assert not figures["violations"], report.notes
    assert not figures["ledger_requests_difference"], figures
    assert not figures["ledger_tokens_difference"], figures
    for name in ("gateway_kills", "worker_kills", "redis_kills", "resumptions"):
        assert figures[name] >= 1, name
    assert figures["requests"] >= options.clients  # each reads one at least, however late


async def test_short_storm_at_the_gateway() -> None:
    check_held(await storm(SHORT), SHORT)


@pytest.mark.alone
@pytest.mark.slow
async def test_storm_at_the_gateway() -> None:
    options = GatewayStormOptions(seconds=60, clients=300)
    check_held(await storm(options), options)


@pytest.mark.alone
@pytest.mark.slow
async def test_a_gateway_that_skips_a_token_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateways run changed code; the clients do not."""
    skips = f"{RESUMES_AT} + 1"
    site = mutated(tmp_path, "producer/gateway/gateway.py", RESUMES_AT, skips)
    monkeypatch.setenv("PYTHONPATH", site)
    report = await storm(SHORT)
    assert "violations" in report.failed
