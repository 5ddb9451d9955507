"""What is known of a batch and of a file: immutable records, kept as JSON in Redis."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from penstock.shared.protocol.states import Lane

__all__ = [
    "ENDED_STATES",
    "Batch",
    "BatchState",
    "BatchUsage",
    "FilePurpose",
    "LineError",
    "StoredFile",
    "batch_folder",
    "new_batch_id",
    "new_file_id",
]


class BatchState(StrEnum):
    """Life of a batch, in OpenAI's words.

    ::

        validating ─▶ in_progress ─▶ finalizing ─▶ completed | expired | cancelled
             │             └─▶ cancelling ─▶ finalizing
             └─▶ failed | cancelling | finalizing, as expired

    A batch whose storage stays broken for long after its window fails from any state.
    """

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED_STATES = frozenset(
    {BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED}
)


class FilePurpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class LineError(_Record):
    """Why a batch failed its validation.

    Attributes:
        code: a word for programs.
        message: for people.
        param: the field at fault, if one is.
        line: its number in the file, from 1; None if the whole file is meant.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchUsage(_Record):
    """Tokens of all lines that were computed.

    Attributes:
        prompt_tokens: of prompts.
        cached_tokens: those of them that were not computed again.
        output_tokens: of answers.
        reasoning_tokens: those of them that brought reasoning.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, more: BatchUsage) -> BatchUsage:
        """This and more tokens."""
        return BatchUsage(
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            cached_tokens=self.cached_tokens + more.cached_tokens,
            output_tokens=self.output_tokens + more.output_tokens,
            reasoning_tokens=self.reasoning_tokens + more.reasoning_tokens,
        )


class StoredFile(_Record):
    """A file. Times are in seconds of the Unix epoch.

    Attributes:
        id: ``file-`` and 24 hexadecimal digits.
        tenant: whose it is.
        filename: the name its sender gave it.
        purpose: what it is for.
        size: bytes.
        created_at: when.
        expires_at: when it is deleted; None for never.
    """

    id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    size: int
    created_at: int
    expires_at: int | None = None


class Batch(_Record):
    """A batch: what was asked for, how far it is, and what came out.

    Every line is unread, planned, in flight or finished. ``next_line`` and ``in_flight`` say which
    of the plan's lines are finished: those before ``next_line`` that are not in flight.

    Attributes:
        id: ``batch_`` and 24 hexadecimal digits.
        version: how often it was changed. A change is written only over the version it was made of.
        change: random name of the last change, by which a writer knows its own.
        tenant: who pays.
        endpoint: the URL that all its lines name.
        input_file_id: its lines.
        lane: urgency of its requests.
        window_s: time from its creation to its expiry.
        metadata: the caller's own.
        webhook: URL to call at its end.
        output_expires_after_s: life of its output files; None for the default.
        models: the models that its lines may name; None for all.
        state: see :class:`BatchState`.
        outcome: the state that it will end in, once it is finalizing.
        times: when it entered each state.
        expires_at: when unfinished lines are given up.
        model: the model that all its lines name; empty until one was read.
        shards: shards of the model that its lines are spread over.
        total: lines; 0 until all were read.
        completed: lines with an answer.
        failed: lines with an error.
        errors: why the validation failed.
        num_errors: how many errors there were, those that are not kept among them.
        read_bytes: how much of the input was validated.
        read_lines: how many of its lines.
        pieces: plan files of validated lines.
        next_line: how many lines of the plan were submitted.
        in_flight: places in the plan of lines submitted and not finished.
        parts: files of finished lines: answers.
        error_parts: the same: errors.
        output_file_id: answers, once it has ended.
        error_file_id: errors, once it has ended.
        usage: tokens so far.
        trouble: why it does not get on at the moment; empty if it does.
        trouble_since: from when on.
    """

    id: str
    version: int = 0
    change: str = ""
    tenant: str
    endpoint: str
    input_file_id: str
    lane: Lane = Lane.BATCH
    window_s: int
    metadata: dict[str, str] | None = None
    webhook: str | None = None
    output_expires_after_s: int | None = None
    models: tuple[str, ...] | None = None
    state: BatchState = BatchState.VALIDATING
    outcome: BatchState | None = None
    times: dict[BatchState, int]
    expires_at: int
    model: str = ""
    shards: tuple[int, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[LineError, ...] = ()
    num_errors: int = 0
    read_bytes: int = 0
    read_lines: int = 0
    pieces: tuple[str, ...] = ()
    next_line: int = 0
    in_flight: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    error_parts: tuple[str, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: BatchUsage = BatchUsage()
    trouble: str = ""
    trouble_since: int | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ENDED_STATES

    @property
    def created_at(self) -> int:
        """When it was created, in seconds of the Unix epoch."""
        return self.times[BatchState.VALIDATING]

    def into(self, state: BatchState, now: int, **changes: Any) -> Batch:
        """The batch in another state."""
        times = {**self.times, state: now}
        return self.model_copy(update={"state": state, "times": times, **changes})

    def request_id(self, line: int) -> str:
        """Id of the request of a line: the same whenever it is submitted, so that it runs once."""
        return f"{self.id}:{line}"


def batch_folder(batch_id: str) -> str:
    """Name of the storage's folder with what a batch needs until it has ended."""
    return f"batches/{batch_id}"


def new_batch_id() -> str:
    """A fresh id of a batch."""
    return f"batch_{secrets.token_hex(12)}"


def new_file_id() -> str:
    """A fresh id of a file."""
    return f"file-{secrets.token_hex(12)}"
