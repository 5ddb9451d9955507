"""The app: its routes, what happens around every request, and its life."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TypeGuard

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.shared.distribution import version
from penstock.shared.errors import PenstockError
from penstock.shared.local.embedded import require_url
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings

from ..batches.batch_service import BatchService
from ..batches.webhooks.request_ends import RequestWatch
from .access.callers import Access
from .access.key_access import access_of
from .answering.connection import connection_of
from .answering.output_answer import CLIENT_LEFT
from .answering.stored_answers import stream_routes
from .api_errors import ApiError, error_response, response_of
from .batch_files.batch_endpoints import batch_routes
from .batch_files.file_endpoints import file_routes
from .gateway import Gateway
from .model_directory import ModelDirectory
from .monitoring.gateway_metrics import GatewayMetrics
from .monitoring.request_log import CLIENT_LEFT_STATUS, RequestLog
from .openai.encoders.encoder_endpoints import encoder_routes
from .openai.endpoints import openai_routes, openai_writers
from .pages.service_pages import service_routes
from .pages.tokenize_pages import tokenize_routes
from .pages.usage_page import usage_routes
from .responses.response_endpoints import response_routes, response_writers

__all__ = ["GatewayApp", "create_app"]


class GatewayApp:
    """The app as a server calls it.

    Attributes:
        gateway: its parts.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self.gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or live through the server's life."""
        await self._app(scope, receive, send)


def create_app(settings: Settings, access: Access | None = None) -> GatewayApp:
    """Make the gateway's app; its lifespan connects to Redis.

    Args:
        settings: the sections ``redis``, ``queue`` and ``gateway``.
        access: who may submit; None asks Redis for API keys, see :func:`.access_of`.
    """
    directory = ModelDirectory(settings)
    access = access or access_of(settings, directory.locate)
    client = RetryingClient(
        require_url(settings.redis), socket_timeout_s=settings.redis.socket_timeout_s
    )
    batches = BatchService(client, settings)
    gateway = Gateway(settings, access, directory, RequestWatch(client))

    @contextlib.asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        await directory.connect()
        await access.connect()
        try:
            yield
        finally:
            await access.aclose()
            await batches.aclose()
            await client.aclose()
            await directory.aclose()

    app = FastAPI(
        title="penstock gateway",
        version=version() or "0",
        lifespan=live,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    writers = {**openai_writers(), **response_writers()}
    routers = [
        service_routes(gateway),
        usage_routes(access, directory),
        openai_routes(gateway),
        response_routes(gateway),
        encoder_routes(gateway),
        tokenize_routes(gateway),
        stream_routes(gateway, writers),
        file_routes(gateway, batches),
        batch_routes(gateway, batches),
    ]
    for router in routers:
        app.include_router(router)
    _handle_errors(app)
    direct = [route for router in routers for route in router.routes if _is_direct(route)]
    # Around FastAPI's own layers, not among them: direct routes pass none of those.
    outer: ASGIApp = _DirectRoutes(app, direct)
    if settings.gateway.cors_origins is not None:
        outer = CORSMiddleware(
            outer,
            allow_origins=[part.strip() for part in settings.gateway.cors_origins.split(",")],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return GatewayApp(_Envelope(outer, gateway.metrics), gateway)


class _Envelope:
    """Gives every response an ``x-request-id``, unless its endpoint gave one, and counts it.

    What was refused, failed or was left by its client is logged, too.

    Its head and the first piece of its body leave in one write.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection, status, name = connection_of(scope), 500, b""

        async def send_with_id(message: Message) -> None:
            nonlocal status, name
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.setdefault("headers", [])
                name = next((value for key, value in headers if key == b"x-request-id"), b"")
                if not name:
                    name = f"req-{uuid.uuid4().hex}".encode()
                    message["headers"] = [*headers, (b"x-request-id", name)]
                connection.hold()  # the head leaves with the first piece of the body
                await send(message)
            else:
                await send(message)
                connection.release()

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = scope.get("route")
            endpoint = str(getattr(route, "path", "unknown"))
            left = scope.get(CLIENT_LEFT)
            shown = CLIENT_LEFT_STATUS if left else status
            self._metrics.requests.labels(endpoint, str(shown)).inc()
            self._log.note(scope["method"], scope["path"], shown, left or name.decode("latin-1"))


_DIRECT = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Where most requests go. Their endpoints take the request alone and check it themselves."""


def _is_direct(route: object) -> TypeGuard[APIRoute]:
    return isinstance(route, APIRoute) and route.path in _DIRECT and route.methods == {"POST"}


class _DirectRoutes:
    """Calls the endpoints of some routes without the router, whose part in a request is large.

    Args:
        app: serves all other requests.
        routes: by POST, without parameters in their paths.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            response: Response = await route.endpoint(Request(scope, receive))
        except Exception as error:
            response = response_of(error)
        await response(scope, receive, send)


def _handle_errors(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> Response:
        return response_of(error)

    for kind in (ApiError, PenstockError, ClientDisconnect):
        app.add_exception_handler(kind, answer)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        codes = {404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return error_response(ApiError(error.status_code, message, code), error.headers)

    @app.exception_handler(Exception)
    async def _(*_: object) -> Response:
        return error_response(ApiError(500, "an internal error", "internal_error"))
