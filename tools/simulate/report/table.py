"""The comparison as a table: a row for each scenario, and for each of its lanes."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from ...report import Report
from ..measures import LaneFigures
from ..scenario import Outcome

__all__ = ["show"]

_WIDTH = 130
"""Width of the table; a narrower terminal wraps lines, which reads better than cut figures."""


def show(outcomes: list[Outcome], report: Report, console: Console | None = None) -> None:
    """Print the table, notes and verdict; plain columns where stdout is no terminal.

    Args:
        outcomes: in the order of the rows.
        report: on the same.
        console: target; None takes stdout.
    """
    if console is None:
        console = Console(soft_wrap=True)
        console.width = max(console.width, _WIDTH)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None)
    table.add_column("scenario", no_wrap=True)
    table.add_column("lane")
    headings = (
        "requests", "TTFT p50 s", "p99", "ITL p50 ms", "p99", "e2e p50 s", "p99", "good %",
        "good/s", "busy %", "batch", "preempt.",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        run = outcome.run
        table.add_row(
            outcome.scenario.name,
            "all",
            *_latencies(outcome.total),
            f"{outcome.goodput:.2f}",
            f"{100 * outcome.utilisation:.0f}",
            f"{run.spans / run.steps:.1f}" if run.steps else "-",
            str(run.preemptions),
        )
        for lane, figures in outcome.lanes.items():
            if figures.ended:
                table.add_row("", lane.value, *_latencies(figures))
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if not report.ok:
        console.print(f"NOT sound: {', '.join(report.failed)}", style="bold red", markup=False)


def _latencies(figures: LaneFigures) -> Iterator[str]:
    yield str(figures.ended)
    for histogram, factor in ((figures.ttft, 1), (figures.itl, 1000), (figures.e2e, 1)):
        for share in (0.5, 0.99):
            yield f"{factor * histogram.quantile(share):.3g}" if histogram.count else "-"
    yield f"{100 * figures.good / figures.ended:.1f}" if figures.ended else "-"
