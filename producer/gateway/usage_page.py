"""``/v1/usage``: what the caller's tenant has used; with an admin key, what all have."""

from __future__ import annotations

import datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.shared.errors import InvalidRequest
from penstock.shared.settings import Settings

from ..usage import UsageReader, sum_usage
from .api_errors import error_of, invalid
from .callers import Access

__all__ = ["usage_routes"]

_NAMES = ("from", "to", "by", "tenant", "model")


def usage_routes(access: Access, settings: Settings) -> APIRouter:
    """The route.

    Args:
        access: the door.
        settings: of the server whose ledgers are read.
    """
    router = APIRouter()

    @router.get("/v1/usage")
    async def usage(request: Request) -> Response:
        caller = await access.authenticate(request.headers)
        query = dict(request.query_params)
        if unknown := query.keys() - set(_NAMES):
            name = sorted(unknown)[0][:100]
            raise invalid(name, f"{name}: allowed are {', '.join(_NAMES)}", "unknown_parameter")
        tenant = query.get("tenant") if caller.admin else caller.tenant
        if not caller.admin and query.get("tenant", tenant) != tenant:
            raise invalid("tenant", "tenant: this API key sees its own tenant's usage alone")
        groups = [
            name for part in query.get("by", "day,model").split(",") if (name := part.strip())
        ]
        async with UsageReader(settings, outage_s=settings.gateway.outage_s) as reader:
            try:
                rows = await reader.read(
                    _day("from", query), _day("to", query),
                    tenant=tenant, model=query.get("model"),
                )  # fmt: skip
                sums = sum_usage(rows, groups)
            except InvalidRequest as error:
                raise error_of(error) from None
        data = [
            {**dict(zip(groups, line.group, strict=True)), **line.counts._asdict()} for line in sums
        ]
        return JSONResponse({"object": "list", "by": groups, "data": data})

    return router


def _day(name: str, query: dict[str, str]) -> datetime.date | None:
    if name not in query:
        return None
    try:
        return datetime.date.fromisoformat(query[name])
    except ValueError:
        raise invalid(name, f"{name}: give a day such as 2026-11-22") from None
