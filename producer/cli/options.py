"""Options that several commands share, and how they are read."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from penstock.shared.errors import InvalidRequest
from penstock.shared.settings import Settings, load_settings

__all__ = [
    "ConfigOption",
    "JsonOption",
    "ModelOption",
    "RedisOption",
    "ShardOption",
    "client_settings",
    "command_group",
    "read_prompt",
    "with_client_settings",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])

RedisOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Address of the Redis server; default: REDIS_URL."),
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name the model is served under; default: demo.")
]
ShardOption = Annotated[int | None, typer.Option(help="Shard of the queue; default: 0.")]
ConfigOption = Annotated[
    Path | None, typer.Option(help="Settings file; default: penstock.toml, if there is one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for scripts.")]


def command_group(help: str) -> typer.Typer:
    """A command that consists of commands; alone it prints its help."""
    group = typer.Typer(help=help)

    @group.callback(invoke_without_command=True)
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return group


def client_settings(
    redis: str | None, model: str | None, shard: int | None, config: Path | None
) -> Settings:
    """The settings with these flags in force.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    flags = {"redis.url": redis, "queue.model": model, "queue.shard": shard}
    return load_settings(flags, config=config)


def with_client_settings(command: _Command) -> _Command:
    """Give a command the flags of the server and the shard, in place of its ``settings``."""

    @functools.wraps(command)
    def run(
        *,
        redis: str | None,
        model: str | None,
        shard: int | None,
        config: Path | None,
        **given: Any,
    ) -> Any:
        return command(settings=client_settings(redis, model, shard, config), **given)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "settings"]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in {
            "redis": RedisOption,
            "model": ModelOption,
            "shard": ShardOption,
            "config": ConfigOption,
        }.items()
    ]
    run.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def read_prompt(argument: str, *, chat: bool) -> str | list[dict[str, str]]:
    """The prompt of the command line: the argument, or all of standard input for ``-``.

    Raises:
        InvalidRequest: standard input is not UTF-8.
    """
    text = argument
    if argument == "-":
        data = sys.stdin.buffer.read()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            where = data[max(0, error.start - 8) : error.end + 8]
            allowed = f"UTF-8 text; byte {error.start} of standard input is not"
            raise InvalidRequest("prompt", where, allowed) from None
    return [{"role": "user", "content": text}] if chat else text
