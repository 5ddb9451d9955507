"""Reports: limits in both directions, the JSON form, and a table that is plain in a pipe."""

from __future__ import annotations

import math
from io import StringIO

import pytest
from rich.console import Console

from penstock.tools.report import Check, Report
from penstock.tools.report_view import show_report


def test_checks_hold_up_to_their_limit_and_never_for_nan() -> None:
    assert Check("x", 1e-4, 1e-4).ok
    assert not Check("x", 1.1e-4, 1e-4).ok
    assert not Check("x", math.nan, 1e-4).ok


def test_checks_can_ask_for_at_least_their_limit() -> None:
    assert Check("x", 40, 40, at_least=True).ok
    assert not Check("x", 39.9, 40, at_least=True).ok
    assert not Check("x", math.nan, 40, at_least=True).ok


def test_json_form() -> None:
    report = Report("m", {"x": math.nan, "y": 2}, (Check("x", math.inf, 1.0), Check("y", 2, 3)))
    assert not report.ok
    assert report.failed == ("x",)
    assert report.as_json() == {
        "figures": {"x": None, "y": 2},
        "checks": [
            {"name": "x", "value": None, "limit": 1.0, "ok": False},
            {"name": "y", "value": 2, "limit": 3, "ok": True},
        ],
        "notes": [],
    }
    spread = Report("m", {"x": 2}, (), spread={"x": (1, math.inf)}).as_json()["spread"]
    assert spread == {"x": [1, None]}


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("ok", [False, True])
def test_the_table_is_plain_where_it_is_piped(terminal: bool, ok: bool) -> None:
    out = StringIO()
    report = Report(
        "m",
        {"x": 2e-6, "y": 50},
        (Check("x", 2e-6, 1e-4 if ok else 1e-9), Check("y", 50, 40, at_least=True)),
        ("a [note]",),
        {"y": (45, 55)},
    )
    console = Console(file=out, force_terminal=terminal, width=80)
    show_report(report, title="of m[1]", passed="good", failed="bad: {names}", console=console)
    text = out.getvalue()
    assert ("\x1b[" in text) == terminal
    assert terminal or text.isascii()
    for part in ("of m[1]", "2e-06", "45", "55", ">= 40", "note: a [note]"):
        assert part in text
    assert ("bad: x" in text) != ok
    assert ("good" in text) == ok
