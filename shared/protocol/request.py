"""One request and its packed form.

docs/protocol.md describes the form for other languages. Strings are msgpack *str*; only a payload
may hold *bin*, which the msgpack library inside Redis' Lua does not know.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import msgpack

from ..errors import InvalidRequest, ProtocolError
from .chat.chat_messages import check_messages, message_bytes
from .chat.chat_options import CHAT_OPTIONS, ChatOptions
from .fields.collection_types import TokenIds
from .fields.field_types import Flag, Integer, Name, OptionTable, Text, Word, option
from .parsing import parse_msgpack
from .payload import check_payload, packed_size
from .sampling_options import SAMPLING_OPTIONS, SamplingOptions
from .states import Answer, Lane, OnDisconnect

__all__ = [
    "LIKELY_OUTPUT_TOKENS",
    "MAX_PAYLOAD_BYTES",
    "PROTOCOL_VERSION",
    "REQUEST_OPTIONS",
    "Request",
    "check_id",
    "check_tenant",
    "unknown_field",
]

PROTOCOL_VERSION = 1

MAX_PAYLOAD_BYTES = 1 << 20
"""Largest packed request, in bytes."""

LIKELY_OUTPUT_TOKENS = 4096
"""What an output is taken for in bounds and shares, until it is there."""

MAX_PROMPT_TOKENS = 1 << 18
MAX_WAIT_MS = 7 * 24 * 3600 * 1000

ID_TYPE = Name(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}"),
    "1 to 128 characters of A-Z a-z 0-9 _ . : -, starting with a letter or digit",
)
TENANT_TYPE = Name(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"),
    "1 to 64 characters of A-Z a-z 0-9 _ . -, starting with a letter or digit",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: a prompt to continue, or a payload to answer at once.

    Attributes:
        id: chosen by the client and unique per shard; submitting an id twice runs it once.
        prompt: text, token ids, or chat messages that the worker renders with the model's chat
            template, in the normal form of :func:`.chat.chat_messages.check_messages`. Empty text
            beside a payload.
        payload: what a model that answers at once maps to one result: bytes, or any msgpack value.
            None for a prompt.
        options: sampling and stopping.
        chat: tools, template variables, and whether the answer is parsed.

    Its other fields are declared as in :class:`SamplingOptions`.

    Raises:
        InvalidRequest: a field is missing, unknown, of the wrong type or out of range.
    """

    id: str
    prompt: str | tuple[int, ...] | tuple[dict[str, Any], ...] = ""
    payload: Any = field(default=None, hash=False)
    lane: Lane = option(Lane.NORMAL, Word(Lane), "How urgent the request is.")
    tenant: str = option("default", TENANT_TYPE, "Who pays; fair shares are between tenants.")
    options: SamplingOptions = field(default_factory=SamplingOptions)
    chat: ChatOptions = field(default_factory=ChatOptions)
    deadline_ms: int | None = option(
        None,
        Integer(1, MAX_WAIT_MS),
        "Time for the whole request from its acceptance, in ms.",
        unset="the queue's default",
    )
    max_queue_ms: int | None = option(
        None,
        Integer(1, MAX_WAIT_MS),
        "Longest wait for a worker from the request's acceptance, in ms.",
        unset="the deadline",
    )
    retention_ms: int | None = option(
        None,
        Integer(1000, MAX_WAIT_MS),
        "How long the answer stays readable after the request's end, in ms.",
        unset="the queue's retention",
    )
    answer: Answer = option(
        Answer.MSGPACK, Word(Answer), "Form of the answer in the log and on the channel."
    )
    # The grace period begins with the first reader: until then the request waits and runs.
    on_disconnect: OnDisconnect = option(
        OnDisconnect.CONTINUE,
        Word(OnDisconnect),
        "What becomes of the request when its last reader has left.",
    )
    tokenize: bool = option(
        False,
        Flag(),
        "Answer with the prompt's own tokens and their text; the model computes nothing.",
    )

    def __post_init__(self) -> None:
        check_id(self.id)
        _OWN.check(self)
        if not isinstance(self.options, SamplingOptions):
            raise InvalidRequest("options", self.options, "SamplingOptions")
        if not isinstance(self.chat, ChatOptions):
            raise InvalidRequest("chat", self.chat, "ChatOptions")
        if self.payload is not None:
            self._check_payload()
            return
        object.__setattr__(self, "prompt", _prompt(self.prompt))
        self._check_chat()
        if isinstance(self.prompt[0], int):
            self.options.check_prompt(len(self.prompt))

    @classmethod
    def build(
        cls, /, *, id: str, prompt: Any = None, payload: Any = None, **values: Any
    ) -> Request:
        """Return a request from flat fields, the form on the wire and on command lines.

        Exactly one of ``prompt`` and ``payload`` is not None.

        Raises:
            InvalidRequest: as the class; also for a field that does not exist.
        """
        options = {key: values.pop(key) for key in list(values) if key in SAMPLING_OPTIONS.defaults}
        chat = {key: values.pop(key) for key in list(values) if key in CHAT_OPTIONS.defaults}
        for name in values:
            if name not in _OWN.defaults:
                known = ("id", "prompt", "payload", *(item.name for item in REQUEST_OPTIONS))
                raise unknown_field(name, values[name], known)
        if (prompt is None) == (payload is None):
            raise InvalidRequest("prompt", prompt, "a prompt or a payload, one of the two")
        of_chat = ChatOptions(**chat)
        return cls(
            id=id,
            prompt="" if prompt is None else prompt,
            payload=payload,
            options=SamplingOptions(**options),
            chat=of_chat,
            **values,
        )

    def _check_payload(self) -> None:
        """Check a payload, and that nothing beside it asks for generated text."""
        if self.prompt:
            raise InvalidRequest("prompt", self.prompt, "nothing beside a payload")
        object.__setattr__(self, "payload", check_payload("payload", self.payload))
        given = {
            **self._given(self.options, SAMPLING_OPTIONS),
            **self._given(self.chat, CHAT_OPTIONS),
        }
        if self.tokenize:
            given["tokenize"] = True
        for name, value in given.items():
            raise InvalidRequest(name, value, "nothing beside a payload, which generates no tokens")

    @staticmethod
    def _given(owner: object, table: OptionTable) -> dict[str, Any]:
        """The options that do not hold their default."""
        values = ((name, getattr(owner, name)) for name in table.defaults)
        return {name: value for name, value in values if value != table.defaults[name]}

    def _check_chat(self) -> None:
        """Check what chat options ask of the other fields."""
        chat, options = self.chat, self.options
        if self.tokenize and (options.num_sequences > 1 or options.constraint):
            raise InvalidRequest("tokenize", True, "false beside several choices or a form")
        if (field := chat.constraint) is not None:
            allowed = f"nothing beside {field}, which makes calls certain"
            for name in (options.constraint, "ignore_eos", "beam_width"):
                if name is not None and getattr(options, name) not in (False, 1):
                    raise InvalidRequest(name, getattr(options, name), allowed)
        if not isinstance(self.prompt[0], Mapping):
            for name in ("tools", "chat_template_kwargs", "reasoning_effort"):
                if (value := getattr(chat, name)) is not None:
                    allowed = "nothing beside a prompt of text or token ids; give chat messages"
                    raise InvalidRequest(name, value, allowed)

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

        Those of a text are taken as its UTF-8 bytes over 4, rounded up. Chat counts what its
        messages say, and the tools. A payload counts one for each KiB, rounded up.
        """
        if self.payload is not None:
            return -(-packed_size(self.payload) // 1024) or 1
        if isinstance(self.prompt, str):
            return -(-len(self.prompt.encode()) // 4)
        if isinstance(self.prompt[0], int):
            return len(self.prompt)
        tools = 0 if self.chat.tools is None else len(self.chat.tools.encode())
        return -(-(sum(map(message_bytes, self.prompt)) + tools) // 4)

    @property
    def output_estimate(self) -> int:
        """Of :attr:`cost_estimate`, the tokens that are likely to be generated.

        Clients give a large ``max_tokens`` to say "until it is done". Outputs of more than
        :data:`LIKELY_OUTPUT_TOKENS` are rare unless ``ignore_eos`` or ``min_tokens`` asks for them.
        """
        if self.payload is not None:
            return 1
        if self.tokenize:
            return 0
        options = self.options
        likely = max(LIKELY_OUTPUT_TOKENS, options.min_tokens)
        if options.ignore_eos:
            likely = options.max_tokens
        return min(options.max_tokens, likely) * options.num_sequences

    def pack(self) -> bytes:
        """Return the request as msgpack: a flat map without the fields that hold their default.

        Raises:
            InvalidRequest: the packed form is larger than :data:`MAX_PAYLOAD_BYTES`.
        """
        field = "prompt" if self.payload is None else "payload"
        asked = getattr(self, field)
        wire: dict[str, Any] = {"v": PROTOCOL_VERSION, "id": self.id, field: asked}
        tables = (self, _OWN), (self.options, SAMPLING_OPTIONS), (self.chat, CHAT_OPTIONS)
        for owner, table in tables:
            wire |= self._given(owner, table)
        if self.options.logit_bias:
            # Map keys are strings on this wire, as in JSON.
            wire["logit_bias"] = {str(i): bias for i, bias in self.options.logit_bias.items()}
        packed: bytes = msgpack.packb(wire)
        if len(packed) > MAX_PAYLOAD_BYTES:
            allowed = f"a request of at most {MAX_PAYLOAD_BYTES} bytes; this one has {len(packed)}"
            raise InvalidRequest(field, asked, allowed)
        return packed

    @classmethod
    def unpack(cls, payload: bytes) -> Request:
        """Return the request of a packed form that may come from anywhere.

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
        if "id" not in wire:
            raise InvalidRequest("id", None, "a value; the field is required")
        return cls.build(**wire)


