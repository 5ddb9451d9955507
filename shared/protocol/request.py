"""What travels over Redis: ``Request`` in, ``Chunk`` and ``End`` out. Typed and validated.

Chunk and End live in :mod:`.events`. Any msgpack library can speak this; docs/protocol.md
describes it for other languages. Strings are msgpack *str*, never *bin* (Redis' own Lua reader of
msgpack does not know *bin*).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

from ..errors import InvalidRequest, ProtocolError
from . import field_checks as check
from .parsing import parse_msgpack
from .sampling_options import SamplingOptions
from .states import Answer, Lane, OnDisconnect

__all__ = ["MAX_PAYLOAD_BYTES", "PROTOCOL_VERSION", "Request", "check_id", "check_tenant"]

PROTOCOL_VERSION = 1

MAX_PAYLOAD_BYTES = 1 << 20
"""Largest packed request, in bytes."""

MAX_PROMPT_TOKENS = 1 << 18
MAX_WAIT_MS = 7 * 24 * 3600 * 1000

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
_ID_ALLOWED = "1 to 128 characters of A-Z a-z 0-9 _ . : -, starting with a letter or digit"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TENANT_ALLOWED = "1 to 64 characters of A-Z a-z 0-9 _ . -, starting with a letter or digit"


_OPTION_NAMES = frozenset(f.name for f in fields(SamplingOptions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request.

    Attributes:
        id: client-chosen and unique per shard; submitting the same id twice runs it once.
        prompt: text, token ids, or chat messages (``{"role": ..., "content": ...}``) that the
            worker renders with the model's chat template.
        lane: urgency.
        tenant: who pays; fair shares are between tenants.
        options: sampling and stopping.
        deadline_ms: from acceptance, the whole request's time in ms; None takes the default of
            the queue's settings.
        max_queue_ms: from acceptance, how long it may wait for a worker, in ms; None: no bound
            but the deadline.
        answer: form of its chunks and its end in the log and on the channel.
        on_disconnect: ``cancel`` ends it when no reader has been there for a grace period. That
            counts from when the first one came: until then it waits and runs like any other.

    Raises:
        InvalidRequest: a field is missing, unknown, of the wrong type or out of range.
    """

    id: str
    prompt: str | tuple[int, ...] | tuple[dict[str, str], ...]
    lane: Lane = Lane.NORMAL
    tenant: str = "default"
    options: SamplingOptions = field(default_factory=SamplingOptions)
    deadline_ms: int | None = None
    max_queue_ms: int | None = None
    answer: Answer = Answer.MSGPACK
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_id(self.id)
        check_tenant(self.tenant)
        put(self, "lane", check.member("lane", self.lane, Lane))
        put(self, "answer", check.member("answer", self.answer, Answer))
        put(self, "on_disconnect", check.member("on_disconnect", self.on_disconnect, OnDisconnect))
        put(self, "prompt", _prompt(self.prompt))
        if not isinstance(self.options, SamplingOptions):
            raise InvalidRequest("options", self.options, "SamplingOptions")
        if isinstance(self.prompt[0], int):
            self.options.check_prompt(len(self.prompt))
        for name in ("deadline_ms", "max_queue_ms"):
            value = getattr(self, name)
            if value is not None:
                check.integer(name, value, 1, MAX_WAIT_MS)

    @classmethod
    def build(cls, /, *, id: str, prompt: Any, **values: Any) -> Request:
        """A request from flat fields, the form used on the wire and on command lines.

        Raises:
            InvalidRequest: as the class; also for a field that does not exist.
        """
        options = {key: values.pop(key) for key in list(values) if key in _OPTION_NAMES}
        unknown = sorted(values.keys() - _REQUEST_NAMES)
        if unknown:
            known = (_REQUEST_NAMES | _OPTION_NAMES) - {"options"}
            raise check.unknown(unknown[0], values[unknown[0]], known)
        return cls(id=id, prompt=prompt, options=SamplingOptions(**options), **values)

    @property
    def seed(self) -> int:
        """The seed in force: the option, or 63 bits of the id's SHA-256."""
        if self.options.seed is not None:
            return self.options.seed
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "big") >> 1

    @property
    def cost_estimate(self) -> int:
        """Tokens this request may cost, for fair shares and bounds, before tokenisation.

        What it really cost is settled when it ends.
        """
        return self.prompt_estimate + self.output_estimate

    @property
    def prompt_estimate(self) -> int:
        """Of :attr:`cost_estimate`, the tokens of the prompt.

        Those of a text are taken as its UTF-8 bytes over 4, rounded up.
        """
        if isinstance(self.prompt, str):
            return -(-len(self.prompt.encode()) // 4)
        if isinstance(self.prompt[0], int):
            return len(self.prompt)
        return -(-sum(len(m["content"].encode()) for m in self.prompt) // 4)

    @property
    def output_estimate(self) -> int:
        """Of :attr:`cost_estimate`, the tokens that are generated: ``max_tokens`` per sequence."""
        return self.options.max_tokens * self.options.num_sequences

    def pack(self) -> bytes:
        """The request as msgpack: a flat map; fields that hold their default are left out.

        Raises:
            InvalidRequest: the packed form is larger than :data:`MAX_PAYLOAD_BYTES`.
        """
        wire: dict[str, Any] = {"v": PROTOCOL_VERSION, "id": self.id, "prompt": self.prompt}
        for owner, defaults in ((self, _REQUEST_DEFAULTS), (self.options, _OPTION_DEFAULTS)):
            for name, default in defaults.items():
                value = getattr(owner, name)
                if value != default:
                    wire[name] = value
        if self.options.logit_bias:
            # Map keys are strings on this wire, as in JSON.
            wire["logit_bias"] = {str(i): bias for i, bias in self.options.logit_bias.items()}
        packed: bytes = msgpack.packb(wire)
        if len(packed) > MAX_PAYLOAD_BYTES:
            allowed = f"a request of at most {MAX_PAYLOAD_BYTES} bytes; this one has {len(packed)}"
            raise InvalidRequest("prompt", self.prompt, allowed)
        return packed

    @classmethod
    def unpack(cls, payload: bytes) -> Request:
        """The inverse of :meth:`pack`, for bytes from anywhere.

        Raises:
            ProtocolError: not msgpack, not UTF-8, not a map, or another protocol version.
            InvalidRequest: a field is missing, unknown, of the wrong type or out of range.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ProtocolError("payload", f"{len(payload)} bytes", f"<= {MAX_PAYLOAD_BYTES} bytes")
        wire = parse_msgpack("payload", payload)
        if not isinstance(wire, dict) or not all(isinstance(key, str) for key in wire):
            raise ProtocolError("payload", wire, "a msgpack map with string keys")
        version = wire.pop("v", None)
        if version != PROTOCOL_VERSION:
            raise ProtocolError("v", version, f"protocol version {PROTOCOL_VERSION}")
        for name in ("id", "prompt"):
            if name not in wire:
                raise InvalidRequest(name, None, "a value; the field is required")
        return cls.build(**wire)


_REQUEST_NAMES = frozenset(f.name for f in fields(Request)) - {"options"}
_REQUEST_DEFAULTS = {
    "lane": Lane.NORMAL,
    "tenant": "default",
    "deadline_ms": None,
    "max_queue_ms": None,
    "answer": Answer.MSGPACK,
    "on_disconnect": OnDisconnect.CONTINUE,
}
_OPTION_DEFAULTS = {f.name: f.default for f in fields(SamplingOptions)}


def check_id(value: object) -> str:
    """A request id.

    Raises:
        InvalidRequest: it is not one.
    """
    return check.name("id", value, _ID, _ID_ALLOWED)


def check_tenant(value: object) -> str:
    """A tenant's name.

    Raises:
        InvalidRequest: it is not one.
    """
    return check.name("tenant", value, _TENANT, _TENANT_ALLOWED)


def _prompt(value: object) -> str | tuple[int, ...] | tuple[dict[str, str], ...]:
    if isinstance(value, str):
        return check.text("prompt", value, MAX_PAYLOAD_BYTES)
    kinds = "non-empty text, a list of token ids, or a list of chat messages"
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray) or not value:
        raise InvalidRequest("prompt", value, kinds)
    if isinstance(value[0], Mapping):
        return tuple(_message(f"prompt[{i}]", message) for i, message in enumerate(value))
    return check.token_ids("prompt", value, MAX_PROMPT_TOKENS, empty_ok=False)


def _message(where: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or set(value) != {"role", "content"}:
        raise InvalidRequest(where, value, "a map with exactly the keys role and content")
    return {
        "role": check.text(f"{where}.role", value["role"], 64),
        "content": check.text(
            f"{where}.content", value["content"], MAX_PAYLOAD_BYTES, empty_ok=True
        ),
    }
