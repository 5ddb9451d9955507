"""Puts the commands together and turns every expected error into one line and an exit code.

Exit codes: 0 done. 1 the request ended, and not with ``completed``, a check failed, or the output
could not be written. 2 nothing was done, because the input or the surroundings are wrong. 130
interrupted; 143 terminated.
"""

from __future__ import annotations

import errno
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.shared.distribution import install_command, version
from penstock.shared.errors import ConfigurationError, PenstockError, RequestFailed

from . import request_commands as requests
from .administration.api_keys import keys
from .administration.dlq import dlq
from .administration.ingress_tenants import ingress
from .administration.usage_command import usage
from .batches.batch_commands import batch
from .batches.schedule_commands import schedule
from .batches.webhook_commands import webhook
from .batches.worker_command import batches
from .demo.command import demo
from .output import drop_output, make_encodable, one_line, open_missing
from .serve.command import serve
from .serve.gateway_command import gateway

__all__ = ["EXTRA_OF", "main"]

COMMANDS_GROUP = "penstock.commands"
"""Entry points of further commands; the worker's package adds its own here."""

EXTRA_OF = {
    "arq": "batch",
    "croniter": "batch",
    "fastapi": "gateway",
    "fsspec": "batch",
    "httpx": "batch",
    "jinja2": "worker",
    "prometheus_client": "worker",
    "safetensors": "worker",
    "starlette": "gateway",
    "tokenizers": "worker",
    "torch": "worker",
    "transformers": "worker",
    "uvicorn": "gateway",
}
"""The extra that brings a package."""

_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class _Commands(TyperGroup):
    """The client's commands, and those that other installed packages add by entry point.

    An added command is imported when it is asked for, so that ``penstock submit`` does not pay
    for the worker's imports.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return names + [name for name in sorted(_entry_points()) if name not in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in _entry_points():
            command = _load_command(_entry_points()[cmd_name])
        return command


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=COMMANDS_GROUP)}


def _load_command(point: importlib.metadata.EntryPoint) -> Any:
    single = typer.Typer(add_completion=False)
    try:
        found = point.load()
        if isinstance(found, typer.Typer):  # a command with commands of its own
            found.info.name = point.name
            return typer.main.get_command(found)
        single.command(point.name)(found)
    except ModuleNotFoundError as error:
        missing = _missing_extra(error)
        if missing is None:
            raise
        single.command(
            point.name,
            help=f"(not installed: {_escaped(install_command('worker'))})",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            add_help_option=False,
        )(_refusing(missing))
    return typer.main.get_command(single)


def _refusing(error: PenstockError) -> Any:
    def refuse() -> None:
        raise error

    return refuse


def _missing_extra(error: ModuleNotFoundError) -> ConfigurationError | None:
    """Return the error for a missing package of an extra, None for any other package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_OF:
        return None
    return ConfigurationError(
        f"this command needs the package {package}, which is not installed: "
        f"{install_command(EXTRA_OF[package])}"
    )


def _escaped(text: str) -> str:
    """The same for a help text, where square brackets are markup."""
    return text.replace("[", r"\[")


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM inference over Redis: durable queues, exactly-once token streams.",
)
app.command()(demo)
app.command()(serve)
app.command()(gateway)
app.command()(batches)
app.command()(requests.submit)
app.command()(requests.stream)
app.command()(requests.result)
app.command()(requests.cancel)
app.command()(requests.embed)
app.command()(requests.infer)
app.command()(usage)
app.add_typer(batch, name="batch")
app.add_typer(schedule, name="schedule")
app.add_typer(webhook, name="webhook")
app.add_typer(dlq, name="dlq")
app.add_typer(ingress, name="ingress")
app.add_typer(keys, name="keys")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {version() or '(not installed)'}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments, or the process's own; returns the exit code."""
    open_missing()
    make_encodable(sys.stdout, sys.stderr)
    try:
        code = app(args=arguments, prog_name="penstock", standalone_mode=False)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message, code = _explain(error)
        if message is None:
            raise
        if isinstance(error, OSError):
            drop_output()
        sys.stdout.flush()
        print(f"error: {one_line(message)}", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> tuple[str | None, int]:
    """Return the message of an expected error, None for a bug, and the exit code."""
    if isinstance(error, RequestFailed | TimeoutError):
        return str(error), 1
    if isinstance(error, PenstockError):
        return str(error), 2
    if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
        return f"the output cannot be written: {error.strerror}", 1
    if isinstance(error, ModuleNotFoundError):
        missing = _missing_extra(error)
        return (str(missing) if missing else None), 2
    if isinstance(error, RuntimeError) and type(error).__name__ == "Abort":
        return "interrupted", 130  # how older releases of typer tell of Ctrl-C
    # Typer's errors about the command line, whose classes moved between its releases.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "penstock"
        return f"{error.format_message()}{_given(error)} (see '{where} --help')", 2
    return None, 1


def _given(error: Exception) -> str:
    """Return the value that an option got; newer releases of typer omit it."""
    problems = getattr(error.__cause__, "errors", None)  # of pydantic, which shared/ alone imports
    return f"; got {problems()[0]['input']!r}" if callable(problems) else ""
