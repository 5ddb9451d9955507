"""``penstock dlq list | show | redrive | drop``: requests that were given up."""

from __future__ import annotations

import asyncio
import datetime
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.shared.errors import ConfigurationError, IdInUse, InvalidRequest, UnknownDeadLetter
from penstock.shared.protocol.payload import json_form
from penstock.shared.protocol.request import Request
from penstock.shared.scripts.operations import DeadLetter
from penstock.shared.settings import Settings

from ...administration.dead_letters import DeadLetters
from ...client import Producer
from ..options import JsonOption, command_group, with_client_settings
from ..output import one_line, printable, write_json, write_note

__all__ = ["dlq"]

dlq = command_group("Dead letters: requests given up after too many workers were lost with them.")

NameArgument = Annotated[
    str,
    typer.Argument(help="Id of the request, or the dead letter's own name.", show_default=False),
]
OptionalNameArgument = Annotated[
    str | None,
    typer.Argument(help="Id of the request, or the dead letter's own name.", show_default=False),
]
AllOption = Annotated[bool, typer.Option("--all", help="All that are there now.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

_PREVIEW = 60
_WIDE = 10_000


@dlq.command("list")
@with_client_settings
def list_letters(
    *,
    limit: Annotated[
        int, typer.Option(min=1, help="Most dead letters to show, oldest first.")
    ] = 100,
    json: JsonOption = False,
    settings: Settings,
) -> None:
    """Show the dead letters, oldest first."""

    async def run() -> tuple[list[DeadLetter], int]:
        found: list[DeadLetter] = []
        async with Producer(settings=settings) as producer:
            count = await producer.dead_letters.count()
            async for letter in producer.dead_letters.all():
                found.append(letter)
                if len(found) == limit:
                    break
        return found, max(0, count - len(found))

    letters, more = asyncio.run(run())
    if json:
        write_json({"dead_letters": [letter_facts(letter) for letter in letters], "more": more})
        return
    if letters:
        terminal = sys.stdout.isatty()
        # In a pipe nothing is cut: ids are what the next command is given.
        Console(width=None if terminal else _WIDE).print(_table(letters, terminal))
    else:
        typer.echo("no dead letters")
    if more:
        write_note(f"{more} more; --limit shows them")


@dlq.command()
@with_client_settings
def show(
    *,
    id: NameArgument,
    json: JsonOption = False,
    settings: Settings,
) -> None:
    """Show one dead letter and the request in it."""

    async def run() -> DeadLetter:
        async with Producer(settings=settings) as producer:
            return await producer.dead_letters.find(id)

    letter = asyncio.run(run())
    facts = letter_facts(letter, whole=True)
    if json:
        write_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            typer.echo(f"{name}:")
            for key, inner in value.items():
                typer.echo(f"  {key}: {printable(str(inner))}")
        else:
            typer.echo(f"{name}: {printable(str(value))}")


@dlq.command()
@with_client_settings
def redrive(
    *,
    id: OptionalNameArgument = None,
    all_: AllOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
    settings: Settings,
) -> int:
    """Run dead requests again, each under its own id, from its first token."""
    work = _act(settings, id, all_, yes, json, lambda it: it.redrive, "redrive", "redriven")
    return asyncio.run(work)


@dlq.command()
@with_client_settings
def drop(
    *,
    id: OptionalNameArgument = None,
    all_: AllOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
    settings: Settings,
) -> int:
    """Throw dead letters away, payloads included."""
    work = _act(settings, id, all_, yes, json, lambda it: it.drop, "drop", "dropped")
    return asyncio.run(work)


async def _act(
    settings: Settings,
    name: str | None,
    all_: bool,
    yes: bool,
    json: bool,
    action: Callable[[DeadLetters], Callable[[str], Awaitable[DeadLetter]]],
    verb: str,
    done: str,
) -> int:
    """Act on one letter, or on all that are there now. Exit code 1 if some acts failed."""
    if (name is None) is not all_:
        raise InvalidRequest("id", name, "the id of one dead request, or --all without an id")
    finished: list[str] = []
    failed: list[dict[str, str]] = []
    async with Producer(settings=settings) as producer:
        letters = producer.dead_letters
        act = action(letters)
        if name is not None:
            letter = await act(name)
            if json:
                write_json({done: [letter.id], "failed": []})
            else:
                typer.echo(f"{done} {letter.id}")
            return 0
        count, newest = await letters.count(), await letters.newest()
        if count and not yes and not _confirm(f"{verb} {count} dead letters?"):
            write_note("nothing was done")
            return 2
        if newest is not None:
            # Not beyond what was there: a request that dies again at once would be redriven again.
            async for letter in letters.all(until=newest):
                try:
                    await act(letter.entry)
                    finished.append(letter.id)
                except (IdInUse, UnknownDeadLetter) as error:
                    failed.append({"id": letter.id, "entry": letter.entry, "error": str(error)})
    if json:
        write_json({done: finished, "failed": failed})
    else:
        typer.echo(f"{done} {len(finished)}")
        for failure in failed:
            write_note(f"not {done}: {one_line(failure['error'])}")
    return 1 if failed else 0


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Nobody can be asked here; say --yes")
    return typer.confirm(question, err=True)


def letter_facts(letter: DeadLetter, *, whole: bool = False) -> dict[str, Any]:
    """The JSON form; ``whole``: with the request's fields instead of a preview of its prompt."""
    facts: dict[str, Any] = {
        "id": letter.id,
        "entry": letter.entry,
        "reason": letter.reason.value,
        "died_at": _time(letter.at_ms),
        "attempts": letter.attempts,
        "blames": letter.blames,
        "n": letter.n,
        "lane": letter.lane.value,
        "tenant": letter.tenant,
        "payload_bytes": len(letter.payload),
    }
    try:
        request = Request.unpack(letter.payload)
    except InvalidRequest as error:
        return {**facts, "unreadable": str(error)}
    if not whole:
        return {**facts, "prompt": _preview(request)}
    options = {name: getattr(request.options, name) for name in request.options.__slots__}
    fields = {"deadline_ms": request.deadline_ms, "max_queue_ms": request.max_queue_ms}
    if request.payload is not None:
        asked = {"payload": _readable(request.payload)}
    else:
        asked = {"prompt": request.prompt, **options}
    return {**facts, "request": {**asked, **fields}}


def _readable(payload: object) -> Any:
    try:
        return json_form(payload)
    except ValueError:  # not a number
        return repr(payload)


def _preview(request: Request) -> str:
    prompt = request.prompt
    if request.payload is not None:
        text = str(_readable(request.payload))
    elif isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt[0], dict):
        text = str(prompt[-1]["content"])
    else:
        text = f"{len(prompt)} token ids"
    return text if len(text) <= _PREVIEW else text[: _PREVIEW - 3] + "..."


def _time(milliseconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)
    return moment.isoformat(timespec="seconds")


def _table(letters: list[DeadLetter], terminal: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if terminal else None)
    for heading in ("id", "reason", "died at", "lane", "tenant"):
        table.add_column(heading, overflow="fold")
    for heading in ("attempts", "blames", "tokens"):
        table.add_column(heading, justify="right")
    table.add_column("prompt")
    for letter in letters:
        facts = letter_facts(letter)
        prompt = facts.get("prompt", f"(unreadable: {facts.get('unreadable')})")
        row = (
            letter.id, facts["reason"], facts["died_at"], facts["lane"], letter.tenant,
            str(letter.attempts), str(letter.blames), str(letter.n), one_line(prompt),
        )  # fmt: skip
        table.add_row(*map(Text, row))  # text, not markup: a prompt may hold [brackets]
    return table
