"""How a measurement ends: its report for people or programs, and the exit code."""

from __future__ import annotations

import json
from typing import NoReturn

import typer

from ..report import Report
from ..report_view import show_report

__all__ = ["finish"]


def finish(report: Report, as_json: bool) -> NoReturn:
    """Print the report and exit: 0 if all limits hold, else 1."""
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        show_report(
            report,
            title=f"penstock bench {report.subject}",
            passed="all limits hold",
            failed="NOT within its limit: {names}",
        )
    raise typer.Exit(0 if report.ok else 1)
