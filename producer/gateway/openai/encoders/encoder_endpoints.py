"""``POST /v1/embeddings``, ``/v1/rerank``, ``/v1/classify`` and ``/v1/infer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from penstock.shared.protocol.states import ModelKind

from ....results import Result
from ...answering.request_ids import IdPrefix
from ...api_errors import end_error
from ...gateway import Gateway
from ...pages.documented import json_answer, json_body, with_errors
from ..fields.common_fields import service_tier
from ..fields.field_schema import body_schema
from ..fields.field_table import FieldTable
from .encoder_fields import (
    CLASSIFY_FIELDS,
    EMBEDDING_FIELDS,
    INFER_FIELDS,
    RERANK_FIELDS,
    classify_payload,
    embedding_payload,
    infer_payload,
    rerank_payload,
)
from .encoder_objects import (
    CLASSIFY_ANSWER,
    EMBEDDING_ANSWER,
    INFER_ANSWER,
    RERANK_ANSWER,
    classify_object,
    embedding_object,
    infer_object,
    rerank_object,
)

__all__ = ["ENCODER_ENDPOINTS", "EncoderEndpoint", "encoder_routes"]

Own = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EncoderEndpoint:
    """An endpoint that one kind of model answers at once.

    Attributes:
        kind: which.
        prefix: how ids of its requests begin.
        table: the fields of its body.
        payload: makes the queue's payload of the fields that the endpoint reads.
        schema: of its answers.
        build: makes the answer's body of request id, model, fields, payload and the worker's
            answer.
    """

    kind: ModelKind
    prefix: IdPrefix
    table: FieldTable
    payload: Callable[[Own], Any]
    schema: Mapping[str, Any]
    build: Callable[[str, str, Own, Any, object], bytes]

    def answer(self, request_id: str, model: str, own: Own, payload: Any, result: Result) -> bytes:
        """The body of an answer.

        Raises:
            ApiError: the request was not completed.
            ProtocolError: another kind of model answered.
        """
        error = end_error(result.end, self.table.names, self.table.prompt)
        if error is not None:
            raise error
        return self.build(request_id, model, own, payload, result.value)


ENCODER_ENDPOINTS: Mapping[str, EncoderEndpoint] = {
    "/v1/embeddings": EncoderEndpoint(
        ModelKind.EMBED,
        IdPrefix.EMBEDDING,
        EMBEDDING_FIELDS,
        embedding_payload,
        EMBEDDING_ANSWER,
        lambda _, model, own, __, value: embedding_object(model, own, value),
    ),
    "/v1/rerank": EncoderEndpoint(
        ModelKind.RERANK,
        IdPrefix.RERANK,
        RERANK_FIELDS,
        rerank_payload,
        RERANK_ANSWER,
        lambda request_id, model, own, payload, value: rerank_object(
            request_id, model, own, payload["documents"], value
        ),
    ),
    "/v1/classify": EncoderEndpoint(
        ModelKind.CLASSIFY,
        IdPrefix.CLASSIFICATION,
        CLASSIFY_FIELDS,
        classify_payload,
        CLASSIFY_ANSWER,
        lambda request_id, model, _, __, value: classify_object(request_id, model, value),
    ),
    "/v1/infer": EncoderEndpoint(
        ModelKind.BATCH,
        IdPrefix.INFERENCE,
        INFER_FIELDS,
        infer_payload,
        INFER_ANSWER,
        lambda request_id, model, _, __, value: infer_object(request_id, model, value),
    ),
}


def encoder_routes(gateway: Gateway) -> APIRouter:
    """The routes of all of them."""
    router = APIRouter()
    for path, endpoint in ENCODER_ENDPOINTS.items():
        router.add_api_route(
            path,
            _handler(gateway, endpoint),
            methods=["POST"],
            name=endpoint.kind.value,
            responses=with_errors(json_answer("The answer.", endpoint.schema), body=True),
            openapi_extra=json_body(body_schema(endpoint.table)),
        )
    return router


def _handler(gateway: Gateway, endpoint: EncoderEndpoint) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        body = await gateway.read_object(request)
        own, _ = endpoint.table.read(body)
        payload = endpoint.payload(own)
        lane, _ = service_tier(own)
        submission = await gateway.submit(
            request,
            endpoint.table,
            prefix=endpoint.prefix,
            model=own.get("model"),
            lane=lane,
            fields={"payload": payload},
            note={"endpoint": endpoint.kind.value},
            body=body,
            kind=endpoint.kind,
        )

        def build(result: Result) -> bytes:
            return endpoint.answer(submission.id, submission.model, own, payload, result)

        return gateway.whole(submission, build)

    return answer
