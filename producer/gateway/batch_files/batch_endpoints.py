"""``/v1/batches``: create, list, read, cancel."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.states import Lane

from ...batches.batch_service import BatchService
from ...batches.stores.batch_store import UnknownBatch
from ...batches.stores.file_store import UnknownFile
from ...batches.stores.records import Batch, BatchState
from ..api_errors import ApiError, error_of, invalid
from ..gateway import WEBHOOK_HEADER, Gateway
from ..openai.fields.common_fields import OBJECT, TEXT
from ..openai.fields.field_schema import body_schema
from ..openai.fields.field_table import FieldTable, served
from ..pages.documented import json_answer, json_body, with_errors
from .listing import page_limit, page_object
from .uploads import expiry_of

__all__ = ["BATCH_FIELDS", "batch_object", "batch_routes"]

_MAX_PAGE = 100
_WINDOW_S = 24 * 3600
_BATCH = {"type": "object", "required": ["id", "object", "endpoint", "status", "input_file_id"]}
_LIST = {"type": "object", "required": ["object", "data", "has_more"]}

BATCH_FIELDS = FieldTable(
    (
        served("input_file_id", TEXT, "The file of lines."),
        served("endpoint", TEXT, "The `url` of all lines."),
        served("completion_window", TEXT, "Allowed is `24h`."),
        served("metadata", OBJECT, "At most 16 pairs of text, given back with the batch."),
        served("output_expires_after", OBJECT, "`anchor` and `seconds`: life of the outputs."),
    ),
    prompt="input_file_id",
    required=("input_file_id", "endpoint", "completion_window"),
)


def batch_routes(gateway: Gateway, service: BatchService) -> APIRouter:
    """The routes of batches."""
    router = APIRouter()

    @router.post(
        "/v1/batches",
        responses=with_errors(json_answer("The batch.", _BATCH), body=True),
        openapi_extra=json_body(body_schema(BATCH_FIELDS)),
    )
    async def create_batch(request: Request) -> Response:
        caller = await gateway.caller(request)
        if Lane.BATCH not in caller.lanes:
            message = "this API key may not use the lane batch"
            raise ApiError(403, message, "tier_not_allowed")
        own, _ = BATCH_FIELDS.read(await gateway.read_object(request))
        for name in BATCH_FIELDS.required:
            if name not in own:
                raise invalid(name, f"{name}: the field is required", "missing_value")
        if own["completion_window"] != "24h":
            raise invalid("completion_window", "completion_window: allowed is 24h")
        try:
            batch = await service.create(
                input_file_id=own["input_file_id"],
                endpoint=own["endpoint"],
                tenant=caller.tenant,
                window_s=_WINDOW_S,
                metadata=own.get("metadata"),
                webhook=request.headers.get(WEBHOOK_HEADER),
                models=caller.models,
                output_expires_after_s=expiry_of(
                    "output_expires_after", own.get("output_expires_after")
                ),
            )
        except UnknownFile as error:
            raise invalid("input_file_id", str(error), "file_not_found") from None
        except InvalidRequest as error:
            raise error_of(error) from None
        return JSONResponse(batch_object(batch))

    @router.get(
        "/v1/batches", responses=with_errors(json_answer("Batches.", _LIST), statuses=(400,))
    )
    async def list_batches(request: Request) -> Response:
        caller = await gateway.caller(request)
        limit = page_limit(request, 20, _MAX_PAGE)
        try:
            found, more = await service.batches.page(
                caller.tenant, after=request.query_params.get("after"), limit=limit
            )
        except UnknownBatch as error:
            raise invalid("after", str(error)) from None
        return JSONResponse(page_object([batch_object(batch) for batch in found], more=more))

    @router.get("/v1/batches/{batch_id}", responses=with_errors(json_answer("It.", _BATCH)))
    async def get_batch(request: Request, batch_id: str) -> Response:
        caller = await gateway.caller(request)
        try:
            return JSONResponse(batch_object(await service.batches.get(batch_id, caller.tenant)))
        except UnknownBatch as error:
            raise ApiError(404, str(error), "batch_not_found") from None

    @router.post("/v1/batches/{batch_id}/cancel", responses=with_errors(json_answer("It.", _BATCH)))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        caller = await gateway.caller(request)
        try:
            return JSONResponse(batch_object(await service.cancel(batch_id, caller.tenant)))
        except UnknownBatch as error:
            raise ApiError(404, str(error), "batch_not_found") from None

    return router


def batch_object(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI shows it."""
    times = {
        f"{state.value}_at": batch.times.get(state)
        for state in BatchState
        if state is not BatchState.VALIDATING
    }
    errors = [error.model_dump() for error in batch.errors]
    usage = batch.usage
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.state.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **times,
        "request_counts": {
            "total": batch.total, "completed": batch.completed, "failed": batch.failed,
        },
        "metadata": batch.metadata,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        },
    }  # fmt: skip
