"""Messages that go over one bound each, for the guards of ``docs/security.md``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from starlette.requests import Request as HttpRequest

from penstock.producer.gateway.access import key_access
from penstock.producer.gateway.api_errors import ApiError
from penstock.producer.gateway.serving import request_body
from penstock.producer.gateway.serving.request_body import read_object
from penstock.producer.reading.merge import Merger
from penstock.shared.errors import ConfigurationError, InvalidRequest, ProtocolError, StreamDiverged
from penstock.shared.protocol.event_reader import unpack_event, unpack_letter
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.parsing import parse_json
from penstock.shared.protocol.plain_entry import Admission, Entry, read_entry
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Reason
from penstock.shared.quoting import one_line, quote
from penstock.shared.settings import GatewaySettings, load_settings


def wire(**fields: Any) -> bytes:
    return msgpack.packb({"v": 1, "id": "a", "prompt": "x", **fields})


def refuses(payload: bytes, match: str, kind: type[Exception] = InvalidRequest) -> None:
    with pytest.raises(kind, match=match):
        Request.unpack(payload)


def payload(match: str, **fields: Any) -> Callable[[], None]:
    return lambda: refuses(wire(**fields), match)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def too_large() -> None:
    refuses(wire(logit_bias={"x": "y" * (1 << 20)}), "bytes", ProtocolError)


def another_version() -> None:
    refuses(msgpack.packb({"v": 2, "id": "a", "prompt": "x"}), "protocol version", ProtocolError)


def no_map() -> None:
    refuses(msgpack.packb(["a"]), "a msgpack map", ProtocolError)


def too_deep() -> None:
    refuses(wire(prompt=nested(20)), "nested too deeply", ProtocolError)


def too_many_containers() -> None:
    messages = [{} for _ in range(70_000)]
    refuses(wire(prompt=messages), "nested too deeply", ProtocolError)


def bytes_that_no_parser_takes() -> None:
    refuses(b"\x81\x01\x01", "one msgpack value", ProtocolError)


def refuses_entry(match: str, *fields: str | bytes, tenant: str | None = None) -> None:
    parts = [field if isinstance(field, bytes) else field.encode() for field in fields]
    verdict = read_entry(Entry(tenant, "1700000000000-0", parts))
    assert not isinstance(verdict, Admission)
    assert match in verdict.message


def entry(match: str, *fields: str | bytes, tenant: str | None = None) -> Callable[[], None]:
    return lambda: refuses_entry(match, *fields, tenant=tenant)


def entry_too_large() -> None:
    refuses_entry("in all", "prompt", "x", "stop", "y" * (1 << 20))


def foreign_answer() -> None:
    verdict = read_entry(Entry("acme", "1700000000000-0", [b"id", b"other.1"]))
    assert verdict.id.startswith("acme.")


def json_too_deep() -> None:
    refuses_entry("nested too deeply", "messages", json.dumps([{"role": nested(20)}]))


def json_that_no_parser_takes() -> None:
    refuses_entry("", "prompt", "x", "stop_json", "[" * 200_000)


def schema_too_deep() -> None:
    schema: Any = {}
    for _ in range(150):
        schema = {"items": schema}
    refuses(wire(json_schema=json.dumps(schema)), "nested too deeply")


def schema_that_is_none() -> None:
    refuses(wire(json_schema="[1]"), "JSON Schema")


def one_printable_line() -> None:
    assert one_line("a\n\x1b[2J\u202e", 80).isprintable()


def short_line() -> None:
    assert len(one_line("x" * 10_000, 80)) <= 80


def short_form_of_a_text() -> None:
    assert quote("x" * 100_000_000, 80).endswith("...")


def many_digits() -> None:
    assert quote(10**5000) == f"an integer of {(10**5000).bit_length()} bits"


def deep_value() -> None:
    assert "..." in quote(nested(5000))


def wide_value() -> None:
    assert quote(list(range(100)), 1000).endswith(", ...]")


def foreign_class() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    assert quote(Rude()) == "<Rude>"


def chunk(start: int, ids: tuple[int, ...], before: tuple[int, ...] = ()) -> Chunk:
    return Chunk(start, ids, "".join(map(str, ids)), rolling_digest((*before, *ids)))


def other_tokens() -> None:
    merger = Merger("a")
    merger.add(chunk(0, (1, 2)))
    with pytest.raises(StreamDiverged):
        merger.add(chunk(2, (3,), before=(1, 9)))


def early_end() -> None:
    merger = Merger("a")
    merger.add(chunk(0, (1, 2)))
    with pytest.raises(StreamDiverged):
        merger.add(End(n=1, reason=Reason.LENGTH))


def late_end() -> None:
    merger = Merger("a")
    assert not merger.add(End(n=1, reason=Reason.LENGTH))
    assert merger.end is None


def gap() -> None:
    merger = Merger("a")
    assert not merger.add(chunk(2, (3,), before=(1, 2)))
    assert not merger.ready


def event(*parts: Any) -> Callable[[], None]:
    def refused() -> None:
        with pytest.raises(ProtocolError):
            unpack_event(msgpack.packb(parts))

    return refused


def event_that_no_parser_takes() -> None:
    with pytest.raises(ProtocolError):
        unpack_event(b"{" * 100_000)


def letter_of_half_a_pair() -> None:
    with pytest.raises(ProtocolError):
        list(unpack_letter(msgpack.packb([b"id"])))


def unknown_setting() -> None:
    with pytest.raises(ConfigurationError, match="there is no setting queue"):
        load_settings({"queue.no_such_setting": 1})


def long_key() -> None:
    assert key_access._secret({"authorization": "Bearer " + "x" * 10_000}) == ""


def body_refused(status: int, *parts: bytes, declared: int | None = None) -> None:
    """The body is refused with this status; after its parts nothing comes, for ever."""
    rest = list(parts)

    async def receive() -> dict[str, Any]:
        if not rest:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": rest.pop(0), "more_body": True}

    headers = [(b"content-type", b"application/json")]
    headers += [] if declared is None else [(b"content-length", str(declared).encode())]
    request = HttpRequest({"type": "http", "headers": headers}, receive)
    limits = GatewaySettings(max_body="1MiB", body_timeout_s=0.1)

    async def read() -> None:
        async with asyncio.timeout(3):
            await read_object(request, limits)

    with pytest.raises(ApiError) as caught:
        asyncio.run(read())
    assert caught.value.status == status


def long_body() -> None:
    body_refused(413, b"x" * (1 << 20), b"x")


def declared_body() -> None:
    body_refused(413, declared=1 << 30)


def slow_body() -> None:
    body_refused(408, b"{")


def deep_body() -> None:
    text = b"[" * 500 + b"]" * 500
    with pytest.raises(InvalidRequest):
        parse_json("body", text.decode(), "a JSON object", max_depth=request_body._MAX_DEPTH)


def many_biases() -> None:
    refuses(wire(logit_bias={str(number): 1 for number in range(1000)}), "logit_bias")
