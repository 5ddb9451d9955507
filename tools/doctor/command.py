"""``penstock doctor``: is this server fit, and is this shard well?"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from penstock.producer.cli.options import JsonOption, with_client_settings
from penstock.producer.cli.output import printable, waiting, write_json
from penstock.shared.settings import Settings

from . import Diagnosis, Level, Role, examine

__all__ = ["doctor"]

_STYLES = {
    Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red",
}  # fmt: skip
_WIDE = 10_000


@with_client_settings
def doctor(
    *,
    role: Annotated[
        Role, typer.Option(help="Whose rights this user must have: all, producer or worker.")
    ] = Role.ALL,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set wrong counters right; all else only looks.")
    ] = False,
    json: JsonOption = False,
    settings: Settings,
) -> int:
    """Examine the server and the shard, and say what each finding means and what to do.

    Exit code 0: no errors; 1: a finding is an error; 2: the server cannot be reached.
    """
    with waiting("examining"):
        diagnosis = asyncio.run(examine(settings, role=role, repair=repair))
    if json:
        write_json(diagnosis.as_json())
    else:
        show_diagnosis(diagnosis)
    return 0 if diagnosis.ok else 1


def show_diagnosis(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """One line per finding; below it what it means and what to do, if it is not all well."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    console.print(Text(diagnosis.subject, style="bold"))
    width = max(len(finding.name) for finding in diagnosis.findings)
    for finding in diagnosis.findings:
        line = Text(f"{finding.level.label:<8}", style=_STYLES[finding.level])
        line.append(f"{finding.name:<{width}}  ", style="bold")
        line.append(printable(finding.found), style="default")
        console.print(line)
        if finding.level is Level.OK:
            continue
        for label, text in (("means", finding.meaning), ("do", finding.remedy)):
            if text:
                console.print(
                    Padding(Text(f"{label}: {printable(text)}"), (0, 0, 0, 10), expand=False)
                )
    counts = {
        level: sum(finding.level is level for finding in diagnosis.findings) for level in Level
    }
    line = Text(
        f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, "
        f"{counts[Level.NOTE]} notes",
        style="green" if diagnosis.ok else "bold red",
    )
    console.print(line)
