"""How long a stream stands still when its worker is killed: less than a person notices."""

from __future__ import annotations

import pytest

from penstock.tools.chaos.stall import StallOptions, measure_stall

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("rounds", [2, pytest.param(15, marks=pytest.mark.slow)])
async def test_stall(rounds: int) -> None:
    report = await measure_stall(StallOptions(rounds=rounds), lambda *_: None)
    figures = report.figures  # their limits are for `make faults`, on a machine that is free
    assert figures["stall_ms_supervised_median"] < figures["stall_ms_lost_median"]
    low, _ = report.spread["stall_ms_lost_median"]
    assert low > 0.7 * figures["lease_ms"], "a lease was waited for, renewed not long before"
