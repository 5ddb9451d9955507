"""``penstock keys create | list | revoke | rotate``: who may use the gateway, and how much."""

from __future__ import annotations

import asyncio
import datetime
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import GatewayKeys
from penstock.shared.local.embedded import require_url
from penstock.shared.protocol.states import Lane
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings

from ...gateway.access.key_records import KeyRecord, Limits
from ...gateway.access.key_store import KeyStore
from ..options import ConfigOption, JsonOption, RedisOption, client_settings, command_group
from ..output import printable, write_json, write_note

__all__ = ["keys"]

_T = TypeVar("_T")
_WIDE = 10_000
_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d{1,9})([smhd])")

keys = command_group("API keys of the gateway: each has a tenant, rights and limits.")

KeyArgument = Annotated[
    str, typer.Argument(help="Id of the key, as `list` shows it.", show_default=False)
]


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(help="Who pays; its requests are its own.")],
    label: Annotated[str, typer.Option(help="A note for people.")] = "",
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A model it may use; default: all.")
    ] = None,
    lane: Annotated[
        list[Lane] | None, typer.Option("--lane", help="A lane it may use; default: all.")
    ] = None,
    requests_per_minute: Annotated[int, typer.Option(help="In any 60 s; 0: no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(help="In any 60 s; 0: no limit.")] = 0,
    concurrent: Annotated[int, typer.Option(help="Requests that run at once; 0: no limit.")] = 0,
    tokens_per_day: Annotated[int, typer.Option(help="In a day of UTC; 0: no limit.")] = 0,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time it is in force, such as 12h or 90d.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It sees all tenants' usage.")] = False,
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a key and print its secret, which is told this once and stored nowhere."""
    lifetime_ms = None if expires is None else _milliseconds("expires", expires)
    record = KeyRecord(
        id="",
        tenant=tenant,
        label=label,
        models=None if model is None else frozenset(model),
        lanes=frozenset(lane or Lane),
        limits=Limits(requests_per_minute, tokens_per_minute, concurrent, tokens_per_day),
        admin=admin,
    )
    settings = client_settings(redis, None, None, config)
    _tell(*_run(settings, lambda store: store.create(record, lifetime_ms=lifetime_ms)), json)


@keys.command("list")
def list_keys(
    json: JsonOption = False, redis: RedisOption = None, config: ConfigOption = None
) -> None:
    """Show all keys, oldest first, without their secrets."""

    async def read(store: KeyStore) -> tuple[list[KeyRecord], int]:
        return await store.all(), await store.now_ms()

    records, now = _run(client_settings(redis, None, None, config), read)
    if json:
        write_json({"keys": [_facts(record, now) for record in records]})
    elif records:
        width = None if sys.stdout.isatty() else _WIDE
        Console(width=width).print(_table(records, now))
    else:
        typer.echo("no keys")


@keys.command()
def revoke(
    key: KeyArgument,
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """End a key for good: no new request from now on. What runs goes on."""
    record = _run(client_settings(redis, None, None, config), lambda store: store.revoke(key))
    if json:
        write_json({"id": record.id, "revoked_at": record.revoked_at})
    else:
        write_note(f"{record.id} of {printable(record.tenant)} is revoked")


@keys.command()
def rotate(
    key: KeyArgument,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old secret still works, such as 1h.")
    ] = "0s",
    json: JsonOption = False,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Give a key a new secret; id and limits stay."""
    grace_ms = _milliseconds("grace", grace)
    settings = client_settings(redis, None, None, config)
    _tell(*_run(settings, lambda store: store.rotate(key, grace_ms=grace_ms)), json)


def _tell(secret: str, record: KeyRecord, json: bool) -> None:
    if json:
        write_json({"id": record.id, "tenant": record.tenant, "secret": secret})
        return
    typer.echo(secret)
    write_note(f"{record.id} of {printable(record.tenant)}; the secret is not stored: keep it")


def _run(settings: Settings, do: Callable[[KeyStore], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        client = RetryingClient(
            require_url(settings.redis), socket_timeout_s=settings.redis.socket_timeout_s
        )
        try:
            await client.connect(GatewayKeys().index)
            return await do(KeyStore(client))
        finally:
            await client.aclose()

    return asyncio.run(run())


def _milliseconds(name: str, text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise InvalidRequest(name, text, "a number and s, m, h or d, such as 90d")
    return int(found[1]) * _UNITS_MS[found[2]]


def _facts(record: KeyRecord, now_ms: int) -> dict[str, Any]:
    return {
        "id": record.id,
        "tenant": record.tenant,
        "label": record.label,
        "models": None if record.models is None else sorted(record.models),
        "lanes": sorted(lane.value for lane in record.lanes),
        **{name: getattr(record.limits, name) for name in Limits.__dataclass_fields__},
        "admin": record.admin,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "state": _state(record, now_ms),
    }


def _state(record: KeyRecord, now_ms: int) -> str:
    if record.revoked_at is not None:
        return "revoked"
    return "in force" if record.is_valid(now_ms) else "expired"


def _table(records: list[KeyRecord], now_ms: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("key", "tenant", "state", "made", "models", "lanes"):
        table.add_column(title)
    for title in ("requests/min", "tokens/min", "at once", "tokens/day"):
        table.add_column(title, justify="right")
    table.add_column("label")
    for record in records:
        made = datetime.datetime.fromtimestamp(record.created_at / 1000, datetime.UTC)
        table.add_row(
            record.id,
            printable(record.tenant) + (" (admin)" if record.admin else ""),
            _state(record, now_ms),
            f"{made:%Y-%m-%d}",
            "all" if record.models is None else " ".join(sorted(record.models)),
            "all" if len(record.lanes) == len(Lane) else " ".join(sorted(record.lanes)),
            *(str(getattr(record.limits, name) or "-") for name in Limits.__dataclass_fields__),
            printable(record.label),
        )
    return table
