"""``penstock profile``: every step is divided into its parts, by both ways of computing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from penstock.tools.profile.options import ProfileOptions
from penstock.tools.profile.step_profile import PARTS, profile_steps
from penstock.tools.report import Report

_SEQUENCES = 4


@pytest.fixture(scope="module", params=["auto", "off"])
def profiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Report, Path]:
    trace = tmp_path_factory.mktemp("profile") / "trace.json"
    options = ProfileOptions(
        model="demo",
        native=request.param,
        sequences=_SEQUENCES,
        prompt=24,
        tokens=12,
        threads=1,
        trace=trace,
    )
    return profile_steps(options, lambda *_: None), trace


def test_the_parts_are_the_step(profiled: tuple[Report, Path]) -> None:
    figures = profiled[0].figures
    assert sum(figures[f"{name}_ms"] for name in PARTS) == pytest.approx(figures["step_ms"])
    assert sum(figures[f"{name}_percent"] for name in PARTS) == pytest.approx(100)
    for name in ("schedule", "pack", "linears", "attention", "other_ops", "sampling", "detokenise"):
        assert figures[f"{name}_ms"] > 0, name


def test_floors_are_of_this_machine(profiled: tuple[Report, Path]) -> None:
    figures = profiled[0].figures
    assert figures["memory_gb_per_s"] > 0
    assert figures["gflops_per_s"] > 0
    for name in ("weight_bandwidth", "kv_bandwidth", "flops"):
        assert figures[f"floor_{name}_ms"] > 0
    assert any(note.startswith("bound: ") for note in profiled[0].notes)


def test_the_trace_nests_parts_in_steps(profiled: tuple[Report, Path]) -> None:
    events = json.loads(profiled[1].read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert sum(step["args"]["tokens"] for step in steps) == _SEQUENCES * (24 + 12 - 1)
    assert {event["name"] for event in events} == {"step", *PARTS}
    for before, after in itertools.pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.2  # rounded to 0.1 us
