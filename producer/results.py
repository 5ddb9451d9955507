"""The values that the client returns; they hold no connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.shared.errors import RequestFailed
from penstock.shared.protocol.events import End, TokenLogprobs, Usage
from penstock.shared.protocol.payload import unpack_result
from penstock.shared.protocol.states import Lane, Reason, State

from .choices import Choice

__all__ = ["Result", "Status", "Submitted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """Answer to a submit: the request is accepted and will reach exactly one terminal state.

    Attributes:
        id: the request's id; any process may use it to stream, cancel or fetch the result.
        duplicate: the same id and payload was accepted before; nothing was changed.
        state: its present state: ``queued`` unless it is a duplicate.
        n: output tokens so far; 0 unless it is a duplicate.
        waiting: requests now waiting in the shard; None for a duplicate.
        accepted_at: when it was first accepted, in ms of Redis' clock.
    """

    id: str
    duplicate: bool
    state: State
    n: int
    waiting: int | None
    accepted_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a request. Times are in ms of Redis' clock; None if not reached yet.

    Attributes:
        id: the request's id.
        state: its present state.
        n: output tokens published so far.
        lane: urgency it was submitted with.
        tenant: the tenant that it is charged to.
        end: the terminal event; None until it has ended.
        worker: id of the worker that runs it now; None if none does.
        accepted_at: when it was submitted.
        claimed_at: when a worker first took it.
        first_token_at: when its first token was published.
        ended_at: when it ended.
        note: what its submitter keeps with it for its readers; empty for none.
    """

    id: str
    state: State
    n: int
    lane: Lane
    tenant: str
    end: End | None
    worker: str | None
    accepted_at: int | None
    claimed_at: int | None
    first_token_at: int | None
    ended_at: int | None
    note: bytes = b""

    @property
    def mean_itl_ms(self) -> float | None:
        """Mean inter-token latency of an ended request in ms; None below two tokens."""
        if self.first_token_at is None or self.ended_at is None or self.n < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.n - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The whole output of a request that has ended.

    Attributes:
        id: the request's id.
        choices: its outputs, at least one; incomplete unless the state is ``completed``.
        end: the terminal event.
        prompt_logprobs: one per token of the prompt if the request asked for them, else empty; the
            first is None.
        packed_value: msgpack of the answer to a payload; empty if there is none.
    """

    id: str
    choices: tuple[Choice, ...]
    end: End
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    packed_value: bytes = b""

    @property
    def value(self) -> Any:
        """The answer to a payload; None if there is none (yet).

        Raises:
            ProtocolError: somebody else wrote it.
        """
        return unpack_result(self.packed_value) if self.packed_value else None

    @property
    def text(self) -> str:
        """The text of the first choice; most requests have no other."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One per token of the first choice if the request asked for them, else empty."""
        return self.choices[0].logprobs

    @property
    def state(self) -> State:
        """The terminal state."""
        return self.end.state

    @property
    def reason(self) -> Reason:
        """Why it ended."""
        return self.end.reason

    @property
    def usage(self) -> Usage | None:
        """What it consumed; None if no worker ended it (cancel, expiry)."""
        return self.end.usage

    def check(self) -> Result:
        """Return this result if the request was completed.

        Raises:
            RequestFailed: it ended in another state.
        """
        if self.state is not State.COMPLETED:
            raise RequestFailed(self.id, self.state, self.reason, self.end.message)
        return self
