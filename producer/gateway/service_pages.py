"""``/v1/models`` and ``/health``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.shared.errors import RedisUnavailable

from .api_errors import ApiError
from .callers import Caller
from .gateway import Gateway
from .model_directory import Shard

__all__ = ["service_routes"]


def service_routes(gateway: Gateway) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        caller = await gateway.access.authenticate(request.headers)
        models = await _models(gateway, caller)
        return JSONResponse({"object": "list", "data": list(models.values())})

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(request: Request, model: str) -> Response:
        caller = await gateway.access.authenticate(request.headers)
        models = await _models(gateway, caller)
        if model not in models:
            message = f"the model {model[:100]!r} does not exist or is not served now"
            raise ApiError(404, message, "model_not_found", param="model")
        return JSONResponse(models[model])

    @router.get("/health")
    async def health() -> Response:
        try:
            served = await gateway.directory.served()
        except RedisUnavailable:
            return JSONResponse({"status": "redis unavailable"}, status_code=503)
        return JSONResponse({"status": "ok", "models": _workers(served)})

    return router


async def _models(gateway: Gateway, caller: Caller) -> dict[str, dict[str, Any]]:
    """What is served now, of what the caller may use."""
    served = await gateway.directory.served()
    names = sorted({shard.keys.model for shard in served})
    return {
        name: {"id": name, "object": "model", "created": 0, "owned_by": "penstock"}
        for name in names
        if caller.models is None or name in caller.models
    }


def _workers(served: list[Shard]) -> dict[str, int]:
    workers: dict[str, int] = {}
    for shard in served:
        workers[shard.keys.model] = workers.get(shard.keys.model, 0) + shard.workers
    return workers
