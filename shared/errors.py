"""The error tree of penstock.

::

    PenstockError
    ├── ConfigurationError          a setting, flag or file is wrong
    ├── RedisUnavailable            no server found, unreachable, or too old
    ├── ModelError
    │   ├── ModelNotFound           no such checkpoint directory
    │   ├── UnsupportedModel        the load gate refused the architecture
    │   └── InsufficientMemory      the KV budget holds not even one sequence
    ├── InvalidRequest              a field is missing, unknown or out of range
    │   └── ProtocolError           bytes on the wire are not our protocol
    ├── SubmitRefused
    │   ├── QueueFull               a bound on what waits was reached; retry later
    │   ├── IdConflict              this id was used for another payload
    │   └── IdInUse                 a dead letter's id is that of another request by now
    ├── UnknownDeadLetter           no dead letter of that name
    ├── StreamError
    │   ├── UnknownRequest          never submitted, or its retention has passed
    │   └── StreamDiverged          the log contradicts what this reader already saw
    ├── RequestFailed               the request ended, and not with ``completed``
    └── IntegrityError              an invariant of the engine does not hold (a bug)

Every class carries its facts as attributes, so that callers need not parse messages.
The message is one line, and where the reader can mend the cause it ends with the remedy.
"""

from __future__ import annotations

from .quoting import one_line, quote

__all__ = [
    "ConfigurationError",
    "IdConflict",
    "IdInUse",
    "InsufficientMemory",
    "IntegrityError",
    "InvalidRequest",
    "ModelError",
    "ModelNotFound",
    "PenstockError",
    "ProtocolError",
    "QueueFull",
    "RedisUnavailable",
    "RequestFailed",
    "StreamDiverged",
    "StreamError",
    "SubmitRefused",
    "UnknownDeadLetter",
    "UnknownRequest",
    "UnsupportedModel",
]


class PenstockError(Exception):
    """Root of all errors that penstock raises on purpose."""


class ConfigurationError(PenstockError):
    """A setting, flag or configuration file is wrong; nothing was started."""


class RedisUnavailable(PenstockError):
    """No Redis server was found, it cannot be reached, or it is too old.

    Attributes:
        outage: what is wrong for now, without names of hosts; empty where waiting does not help.
    """

    def __init__(self, message: str, *, outage: str = "") -> None:
        super().__init__(message)
        self.outage = outage


class ModelError(PenstockError):
    """A checkpoint cannot be served."""


class ModelNotFound(ModelError):
    """The model directory does not exist or holds no checkpoint."""


class UnsupportedModel(ModelError):
    """The load gate refused an architecture that would be silently wrong here."""


class InsufficientMemory(ModelError):
    """The KV memory budget is too small for a single sequence of one block."""


class InvalidRequest(PenstockError):
    """A request field is missing, unknown, of the wrong type or out of range.

    Field and value may come from outside as they are: the message is one line of at most 1,200
    characters that has a UTF-8 form.

    Attributes:
        field: dotted name of the offending field, shortened for display.
        value: what was given, shortened for display.
        allowed: what would be accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = one_line(field, 80)
        self.value = quote(value)
        self.allowed = one_line(allowed, 1000)
        super().__init__(f"{self.field}: got {self.value}; allowed: {self.allowed}")


class ProtocolError(InvalidRequest):
    """Bytes on the wire do not follow the protocol (malformed msgpack, wrong shape)."""


class SubmitRefused(PenstockError):
    """The request was not accepted; nothing was stored."""


class QueueFull(SubmitRefused):
    """A bound on what waits was reached.

    Attributes:
        bound: the bound: ``requests``, ``tokens`` or ``bytes``; with ``tenant_`` before it, what
            one tenant may hold of it.
        limit: its value, in that unit.
        retry_after_ms: a hint for when to try again, in milliseconds.
    """

    def __init__(self, bound: str, limit: int, retry_after_ms: int) -> None:
        super().__init__(
            f"queue full: the bound on queued {bound} ({limit}) is reached; "
            f"retry in about {retry_after_ms} ms or add workers"
        )
        self.bound = bound
        self.limit = limit
        self.retry_after_ms = retry_after_ms


class IdConflict(SubmitRefused):
    """The id was already submitted with a different payload.

    Attributes:
        request_id: the id in question.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"id {request_id!r} was already submitted with another payload; "
            "use a new id, or send exactly the same request to get the first one's stream"
        )
        self.request_id = request_id


class IdInUse(SubmitRefused):
    """A dead letter cannot be redriven: its id belongs to another request by now.

    Attributes:
        request_id: the id in question.
        state: the state of the request that has it.
    """

    def __init__(self, request_id: str, state: str) -> None:
        super().__init__(
            f"the id {request_id!r} is in use: a request of that name is {state}; "
            "redrive the dead letter when that one has ended and its retention has passed"
        )
        self.request_id = request_id
        self.state = state


class UnknownDeadLetter(PenstockError):
    """No dead letter has that name: it never existed, or was redriven, dropped or displaced.

    Attributes:
        name: the name that was asked for.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"no dead letter {name!r}; `penstock dlq list` shows all there are")
        self.name = name


class StreamError(PenstockError):
    """A token stream cannot be read."""


class UnknownRequest(StreamError):
    """No such request: never submitted, or its retention has passed.

    Attributes:
        request_id: the id in question.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request {request_id!r} is not known: it was never submitted to this model and "
            "shard, or its retention has passed"
        )
        self.request_id = request_id


class StreamDiverged(StreamError):
    """The log contradicts tokens this reader has already seen.

    Possible only after the Redis primary and the request's owner were lost together under
    asynchronous replication (see docs/protocol.md, limits).

    Attributes:
        request_id: the id in question.
        index: token index up to which the reader had read.
    """

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(
            f"stream of {request_id!r} diverged before token {index}: tokens already read are "
            "not the ones in the log; read again from index 0"
        )
        self.request_id = request_id
        self.index = index


class RequestFailed(PenstockError):
    """The request reached a terminal state other than ``completed``.

    Attributes:
        request_id: the id in question.
        state: ``failed``, ``cancelled``, ``expired`` or ``dead``.
        reason: one of the closed set in :class:`penstock.shared.protocol.Reason`.
        message: detail for a person; may be empty.
    """

    def __init__(self, request_id: str, state: str, reason: str, message: str = "") -> None:
        detail = f": {message}" if message else ""
        super().__init__(f"request {request_id!r} ended {state} ({reason}){detail}")
        self.request_id = request_id
        self.state = state
        self.reason = reason
        self.message = message


class IntegrityError(PenstockError):
    """An internal invariant does not hold. Always a bug; never caught to go on."""
