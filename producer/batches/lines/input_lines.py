"""Lines of a batch file: each is checked before anything is computed.

Validation is all or nothing. It runs in slices, so that a large file blocks nothing else and a
driver that dies loses one slice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

import msgpack

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.parsing import find_half_surrogate, parse_json

from ..stores.records import Batch, LineError
from .line_endpoints import LineRefused, Translation

__all__ = ["InputLine", "Slice", "first_url", "parse_line", "read_slice"]

_SLICE_LINES = 1000
_SLICE_BYTES = 8 << 20
_MAX_CUSTOM_ID_CHARS = 512
_MAX_DEPTH = 100
_SORT_CHARS = 512
_KEYS = frozenset({"custom_id", "method", "url", "body"})
_MAYBE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""What each half of a surrogate pair looks like; few lines have any."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of an input file that is right in its form.

    Attributes:
        custom_id: the caller's name for it.
        body: what is asked for.
    """

    custom_id: str
    body: dict[str, Any]


@dataclass(slots=True)
class Slice:
    """What the validation of some consecutive lines found.

    Attributes:
        end: offset in the file behind them, in bytes.
        lines: how many they are.
        model: the model they name; empty if none was read.
        entries: for each line its number, offset, length, hash of its ``custom_id``, and the begin
            of its prompt.
        errors: what is wrong with them.
        last: whether the file ends here.
    """

    end: int
    lines: int
    model: str
    entries: list[tuple[int, int, int, bytes, bytes]] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)
    last: bool = False

    def pack(self) -> bytes:
        """The entries as a plan piece."""
        packed: bytes = msgpack.packb(self.entries)
        return packed


def read_slice(
    file: IO[bytes],
    batch: Batch,
    translate: Callable[[dict[str, Any]], Translation],
    *,
    max_lines: int,
    max_line_bytes: int,
) -> Slice:
    """Validate the next lines of a batch's input. It blocks: call it in a thread.

    Args:
        file: the input.
        batch: whose lines before ``read_bytes`` were validated.
        translate: reads the body of a line.
        max_lines: most lines of a file.
        max_line_bytes: longest line.
    """
    file.seek(batch.read_bytes)
    found = Slice(batch.read_bytes, batch.read_lines, batch.model)
    while found.lines - batch.read_lines < _SLICE_LINES:
        if found.end - batch.read_bytes >= _SLICE_BYTES:
            break
        data = file.readline(max_line_bytes + 1)
        if not data:
            found.last = True
            break
        found.lines += 1
        if found.lines > max_lines:
            message = f"a batch may have at most {max_lines} lines"
            found.errors.append(LineError(code="too_many_lines", message=message))
            found.last = True
            break
        if len(data) > max_line_bytes:
            message = f"a line may have at most {max_line_bytes} bytes"
            found.errors.append(LineError(code="line_too_long", message=message, line=found.lines))
            found.last = True  # where the next line begins is not searched for
            break
        _check_line(found, batch, data, translate)
        found.end += len(data)
    return found


def _check_line(
    found: Slice, batch: Batch, data: bytes, translate: Callable[[dict[str, Any]], Translation]
) -> None:
    if not data.strip():  # an empty line at the end is common
        return
    try:
        line = parse_line(data, batch.endpoint)
        translation = translate(line.body)
        if batch.models is not None and translation.model not in batch.models:
            message = f"this API key may not use the model {translation.model!r}"
            raise LineRefused("model_not_allowed", message, "body.model")
        if found.model not in ("", translation.model):
            message = f"a batch has one model; an earlier line names {found.model!r}"
            raise LineRefused("mismatched_model", message, "body.model")
    except LineRefused as error:
        found.errors.append(
            LineError(code=error.code, message=str(error), param=error.param, line=found.lines)
        )
        return
    found.model = translation.model
    name = hashlib.sha256(line.custom_id.encode()).digest()[:16]
    fields = translation.fields
    begin = _begin(fields.get("prompt", fields.get("payload")))
    found.entries.append((found.lines, found.end, len(data), name, begin))


def _begin(prompt: object) -> bytes:
    """The begin of a prompt in a form that sorts equal begins beside each other."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
    return text[:_SORT_CHARS].encode("utf-8", "replace")


def parse_line(data: bytes, endpoint: str) -> InputLine:
    """Read one line of a file whose lines all go to one endpoint.

    Raises:
        LineRefused: it is not what it must be.
    """
    try:
        line = parse_json("line", data.decode(), "a JSON object", max_depth=_MAX_DEPTH)
    except UnicodeDecodeError:
        raise LineRefused("invalid_json_line", "the line is not UTF-8") from None
    except InvalidRequest as error:
        raise LineRefused("invalid_json_line", str(error)) from None
    if not isinstance(line, dict):
        raise LineRefused("invalid_json_line", "a line is a JSON object")
    for name in line:
        if name not in _KEYS:
            shown = name[:64].encode("ascii", "backslashreplace").decode()
            raise LineRefused("unknown_parameter", f"there is no field {shown!r}", shown)
    if _MAYBE_HALF.search(data) and (half := find_half_surrogate(line)) is not None:
        raise LineRefused("invalid_text", half.message, half.path)
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID_CHARS:
        message = f"custom_id: give 1 to {_MAX_CUSTOM_ID_CHARS} characters"
        raise LineRefused("invalid_custom_id", message, "custom_id")
    if line.get("method") != "POST":
        raise LineRefused("invalid_method", "method: allowed is POST", "method")
    if line.get("url") != endpoint:
        message = f"url: allowed is the batch's endpoint, {endpoint}"
        raise LineRefused("mismatched_endpoint", message, "url")
    if not isinstance(body, dict):
        raise LineRefused("invalid_body", "body: give a JSON object", "body")
    return InputLine(custom_id, body)


def first_url(data: bytes) -> str:
    """The ``url`` of a line, which names the endpoint of all.

    Raises:
        InvalidRequest: the line names none.
    """
    try:
        line = parse_json("line 1", data.decode(), "a JSON object", max_depth=_MAX_DEPTH)
    except UnicodeDecodeError:
        raise InvalidRequest("line 1", data[:40], "UTF-8 text") from None
    url = line.get("url") if isinstance(line, dict) else None
    if not isinstance(url, str):
        raise InvalidRequest("line 1", data[:40], "a JSON object with url, the endpoint")
    return url
