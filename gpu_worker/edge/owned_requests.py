"""What a worker knows of the log of one request it owns."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.shared.protocol import Answer, Usage
from penstock.shared.scripts.operations import Claim

from ..engine.requests import Finish

__all__ = ["TokenLedger", "run_name"]


def run_name(request_id: str, epoch: int) -> str:
    """What a request is called in the engine: a name of this claim and no other.

    A worker that lost a request may be given it again while the engine still computes a step for
    the claim before. What comes of that step is not the new claim's: it has other indexes.
    """
    return f"{request_id}#{epoch}"


@dataclass(slots=True)
class TokenLedger:
    """How far the log of one owned request is written, and how it is to go on.

    Attributes:
        claim: how this worker got it.
        lane: its lane, as a metric label.
        accepted_at: monotonic time in seconds when it was accepted, by Redis' account.
        confirmed: output tokens that the log holds, those in flight included.
        digest: rolling digest of those.
        ttft_ms: acceptance to its first token; None while there is none.
        answer: form of its chunks and its end.
        last_token_at: monotonic time in seconds of this worker's last token of it, if any.
        finish: how it ended; its end is in flight.
        prompt_tokens: tokens of the prompt, as far as the engine has told.
        cached_tokens: those of them that were not computed.
        sequences: how many the engine runs for it; 0 from when its end is near.
        last_index: index of its last token, unless it ends before; -1: not known.
        discarded_tokens: output tokens that were generated and not published.
        run: its name in the engine, see :func:`run_name`.
        in_stream: it has had a token from this worker, has not ended, and its answer is msgpack:
            its next token needs nothing but to be packed, unless the token itself is special.
        id: of the claim; here, too, as what every token needs should lie together.
        epoch: likewise.
    """

    claim: Claim
    lane: str
    accepted_at: float
    confirmed: int
    digest: int
    ttft_ms: int | None
    answer: Answer = Answer.MSGPACK
    last_token_at: float = 0.0
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    in_stream: bool = False
    sequences: int = 1
    last_index: int = -1
    discarded_tokens: int = 0
    run: str = field(init=False)
    id: str = field(init=False)
    epoch: int = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.epoch = self.claim.id, self.claim.epoch
        self.run = run_name(self.id, self.epoch)

    def usage(self) -> Usage:
        """What the request has consumed."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.confirmed + self.discarded_tokens,
            cached_tokens=self.cached_tokens,
            queue_ms=self.claim.queue_ms,
            ttft_ms=self.ttft_ms,
            attempts=self.claim.attempts,
        )