_OWN = OptionTable(Request)

REQUEST_OPTIONS = (*_OWN.options, *SAMPLING_OPTIONS.options, *CHAT_OPTIONS.options)
"""All fields of a request that may be left out, in the order of its packed form."""


def unknown_field(name: str, value: object, known: Iterable[str]) -> InvalidRequest:
    """Return what to raise for a field that does not exist: it names all that do."""
    names = sorted(known)
    close = get_close_matches(name[:64], names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return InvalidRequest(name, value, f"one of the fields {', '.join(names)}{hint}")


def check_id(value: object) -> str:
    """Return a request id.

    Raises:
        InvalidRequest: it is none.
    """
    return ID_TYPE.check("id", value)


def check_tenant(value: object) -> str:
    """Return a tenant's name.

    Raises:
        InvalidRequest: it is none.
    """
    return TENANT_TYPE.check("tenant", value)


def _prompt(value: object) -> str | tuple[int, ...] | tuple[dict[str, Any], ...]:
    if isinstance(value, str):
        return Text(MAX_PAYLOAD_BYTES).check("prompt", value)
    kinds = "non-empty text, a list of token ids, or a list of chat messages"
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray) or not value:
        raise InvalidRequest("prompt", value, kinds)
    if isinstance(value[0], Mapping):
        return check_messages("prompt", value)
    return TokenIds(MAX_PROMPT_TOKENS, min_items=1).check("prompt", value)
