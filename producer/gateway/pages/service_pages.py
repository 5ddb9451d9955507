"""``/v1/models``, ``/health`` and ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penstock.shared.errors import RedisUnavailable
from penstock.shared.protocol.states import ModelKind

from ..access.callers import Caller
from ..api_errors import ApiError
from ..gateway import Gateway
from ..model_directory import Shard
from .documented import json_answer, with_errors

__all__ = ["redis_away", "service_routes"]

_MODEL: Mapping[str, Any] = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": ["integer", "null"]},
        "kind": {"enum": [kind.value for kind in ModelKind]},
    },
}

_MODEL_LIST: Mapping[str, Any] = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
}


def service_routes(gateway: Gateway) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get(
        "/v1/models", responses=with_errors(json_answer("What is served now.", _MODEL_LIST))
    )
    async def list_models(request: Request) -> Response:
        caller = await gateway.caller(request)
        models = await _models(gateway, caller)
        return JSONResponse({"object": "list", "data": list(models.values())})

    @router.get("/v1/models/{model:path}", responses=with_errors(json_answer("A model.", _MODEL)))
    async def retrieve_model(request: Request, model: str) -> Response:
        caller = await gateway.caller(request)
        models = await _models(gateway, caller)
        if model not in models:
            message = f"the model {model[:100]!r} does not exist or is not served now"
            raise ApiError(404, message, "model_not_found", param="model")
        return JSONResponse(models[model])

    @router.head("/health", include_in_schema=False)  # what some load balancers ask
    @router.get("/health", responses={503: {"description": "Redis cannot be reached."}})
    async def health() -> Response:
        try:
            served = await gateway.directory.served()
        except RedisUnavailable as error:
            return JSONResponse(redis_away(error), status_code=503)
        return JSONResponse({"status": "ok", "models": _workers(served)})

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={200: {"description": "Figures for Prometheus."}},
    )
    async def metrics() -> Response:
        page = gateway.metrics.exposition()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def redis_away(error: RedisUnavailable) -> dict[str, str]:
    """What ``/health`` says; everybody may read it, so it names no address."""
    return {"status": "redis unavailable", "reason": error.outage or "it refuses a command"}


async def _models(gateway: Gateway, caller: Caller) -> dict[str, dict[str, Any]]:
    """What is served now, of what the caller may use."""
    served = await gateway.directory.served()
    cards = [(shard, await shard.producer.model_card(vocabulary=False)) for shard in served]
    return {
        shard.keys.model: {
            "id": shard.keys.model,
            "object": "model",
            "created": 0,
            "owned_by": "penstock",
            "max_model_len": card.context,
            "kind": card.kind.value,
        }
        for shard, card in cards
        if caller.models is None or shard.keys.model in caller.models
    }


def _workers(served: list[Shard]) -> dict[str, int]:
    workers: dict[str, int] = {}
    for shard in served:
        workers[shard.keys.model] = workers.get(shard.keys.model, 0) + shard.workers
    return workers
