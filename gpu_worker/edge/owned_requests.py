"""The table of requests that this worker owns: how far each log is written, and what is to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.shared.protocol.events import Usage
from penstock.shared.protocol.states import Answer
from penstock.shared.scripts.operations import Claim
from penstock.shared.scripts.replies import Used

from ..engine.requests.engine_request import Finish
from ..messages import RunUsage

__all__ = ["OwnedRequest", "OwnedRequests", "run_name"]


def run_name(request_id: str, epoch: int) -> str:
    """What a request is called in the engine: a name of this claim and no other.

    A worker that lost a request may be given it again while the engine still computes a step for
    the claim before. What comes of that step is not the new claim's: it has other indexes.
    """
    return f"{request_id}#{epoch}"


@dataclass(slots=True)
class OwnedRequest:
    """How far the log of one owned request is written, and how it is to go on.

    Attributes:
        claim: how this worker got it.
        lane: its lane, as a metric label.
        accepted_at: monotonic time in seconds at which Redis says that it was accepted.
        next_index: of the next token to publish: how many output tokens the log holds or is being
            sent.
        digest: rolling digest of those.
        ttft_ms: acceptance to its first token; None while there is none.
        answer: form of its chunks and its end.
        last_token_at: monotonic time in seconds of this worker's last token of it, if any.
        finish: how it ended; its end is in flight.
        prompt_tokens: tokens of the prompt, as far as the engine or an earlier worker has told.
        cached_tokens: those of them that were not computed.
        drafted_tokens: tokens that this worker drafted for it, accepted or not.
        device_us: its share of this worker's device time, in microseconds.
        told_used: what Redis was last told that it has used.
        sequences: how many the engine runs for it; 0 once its end is near.
        last_index: index of its last token, unless it ends before; -1: not known.
        unprepared_tokens: about how many tokens the engine has yet to prepare for it.
        discarded_tokens: output tokens that were generated and not published.
        generated_none: its output tokens are its prompt's, or one stands for a result.
        run: its name in the engine, see :func:`run_name`.
        in_stream: it has had a token from this worker, has not ended, and its answer is msgpack.
            Its next token only needs packing, unless it is special or carries the request's usage.
        id: of the claim; repeated here so that what every token needs lies together.
        epoch: of the claim, repeated for the same reason.
    """

    claim: Claim
    lane: str
    accepted_at: float
    next_index: int
    digest: int
    ttft_ms: int | None
    answer: Answer = Answer.MSGPACK
    last_token_at: float = 0.0
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    device_us: int = 0
    told_used: Used = field(init=False)
    in_stream: bool = False
    sequences: int = 1
    last_index: int = -1
    unprepared_tokens: int = 0
    discarded_tokens: int = 0
    generated_none: bool = False
    run: str = field(init=False)
    id: str = field(init=False)
    epoch: int = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.epoch = self.claim.id, self.claim.epoch
        self.run = run_name(self.id, self.epoch)
        self.told_used = self.claim.used
        self.prompt_tokens, self.cached_tokens = self.claim.used[:2]

    @property
    def used(self) -> Used:
        """What it has used so far, by this worker and those before."""
        before = self.claim.used
        return Used(
            self.prompt_tokens,
            self.cached_tokens,
            before.drafted_tokens + self.drafted_tokens,
            before.device_us + self.device_us,
        )

    @property
    def generated_tokens(self) -> int:
        """Tokens that the model made for it, published or not."""
        return 0 if self.generated_none else self.next_index + self.discarded_tokens

    def usage(self) -> Usage:
        """What the request has consumed."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.generated_tokens,
            cached_tokens=self.cached_tokens,
            queue_ms=self.claim.queue_ms,
            ttft_ms=self.ttft_ms,
            attempts=self.claim.attempts,
            drafted_tokens=self.used.drafted_tokens,
            device_us=self.used.device_us,
        )


class OwnedRequests:
    """All requests that this worker owns, by id and by the name of their run.

    Attributes:
        by_id: read only, as the next one.
        by_run: the same requests by :func:`run_name`.
        arriving_tokens: about how many tokens of prompts were claimed and have not been through
            their first step.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, OwnedRequest] = {}
        self.by_run: dict[str, OwnedRequest] = {}
        self.arriving_tokens = 0
        self._beginning_tokens = 0  # of those, whose first step may run now
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def epochs(self) -> dict[str, int]:
        """Epochs of the claims of all owned requests, by id."""
        return {request_id: owned.epoch for request_id, owned in self.by_id.items()}

    @property
    def suspects(self) -> int:
        """How many owned requests may have crashed a worker before."""
        return sum(owned.claim.suspect for owned in self.by_id.values())

    @property
    def open_sequences(self) -> Mapping[str, int]:
        """Sequences of owned requests whose end is not near, by lane. A lane without any may lack.

        An end is near if as many tokens as a message brought lately reach it. A request claimed
        meanwhile takes over the sequence without missing a step.
        """
        return self._open

    def add(self, owned: OwnedRequest) -> None:
        """Begin to own a request. An earlier claim of it is dropped."""
        self.drop(owned.id)
        self.by_id[owned.id] = self.by_run[owned.run] = owned
        self._open[owned.lane] += owned.sequences

    def drop(self, request_id: str) -> OwnedRequest | None:
        """Own a request no longer; returns what was known of it, None if it was not owned."""
        owned = self.by_id.pop(request_id, None)
        if owned is not None:
            del self.by_run[owned.run]
            self.close_sequences(owned)
            self._forget_prompt(owned)
        return owned

    def close_sequences(self, owned: OwnedRequest) -> None:
        """Count the sequences of a request as free: its end is near."""
        self._open[owned.lane] -= owned.sequences
        owned.sequences = 0

    def used_more(self, used: Iterable[RunUsage]) -> None:
        """Note what runs have used; Redis is told with their next tokens."""
        for run, device_us, drafted in used:
            if (owned := self.by_run.get(run)) is not None:
                owned.device_us, owned.drafted_tokens = device_us, drafted
                owned.in_stream = False

    # -- prompts on their way into the engine ---------------------------------------------------

    def ordered(self, run: str, tokens: int) -> None:
        """The engine was told to serve a run of about so many tokens."""
        if (owned := self.by_run.get(run)) is not None:
            owned.unprepared_tokens += tokens
            self.arriving_tokens += tokens

    def prepared(self, run: str) -> None:
        """A run has reached the engine's scheduler; its first step follows."""
        if (owned := self.by_run.get(run)) is not None:
            self._beginning_tokens += owned.unprepared_tokens
            owned.unprepared_tokens = 0

    def not_prepared(self, run: str) -> None:
        """A run will not reach the engine's scheduler."""
        if (owned := self.by_run.get(run)) is not None:
            self._forget_prompt(owned)

    def step_ended(self) -> None:
        """A step has ended, and with it the first one of all that were prepared before it."""
        self.arriving_tokens -= self._beginning_tokens
        self._beginning_tokens = 0

    def _forget_prompt(self, owned: OwnedRequest) -> None:
        self.arriving_tokens -= owned.unprepared_tokens
        owned.unprepared_tokens = 0
