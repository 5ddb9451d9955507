"""The closed sets of the protocol: lanes, states, reasons to end, forms of an answer, drafts."""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "BY_URGENCY",
    "LANE_WEIGHTS",
    "TERMINAL_STATES",
    "Answer",
    "Lane",
    "ModelKind",
    "OnDisconnect",
    "Reason",
    "Speculation",
    "State",
]


class Lane(StrEnum):
    """How urgent a request is. Names, so that no polarity must be guessed."""

    CRITICAL = "critical"
    NORMAL = "normal"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """Position in order of urgency: 0 is served first."""
        return BY_URGENCY.index(self)


BY_URGENCY = (Lane.CRITICAL, Lane.NORMAL, Lane.BATCH)
"""Lanes, the most urgent first."""

LANE_WEIGHTS = {Lane.CRITICAL: 8, Lane.NORMAL: 4, Lane.BATCH: 1}
"""Shares of the fleet's tokens that each lane gets while all three have work."""


class State(StrEnum):
    """Life of a request: ``queued -> running -> one terminal state``; terminal never changes.

    A running request returns to ``queued`` when its worker dies or drains.
    """

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"


TERMINAL_STATES = frozenset(
    {State.COMPLETED, State.FAILED, State.CANCELLED, State.EXPIRED, State.DEAD}
)


class ModelKind(StrEnum):
    """What a model does with a request."""

    GENERATE = "generate"
    """Continues a prompt, token by token. All others map a payload to one result at once."""
    BATCH = "batch"
    """A user's own function."""
    EMBED = "embed"
    RERANK = "rerank"
    CLASSIFY = "classify"


class Answer(StrEnum):
    """Form of a request's chunks and its end."""

    MSGPACK = "msgpack"
    JSON = "json"


class OnDisconnect(StrEnum):
    """What becomes of a request when its last reader has left."""

    CONTINUE = "continue"
    CANCEL = "cancel"


class Speculation(StrEnum):
    """Where drafts of coming tokens may come from. It changes speed, never the output."""

    AUTO = "auto"
    """Whatever saves time at the moment, possibly nothing."""
    OFF = "off"
    """One token at a time."""
    NGRAM = "ngram"
    """Tokens that followed the same last tokens earlier, in prompt or output."""
    DRAFT = "draft"
    """The worker's draft model."""


class Reason(StrEnum):
    """Why a request ended. Closed: every exit path uses exactly one of these."""

    STOP = "stop"
    """The model ended the text (EOS), or a stop string or stop token was reached."""
    LENGTH = "length"
    """``max_tokens`` were generated, or the model's context is full."""

    INVALID = "invalid"
    """The worker found the request malformed (only possible past the client's own checks)."""
    QUEUE_FULL = "queue_full"
    """It came through the ingress, and a bound on what may wait was reached."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt leaves no room for a single token in the model's context or KV pool."""
    OUT_OF_MEMORY = "out_of_memory"
    """The request alone does not fit into memory."""
    ENGINE_ERROR = "engine_error"
    """The model or the engine raised; the message says what."""
    MODEL_CHANGED = "model_changed"
    """It had tokens, and no worker serves the model any more that made them."""

    CLIENT = "client"
    """Cancelled by a client."""
    DISCONNECTED = "disconnected"
    """The reader left, and the request asked to be cancelled then."""

    DEADLINE = "deadline"
    """``deadline_ms`` passed."""
    QUEUE_TIMEOUT = "queue_timeout"
    """``max_queue_ms`` passed before any worker claimed it."""

    POISON = "poison"
    """Too many workers crashed in a row while they ran it alone."""
    ATTEMPTS = "attempts"
    """It was claimed too often without ending."""

    @property
    def state(self) -> State:
        """The terminal state this reason belongs to."""
        return _STATE_OF[self]


_STATE_OF = {
    Reason.STOP: State.COMPLETED,
    Reason.LENGTH: State.COMPLETED,
    Reason.INVALID: State.FAILED,
    Reason.QUEUE_FULL: State.FAILED,
    Reason.PROMPT_TOO_LONG: State.FAILED,
    Reason.OUT_OF_MEMORY: State.FAILED,
    Reason.ENGINE_ERROR: State.FAILED,
    Reason.MODEL_CHANGED: State.FAILED,
    Reason.CLIENT: State.CANCELLED,
    Reason.DISCONNECTED: State.CANCELLED,
    Reason.DEADLINE: State.EXPIRED,
    Reason.QUEUE_TIMEOUT: State.EXPIRED,
    Reason.POISON: State.DEAD,
    Reason.ATTEMPTS: State.DEAD,
}
