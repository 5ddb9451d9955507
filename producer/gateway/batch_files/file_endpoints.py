"""``/v1/files``: upload, list, read, delete."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.shared.errors import InvalidRequest

from ...batches.batch_service import BatchService
from ...batches.stores.file_store import FileTooLarge, UnknownFile
from ...batches.stores.records import StoredFile
from ..api_errors import ApiError, error_of, invalid
from ..gateway import Gateway
from ..pages.documented import json_answer, with_errors
from .listing import page_limit, page_object
from .uploads import read_upload

__all__ = ["file_routes"]

_MAX_PAGE = 10_000
_FILE = {"type": "object", "required": ["id", "object", "bytes", "created_at", "filename"]}
_LIST = {"type": "object", "required": ["object", "data", "has_more"]}
_GONE = {"type": "object", "required": ["id", "object", "deleted"]}
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


def file_routes(gateway: Gateway, service: BatchService) -> APIRouter:
    """The routes of files."""
    router = APIRouter()
    settings = gateway.batch_settings

    async def find(request: Request, file_id: str) -> StoredFile:
        caller = await gateway.caller(request)
        try:
            return await service.files.get(file_id, caller.tenant)
        except UnknownFile as error:
            raise ApiError(404, str(error), "file_not_found") from None

    @router.post(
        "/v1/files",
        responses=with_errors(json_answer("The file.", _FILE), body=True),
        openapi_extra=_FORM,
    )
    async def upload_file(request: Request) -> Response:
        caller = await gateway.caller(request)
        timeout_s = gateway.settings.upload_timeout_s
        upload = await read_upload(request, max_bytes=settings.max_file_bytes, timeout_s=timeout_s)
        try:
            file = await service.files.upload(
                upload.chunks(),
                tenant=caller.tenant,
                filename=upload.filename,
                expires_after_s=upload.expires_after_s or settings.file_expiry_s,
            )
        except FileTooLarge as error:
            raise ApiError(413, str(error), "file_too_large") from None
        except InvalidRequest as error:
            raise error_of(error) from None
        finally:
            await upload.body.close()
        return JSONResponse(file_object(file))

    @router.get(
        "/v1/files", responses=with_errors(json_answer("The files.", _LIST), statuses=(400,))
    )
    async def list_files(request: Request) -> Response:
        caller = await gateway.caller(request)
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", "order: asc or desc")
        try:
            files, more = await service.files.page(
                caller.tenant,
                after=query.get("after"),
                limit=page_limit(request, _MAX_PAGE, _MAX_PAGE),
                purpose=query.get("purpose"),
                newest_first=order == "desc",
            )
        except UnknownFile as error:
            raise invalid("after", str(error)) from None
        return JSONResponse(page_object([file_object(file) for file in files], more=more))

    @router.get("/v1/files/{file_id}", responses=with_errors(json_answer("The file.", _FILE)))
    async def get_file(request: Request, file_id: str) -> Response:
        return JSONResponse(file_object(await find(request, file_id)))

    @router.get(
        "/v1/files/{file_id}/content",
        responses={
            **with_errors(),
            200: {"description": "Its bytes.", "content": {"application/octet-stream": {}}},
        },
    )
    async def get_file_content(request: Request, file_id: str) -> Response:
        file = await find(request, file_id)
        try:
            pieces = await service.files.content(file)
        except UnknownFile as error:
            raise ApiError(404, str(error), "file_not_found") from None
        return StreamingResponse(
            pieces,
            media_type="application/octet-stream",
            headers={"content-length": str(file.size)},
        )

    @router.delete("/v1/files/{file_id}", responses=with_errors(json_answer("It is gone.", _GONE)))
    async def delete_file(request: Request, file_id: str) -> Response:
        file = await find(request, file_id)
        await service.files.delete(file)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    return router


def file_object(file: StoredFile) -> dict[str, Any]:
    """A file as OpenAI shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose.value,
        "status": "processed",
    }
