"""A verification for people: progress while it runs, a table when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from .verify import Report

__all__ = ["show_progress", "show_report"]


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress line on stderr while the ``with`` lasts; nothing if that is no terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task("", total=None)

        def tell(stage: str, done: int, total: int) -> None:
            bars.update(task, description=stage, completed=done, total=total or None)

        yield tell


def show_report(report: Report, console: Console | None = None) -> None:
    """Figures, checks, notes and the verdict; plain columns where stdout is no terminal."""
    console = Console(soft_wrap=True) if console is None else console
    frame = box.SIMPLE_HEAD if console.is_terminal else None
    console.print(f"penstock verify: {report.model}", style="bold", markup=False, highlight=False)

    figures = Table("figure", box=frame)
    figures.add_column("value", justify="right")
    for name, value in report.figures.items():
        figures.add_row(name, _shown(value))
    console.print(figures)

    checks = Table("check", box=frame)
    for heading in ("found", "limit", "ok"):
        checks.add_column(heading, justify="right")
    for check in report.checks:
        verdict = "[green]yes[/]" if check.ok else "[bold red]NO[/]"
        checks.add_row(check.name, _shown(check.value), _shown(check.limit), verdict)
    console.print(checks)

    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if report.ok:
        console.print(
            "verified: this model gives here what it gives in transformers", style="green"
        )
    else:
        failed = ", ".join(check.name for check in report.checks if not check.ok)
        console.print(f"NOT verified: {failed} above the limit; do not serve it", style="bold red")


def _shown(value: int | float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
