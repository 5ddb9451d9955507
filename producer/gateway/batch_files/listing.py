"""Pages of lists: what callers may ask, and how a page is shown."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ..answering.event_ids import read_index
from ..api_errors import invalid

__all__ = ["page_limit", "page_object"]


def page_limit(request: Request, default: int, most: int) -> int:
    """The ``limit`` of a list.

    Raises:
        ApiError: 400, it is out of range.
    """
    limit = read_index(request.query_params.get("limit", str(default)), "limit")
    if not 1 <= limit <= most:
        raise invalid("limit", f"limit: 1 to {most}")
    return limit


def page_object(items: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """A page of a list."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }
