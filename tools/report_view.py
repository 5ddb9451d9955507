"""A report for people: progress while it is made, a table when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBars
from rich.table import Table

from .report import Progress, Report

__all__ = ["show_progress", "show_report"]


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A progress line on stderr while the ``with`` lasts; nothing if that is no terminal.

    What it yields is told the stage, how much of it is done and how much there is (0: unknown).
    """
    console = Console(stderr=True)
    if not console.is_terminal:  # a disabled Progress still writes an empty line in rich 13
        yield lambda *_: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with ProgressBars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def tell(stage: str, done: int, total: int) -> None:
            bars.update(task, description=stage, completed=done, total=total or None)

        yield tell


def show_report(
    report: Report, *, title: str, passed: str, failed: str, console: Console | None = None
) -> None:
    """Figures, checks, notes and the verdict; plain columns where stdout is no terminal.

    Args:
        report: what to show.
        title: the first line.
        passed: the last line if all checks hold.
        failed: the last line if not; ``{names}`` stands for those that do not.
        console: where to; None takes stdout.
    """
    console = Console(soft_wrap=True) if console is None else console
    frame = box.SIMPLE_HEAD if console.is_terminal else None
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(_figures(report, frame))
    if report.checks:
        console.print(_checks(report, frame))
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if report.ok:
        console.print(passed, style="green", markup=False)
    else:
        line = failed.format(names=", ".join(report.failed))
        console.print(line, style="bold red", markup=False)


def _figures(report: Report, frame: box.Box | None) -> Table:
    table = Table("figure", box=frame)
    table.add_column("value", justify="right")
    if report.spread:
        table.add_column("least", justify="right")
        table.add_column("greatest", justify="right")
    for name, value in report.figures.items():
        bounds = report.spread.get(name, ())
        table.add_row(name, _shown(value), *map(_shown, bounds))
    return table


def _checks(report: Report, frame: box.Box | None) -> Table:
    table = Table("check", box=frame)
    for heading in ("found", "limit", "ok"):
        table.add_column(heading, justify="right")
    for check in report.checks:
        verdict = "[green]yes[/]" if check.ok else "[bold red]NO[/]"
        limit = f">= {_shown(check.limit)}" if check.at_least else _shown(check.limit)
        table.add_row(check.name, _shown(check.value), limit, verdict)
    return table


def _shown(value: int | float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
