"""``/v1/usage``: what the caller's tenant has used; with an admin key, what all have.

As JSON or as CSV.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.shared.errors import InvalidRequest
from penstock.shared.scripts.usage_ledger import UsageCounts

from ...administration.usage import GROUPS, sum_usage, write_usage
from ..access.callers import Access
from ..api_errors import error_of, invalid
from ..model_directory import ModelDirectory
from .documented import json_answer, with_errors

__all__ = ["usage_routes"]

_COUNT = {"type": "integer"}
_TEXT = {"type": "string"}
_DAY = {"type": "string", "format": "date"}
_PARAMETERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "from": ("First day, of UTC; without it there are 30 days.", _DAY),
    "to": ("Last day, of UTC; without it today.", _DAY),
    "by": (f"What to sum by, of {', '.join(GROUPS)}, with commas.", _TEXT),
    "tenant": ("Only this one. A key without `--admin` sees its own alone.", _TEXT),
    "model": ("Only this one.", _TEXT),
    "format": ("How it is told; `json` if it is not given.", {"enum": ["json", "csv"]}),
}

_USAGE: Mapping[str, Any] = {
    "type": "object",
    "required": ["object", "by", "data"],
    "properties": {
        "object": {"const": "list"},
        "by": {"type": "array", "items": {"enum": list(GROUPS)}},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": list(UsageCounts._fields),
                "properties": {
                    **dict.fromkeys(GROUPS, _TEXT),
                    **dict.fromkeys(UsageCounts._fields, _COUNT),
                },
            },
        },
    },
}


def usage_routes(access: Access, directory: ModelDirectory) -> APIRouter:
    """The route.

    Args:
        access: who may look.
        directory: knows the shards whose ledgers are read.
    """
    router = APIRouter()

    @router.get(
        "/v1/usage",
        responses=with_errors(_answer(), statuses=(400,)),
        openapi_extra={"parameters": [_parameter(name) for name in _PARAMETERS]},
    )
    async def usage(request: Request) -> Response:
        caller = await access.authenticate(request.headers)
        query = dict(request.query_params)
        if unknown := query.keys() - _PARAMETERS.keys():
            name = sorted(unknown)[0][:100]
            raise invalid(
                name, f"{name}: allowed are {', '.join(_PARAMETERS)}", "unknown_parameter"
            )
        if (form := query.get("format", "json")) not in ("json", "csv"):
            raise invalid("format", "format: give json or csv")
        tenant = query.get("tenant") if caller.admin else caller.tenant
        if not caller.admin and query.get("tenant", tenant) != tenant:
            raise invalid("tenant", "tenant: this API key sees its own tenant's usage alone")
        groups = [
            name for part in query.get("by", "day,model").split(",") if (name := part.strip())
        ]
        try:
            rows = await directory.usage(
                _day("from", query), _day("to", query), tenant=tenant, model=query.get("model")
            )
            sums = sum_usage(rows, groups)
        except InvalidRequest as error:
            raise error_of(error) from None
        if form == "csv":
            text = io.StringIO()
            write_usage(text, groups, sums)
            return Response(text.getvalue(), media_type="text/csv")
        data = [
            {**dict(zip(groups, line.group, strict=True)), **line.counts._asdict()} for line in sums
        ]
        return JSONResponse({"object": "list", "by": groups, "data": data})

    return router


def _answer() -> dict[str, Any]:
    answer: dict[str, Any] = json_answer("What was used.", _USAGE)
    answer["content"]["text/csv"] = {}
    return answer


def _parameter(name: str) -> dict[str, Any]:
    description, schema = _PARAMETERS[name]
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _day(name: str, query: dict[str, str]) -> datetime.date | None:
    if name not in query:
        return None
    try:
        return datetime.date.fromisoformat(query[name])
    except ValueError:
        raise invalid(name, f"{name}: give a day such as 2026-11-22") from None
