"""What the demo asks for and what it measures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.states import Lane, State

__all__ = ["DemoReport", "EngineFigures", "FaultFigures", "Row", "Takeover", "demo_rows"]


@dataclass(slots=True, kw_only=True)
class Row:
    """One request of the demo and what has come of it.

    Attributes:
        prompt: text or chat messages.
        lane: urgency.
        tenant: who pays.
        options: sampling options.
        id: once submitted.
        text: output so far.
        tokens: output tokens so far.
        digest: of these, see :func:`~penstock.shared.protocol.rolling_digest`.
        arrivals: when each chunk came, in seconds of the monotonic clock, and the tokens with it.
        end: the terminal event, once it came.
        mean_itl_ms: mean inter-token latency in ms, once it has ended with two tokens or more.
    """

    prompt: str | list[dict[str, str]]
    lane: Lane
    tenant: str
    options: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    text: str = ""
    tokens: int = 0
    digest: int | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    end: End | None = None
    mean_itl_ms: float | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in a chunk."""
        self.text += chunk.text
        self.tokens += len(chunk.token_ids)
        self.digest = chunk.digest
        self.arrivals.append((time.monotonic(), self.tokens))

    def longest_pause(self, since: float) -> tuple[int, float] | None:
        """The longest gap between chunks that ended after a time of the monotonic clock.

        Returns:
            The index of the token behind it and its length in ms; None without two chunks.
        """
        gaps = [
            (at - before, tokens)
            for (before, tokens), (at, _) in itertools.pairwise(self.arrivals)
            if at > since
        ]
        if not gaps:
            return None
        seconds, index = max(gaps)
        return index, 1000 * seconds

    @property
    def title(self) -> str:
        """The prompt in words."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def is_chat(self) -> bool:
        """Whether the prompt goes through the chat template."""
        return not isinstance(self.prompt, str)

    @property
    def state(self) -> State:
        """As seen from here: running from the first token on."""
        if self.end is not None:
            return self.end.state
        return State.RUNNING if self.tokens else State.QUEUED

    def facts(self) -> dict[str, Any]:
        """The JSON form of the outcome."""
        usage = None if self.end is None else self.end.usage
        return {
            "id": self.id,
            "lane": self.lane.value,
            "tenant": self.tenant,
            "prompt": self.prompt,
            "text": self.text,
            "state": self.state.value,
            "reason": None if self.end is None else self.end.reason.value,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "output_tokens": self.tokens,
            "queue_ms": None if usage is None else usage.queue_ms,
            "ttft_ms": None if usage is None else usage.ttft_ms,
            "mean_itl_ms": self.mean_itl_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """From the workers' metrics, over the time of the requests; None where it gives none.

    Attributes:
        mean_batch: mean number of sequences in a step.
        kv_blocks_peak: most KV blocks seen in use.
        kv_blocks_total: KV blocks of the pool.
    """

    mean_batch: float | None = None
    kv_blocks_peak: int | None = None
    kv_blocks_total: int | None = None


@dataclass(slots=True, kw_only=True)
class Takeover:
    """A stream whose worker was killed.

    Attributes:
        row: its request.
        index: the first token from another worker; None without a reader.
        pause_ms: how long its reader waited for that token; None without a reader.
        identical: whether its tokens are those of the same request, undisturbed.
    """

    row: Row
    index: int | None = None
    pause_ms: float | None = None
    identical: bool = False

    def facts(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "id": self.row.id,
            "index": self.index,
            "pause_ms": self.pause_ms,
            "identical": self.identical,
        }


@dataclass(slots=True, kw_only=True)
class FaultFigures:
    """A worker was killed, and a reader left and came back.

    Attributes:
        worker_id: of the killed worker.
        pid: what was killed.
        takeovers: the streams that ran on it.
        reader: whose reader left.
        left_at: the index at which it left.
        away_ms: how long it was away.
        missed: tokens that were published meanwhile.
        caught_up_ms: how long it took to read them.
    """

    worker_id: str
    pid: int
    takeovers: list[Takeover]
    reader: Row
    left_at: int
    away_ms: float = 0.0
    missed: int = 0
    caught_up_ms: float = 0.0

    @property
    def identical(self) -> int:
        """How many of the streams have the tokens of an undisturbed run."""
        return sum(takeover.identical for takeover in self.takeovers)

    def facts(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "killed": {"worker_id": self.worker_id, "pid": self.pid},
            "takeovers": [takeover.facts() for takeover in self.takeovers],
            "reader": {
                "id": self.reader.id,
                "left_at": self.left_at,
                "away_ms": self.away_ms,
                "missed_tokens": self.missed,
                "caught_up_ms": self.caught_up_ms,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The outcome of all requests.

    Attributes:
        rows: the requests, in the order of their submission.
        wall_s: first submission to last end, in seconds.
        engine: the figures of all workers.
        faults: what was killed and how that went; None if nothing was.
    """

    rows: Sequence[Row]
    wall_s: float
    engine: EngineFigures
    faults: FaultFigures | None = None

    @property
    def completed(self) -> int:
        """How many requests were completed."""
        return sum(row.state is State.COMPLETED for row in self.rows)

    @property
    def as_promised(self) -> bool:
        """Whether every request was completed, and every disturbed stream is as undisturbed."""
        faults = self.faults
        unharmed = faults is None or faults.identical == len(faults.takeovers)
        return self.completed == len(self.rows) and unharmed

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(row.tokens for row in self.rows)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time."""
        return self.output_tokens / self.wall_s

    def facts(self) -> dict[str, Any]:
        """The JSON form."""
        figures = {
            "requests": len(self.rows),
            "completed": self.completed,
            "output_tokens": self.output_tokens,
            "wall_s": self.wall_s,
            "tokens_per_s": self.tokens_per_s,
            "mean_batch": self.engine.mean_batch,
            "kv_blocks_peak": self.engine.kv_blocks_peak,
            "kv_blocks_total": self.engine.kv_blocks_total,
        }
        faults = None if self.faults is None else self.faults.facts()
        requests = [row.facts() for row in self.rows]
        return {"figures": figures, "faults": faults, "requests": requests}


def demo_rows() -> list[Row]:
    """The demo's requests: batch work first, urgent work last, as it happens in life.

    The prompts are begins of what the shipped model has read: Python's own documentation.
    """
    batch: list[tuple[str, str]] = [
        ("docs", "The list type"),
        ("docs", "The import statement"),
        ("app", "A string literal"),
        ("docs", "Exceptions are"),
        ("app", "Return the number of"),
    ]
    normal: list[tuple[str, str | list[dict[str, str]]]] = [
        ("app", "Return a new"),
        ("docs", _chat("What is a mapping?")),
        ("app", "def parse("),
        ("docs", "The for statement"),
    ]
    critical: list[tuple[str, str | list[dict[str, str]]]] = [
        ("app", _chat("What does sorted() do?")),
        ("docs", "Raise ValueError if"),
        ("app", "A function definition"),
    ]
    rows = [_row(Lane.BATCH, tenant, prompt, 96) for tenant, prompt in batch]
    rows += [_row(Lane.NORMAL, tenant, prompt, 64) for tenant, prompt in normal]
    rows += [_row(Lane.CRITICAL, tenant, prompt, 48) for tenant, prompt in critical]
    for seed, row in enumerate(rows):
        row.options["seed"] = seed
    return rows


def _row(lane: Lane, tenant: str, prompt: str | list[dict[str, str]], max_tokens: int) -> Row:
    options = {"max_tokens": max_tokens, "temperature": 0.6, "top_p": 0.95}
    return Row(prompt=prompt, lane=lane, tenant=tenant, options=options)


def _chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]
