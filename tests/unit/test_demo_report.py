"""What `penstock demo` requests, and what its report and live view show."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys

import pytest
from rich.console import Console
from unit.terminal import Terminal

from penstock.producer.cli.demo.metrics_watch import parse_metrics
from penstock.producer.cli.demo.summary import (
    DemoReport,
    EngineFigures,
    FaultFigures,
    Row,
    Takeover,
    demo_rows,
)
from penstock.producer.cli.demo.view import LiveView, PlainView, make_view
from penstock.producer.cli.output import summary
from penstock.shared.protocol.events import Chunk, End, Usage
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Lane, Reason, State


def test_the_summary_of_a_request() -> None:
    usage = Usage(prompt_tokens=4, output_tokens=9, queue_ms=0, ttft_ms=12, attempts=1)
    text = summary(End(n=9, reason=Reason.STOP, usage=usage))
    assert text == "completed (stop), 4 prompt + 9 output tokens, queue 0 ms, first token 12 ms"


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP x y\n# TYPE x gauge\nx{lane="a"} 1\nx{lane="b c"} 2.5\ny 3e2\n\n'
    assert parse_metrics(text) == {"x": 3.5, "y": 300.0}


def test_the_demos_requests_are_valid_and_mixed() -> None:
    rows = demo_rows()
    assert len(rows) == 12
    lanes = [row.lane for row in rows]
    assert lanes == sorted(lanes, key=lambda lane: -lane.rank)  # urgent work comes last
    assert {(row.lane, row.tenant) for row in rows} == {
        (lane, tenant) for lane in Lane for tenant in ("app", "docs")
    }
    assert {row.is_chat for row in rows} == {True, False}
    for row in rows:
        Request.build(id="x", prompt=row.prompt, lane=row.lane, tenant=row.tenant, **row.options)


@pytest.fixture
def report() -> DemoReport:
    """One request completed, one failed, one still queued."""
    usage = Usage(prompt_tokens=3, output_tokens=2, queue_ms=5, ttft_ms=20, attempts=1)
    done = Row(prompt="The list type", lane=Lane.BATCH, tenant="docs")
    done.add(Chunk(0, (1, 2), " is [bold]a\n\x1b[31mlist", 0))
    done.end = End(n=2, reason=Reason.LENGTH, usage=usage)
    done.mean_itl_ms = 7.25
    failed = Row(prompt=[{"role": "user", "content": "Why?"}], lane=Lane.NORMAL, tenant="app")
    failed.end = End(n=0, reason=Reason.ENGINE_ERROR)
    waiting = Row(prompt="def f(", lane=Lane.CRITICAL, tenant="app")
    figures = EngineFigures(mean_batch=3.456, kv_blocks_peak=10, kv_blocks_total=80)
    return DemoReport(rows=[done, failed, waiting], wall_s=0.5, engine=figures)


def test_the_report_in_a_pipe(report: DemoReport) -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out, width=100))
    with view.streaming(report.rows):
        for row in report.rows:
            view.ended(row)
    view.finish(report, 9.87)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "batch     docs    completed     2 tokens  The list type is [bold]a ␛[31mlist" in text
    assert "normal    app     failed        0 tokens  Why? | \n" in text
    cells = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert [
        "The list type", "batch", "docs", "3", "2", "5 ms", "20 ms", "7.2 ms", "length",
    ] in cells  # fmt: skip
    assert ["Why?", "normal", "app", "-", "0", "-", "-", "-", "engine_error"] in cells
    assert text.endswith(
        "1 of 3 completed\n2 tokens in 0.50 s = 4 tokens/s\nmean batch 3.5 sequences\n"
        "KV peak 10 of 80 blocks (12.5 %)\n9.9 s in all\n"
    )


def test_the_report_without_the_workers_figures(report: DemoReport) -> None:
    out = io.StringIO()
    bare = DemoReport(rows=report.rows, wall_s=0.5, engine=EngineFigures())
    PlainView(Console(file=out, width=100)).finish(bare, 1)
    assert "batch " not in out.getvalue().split("completed\n")[-1]
    assert bare.facts()["figures"]["mean_batch"] is None
    assert json.dumps(bare.facts())


def test_the_report_of_a_killed_worker(report: DemoReport) -> None:
    done, unread, _ = report.rows
    done.id, unread.id = "a", "b"
    takeovers = [
        Takeover(row=done, index=1, pause_ms=41.4, identical=True),
        Takeover(row=unread, identical=True),
    ]
    faults = FaultFigures(
        worker_id="w", pid=7, takeovers=takeovers, reader=unread, left_at=9, away_ms=80, missed=3,
        caught_up_ms=2.2,
    )  # fmt: skip
    killed = dataclasses.replace(report, faults=faults)
    out = io.StringIO()
    PlainView(Console(file=out, width=118)).finish(killed, 1)
    text = out.getvalue()
    assert re.search(r"length +at 1, 41 ms", text)
    assert re.search(r"engine_error +unread", text)
    assert (
        "killed a worker amid 2 streams: they went on with the other within 41 ms\n"
        "a reader left at token 9 and came back 80 ms later; it had the 3 tokens that it missed in "
        "2 ms\n2 of 2 disturbed streams are, token for token, as undisturbed\n"
    ) in text
    assert killed.facts()["faults"]["takeovers"][0]["pause_ms"] == 41.4


def test_a_stream_that_changed_is_a_broken_promise(report: DemoReport) -> None:
    (done, *_) = report.rows
    takeover = Takeover(row=done, index=1, pause_ms=1, identical=True)
    faults = FaultFigures(worker_id="w", pid=7, takeovers=[takeover], reader=done, left_at=1)
    kept = DemoReport(rows=[done], wall_s=1, engine=report.engine, faults=faults)
    assert kept.as_promised
    takeover.identical = False
    assert not kept.as_promised
    assert not report.as_promised, "two of its requests did not complete"


def test_the_longest_pause_since_a_moment() -> None:
    row = Row(prompt="x", lane=Lane.BATCH, tenant="t")
    assert row.longest_pause(0) is None
    row.arrivals = [(1.0, 1), (3.0, 2), (3.25, 4), (3.375, 5)]
    assert row.longest_pause(0) == (1, 2000)
    assert row.longest_pause(3.1) == (2, 250)
    assert row.longest_pause(3.5) is None


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_live_view_keeps_a_row_a_line(report: DemoReport, width: int) -> None:
    out = Terminal()
    console = Console(file=out, width=width, height=40, force_terminal=True, color_system=None)
    view = LiveView(console)
    report.rows[0].text *= 100
    console.print(view.side_by_side(report.rows))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) == 2 + len(report.rows)
    assert all(len(line) <= width for line in lines)
    if width >= 80:
        assert "completed" in lines[2]
        assert "The list type" in lines[2]
        assert lines[2].rstrip().endswith("[31mlist")  # the tail, where it grows


def test_the_live_view_follows_and_reports(report: DemoReport) -> None:
    out = Terminal()
    view = LiveView(Console(file=out, width=100, height=40, force_terminal=True))
    with view.loading():
        pass
    with view.streaming(report.rows):
        view.ended(report.rows[0])
    view.finish(report, 1)
    assert "loading the model" in out.getvalue()
    assert "1 of 3 completed" in out.getvalue()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")  # the cursor


def test_the_view_suits_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert type(make_view(json=False)) is LiveView
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(make_view(json=False)) is PlainView
    assert Row(prompt="x", lane=Lane.BATCH, tenant="t").state is State.QUEUED
