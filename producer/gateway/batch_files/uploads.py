"""The upload of a file: a multipart form, read within bounds of size and time."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from ...batches.stores.storage import StorageError
from ..api_errors import ApiError, invalid

__all__ = ["Upload", "expiry_of", "read_upload"]

_FORM_BYTES = 64 << 10
"""What a form may have beside the file."""

_EXPIRY_S = (3_600, 2_592_000)
_FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})
_READ_BYTES = 1 << 16
_MAX_NAME_CHARS = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that was sent.

    Attributes:
        filename: the name its sender gave it.
        body: its bytes, on the gateway's disk where they are many.
        expires_after_s: its life; None if the sender names none.
    """

    filename: str
    body: UploadFile
    expires_after_s: int | None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Its bytes, in pieces."""
        while chunk := await self.body.read(_READ_BYTES):
            yield chunk


async def read_upload(request: Request, *, max_bytes: int, timeout_s: float) -> Upload:
    """Read the form of ``POST /v1/files``.

    Raises:
        ApiError: 400, a field is wrong; 408, it did not come in time; 413, it is too large; 415, it
            is no form.
        StorageError: the gateway's disk cannot hold it.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        message = "the body must be a form, sent with content-type: multipart/form-data"
        raise ApiError(415, message, "unsupported_media_type")
    limit = max_bytes + _FORM_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(max_bytes)
    read = 0

    async def receive() -> Message:
        nonlocal read
        message = await request.receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise _too_large(max_bytes)
        return message

    try:
        async with asyncio.timeout(timeout_s):
            form = await Request(request.scope, receive).form(
                max_files=1, max_fields=len(_FIELDS), max_part_size=_FORM_BYTES
            )
    except TimeoutError:
        message = f"the file did not come within {timeout_s:g} s"
        raise ApiError(408, message, "request_timeout") from None
    except OSError as error:  # larger forms go to a temporary file
        folder = tempfile.gettempdir()
        raise StorageError(f"{folder} cannot hold an upload: {error.strerror}") from error
    except HTTPException as error:
        raise invalid(None, f"the form cannot be read: {error.detail}", "invalid_form") from None
    return _check(form)


def _check(form: FormData) -> Upload:
    for name in form:
        if name not in _FIELDS:
            shown = name[:64].encode("ascii", "backslashreplace").decode()
            raise invalid(shown, f"there is no field {shown!r}", "unknown_parameter")
    body = form.get("file")
    if not isinstance(body, UploadFile):
        raise invalid("file", "file: give a file", "missing_value")
    if form.get("purpose") != "batch":
        raise invalid("purpose", "purpose: allowed is batch", "unsupported_value")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    expiry: dict[str, object] | None = None
    if anchor is not None or seconds is not None:
        is_number = isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 10
        expiry = {"anchor": anchor, "seconds": int(str(seconds)) if is_number else seconds}
    filename = (body.filename or "upload.jsonl")[:_MAX_NAME_CHARS]
    return Upload(filename, body, expiry_of("expires_after", expiry))


def expiry_of(where: str, value: object) -> int | None:
    """The seconds of an ``expires_after`` object; None if there is none.

    Raises:
        ApiError: 400, it is malformed or out of range.
    """
    if value is None:
        return None
    low, high = _EXPIRY_S
    if isinstance(value, dict) and set(value) == {"anchor", "seconds"}:
        seconds = value["seconds"]
        right = isinstance(seconds, int) and not isinstance(seconds, bool)
        if value["anchor"] == "created_at" and right and low <= seconds <= high:
            return int(seconds)
    raise invalid(where, f"{where}: give anchor created_at and seconds from {low} to {high}")


def _too_large(limit: int) -> ApiError:
    message = f"the file is larger than {limit} bytes, which batches.max_file_bytes allows"
    return ApiError(413, message, "file_too_large")
