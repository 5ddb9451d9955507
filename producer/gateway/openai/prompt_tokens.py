"""The tokens of a prompt, asked of a worker before its request where an answer shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from ...results import Result
from ..answering.request_ids import IdPrefix
from ..api_errors import end_error
from ..gateway import Gateway
from .fields.common_fields import service_tier
from .fields.field_table import FieldTable

__all__ = ["prompt_tokens"]

_DECIDING = ("prompt", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")
"""The fields that decide which tokens a prompt has."""


async def prompt_tokens(
    gateway: Gateway,
    request: Request,
    table: FieldTable,
    own: Mapping[str, Any],
    fields: Mapping[str, Any],
    number: int = 0,
) -> Result:
    """The tokens and the text of a prompt; to the limits of a key it is a request of its own.

    Args:
        gateway: submits it.
        request: the HTTP request.
        table: the names of its fields.
        own: values that the endpoint reads.
        fields: of the queue's request.
        number: of the prompt among those of one call.

    Raises:
        ApiError: it was refused.
    """
    lane, _ = service_tier(own)
    kept = {name: fields[name] for name in _DECIDING if name in fields}
    submission = await gateway.submit(
        request,
        table,
        prefix=IdPrefix.TOKENS,
        model=own.get("model"),
        lane=lane,
        fields={**kept, "tokenize": True, "max_tokens": 1},
        note={"endpoint": "tokenize"},
        body=kept,
        number=number,
    )
    result = await gateway.result(submission)
    error = end_error(result.end, table.names, table.prompt)
    if error is not None:
        raise error
    return result
