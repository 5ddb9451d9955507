"""``penstock ingress list | add | remove``: tenants with an ingress stream of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from penstock.shared.keys import Keys
from penstock.shared.local.embedded import require_url
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.ingress_operations import IngressOperations
from penstock.shared.settings import Settings

from ..options import JsonOption, command_group, with_client_settings
from ..output import printable, write_json, write_note

__all__ = ["ingress"]

_T = TypeVar("_T")

ingress = command_group(
    "Tenants with an ingress stream of their own, for clients that an ACL confines to it."
)

TenantArgument = Annotated[
    str, typer.Argument(help="Name of the tenant: A-Z a-z 0-9 _ -", show_default=False)
]


@ingress.command("list")
@with_client_settings
def list_tenants(
    *,
    json: JsonOption = False,
    settings: Settings,
) -> None:
    """Show the tenants that have one."""
    tenants = asyncio.run(_run(settings, lambda operations: operations.tenants()))
    if json:
        write_json({"tenants": list(tenants)})
        return
    for tenant in tenants:
        typer.echo(printable(tenant))


@ingress.command()
@with_client_settings
def add(
    *,
    tenant: TenantArgument,
    json: JsonOption = False,
    settings: Settings,
) -> None:
    """Have workers read a tenant's ingress stream."""
    changed = asyncio.run(_run(settings, lambda operations: operations.add_tenant(tenant)))
    _tell(settings, tenant, changed, json, "is read from now on" if changed else "is read already")


@ingress.command()
@with_client_settings
def remove(
    *,
    tenant: TenantArgument,
    json: JsonOption = False,
    settings: Settings,
) -> None:
    """Have workers read a tenant's ingress stream no more; what is in it stays there."""
    changed = asyncio.run(_run(settings, lambda operations: operations.remove_tenant(tenant)))
    _tell(settings, tenant, changed, json, "is read no more" if changed else "was not read")


def _tell(settings: Settings, tenant: str, changed: bool, json: bool, what: str) -> None:
    stream = Keys(settings.queue.model, settings.queue.shard).ingress(tenant)
    if json:
        write_json({"tenant": tenant, "stream": stream, "changed": changed})
    else:
        write_note(f"{printable(stream)} {what}")


async def _run(settings: Settings, do: Callable[[IngressOperations], Awaitable[_T]]) -> _T:
    client = RetryingClient(
        require_url(settings.redis), socket_timeout_s=settings.redis.socket_timeout_s
    )
    try:
        keys = Keys(settings.queue.model, settings.queue.shard)
        await client.connect(keys.counters)
        operations = IngressOperations(client.redis, keys)
        return await client.call(lambda: do(operations))
    finally:
        await client.aclose()
