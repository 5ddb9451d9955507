"""The body of a request: read within bounds of size and time, parsed within bounds of depth."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.parsing import find_half_surrogate, parse_json
from penstock.shared.settings import GatewaySettings

from ..api_errors import ApiError, invalid

__all__ = ["read_object"]

_MAX_DEPTH = 110
"""A JSON Schema may be 100 deep, and it stands a few levels deep in its body."""

_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


async def read_object(request: Request, settings: GatewaySettings) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Raises:
        ApiError: 400, it is none; 408, it did not come in time; 413, it is too large; 415, it is
            not sent as JSON, or is compressed.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = "the body must be JSON, sent with content-type: application/json"
        raise ApiError(415, message, "unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = f"the body must not be compressed; content-encoding says {coding[:40]!r}"
        raise ApiError(415, message, "unsupported_media_type")
    data = await _read(request, settings)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8: byte {error.start}", "invalid_json") from None
    try:
        body = parse_json("", text, "a JSON object", max_depth=_MAX_DEPTH)
    except InvalidRequest as error:
        if error.field:  # of one number
            raise invalid(error.field, str(error), "invalid_json") from None
        raise invalid(None, f"the body is not {error.allowed}", "invalid_json") from None
    if not isinstance(body, dict):
        raise invalid(None, "the body is not a JSON object", "invalid_json")
    if _ESCAPED_HALF.search(text):  # of a pair, too, as ASCII clients write an emoji
        half = find_half_surrogate(body)
        if half is not None:
            raise invalid(half.path, half.message)
    return body


async def _read(request: Request, settings: GatewaySettings) -> bytes:
    limit = settings.max_body
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        message = f"the body did not come within {settings.body_timeout_s:g} s"
        raise ApiError(408, message, "request_timeout") from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes, which gateway.max_body allows"
    return ApiError(413, message, "body_too_large")
