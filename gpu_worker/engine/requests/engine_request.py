"""Requests that enter the engine, and updates that leave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from penstock.shared.protocol.chat.deltas import Delta, moved_deltas
from penstock.shared.protocol.choice_parts import Part, joined_parts
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason

from ..output.text_stream import AnswerParser
from ..sequence import Constraint

__all__ = ["EngineRequest", "Finish", "Update", "joined_updates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request, tokenised.

    Attributes:
        id: unique among the requests in the engine.
        lane: urgency.
        tenant: the tenant that is charged.
        prompt_ids: at least one token.
        output_ids: what another worker has already published of it; the engine goes on from there.
        choice_ids: the same of a request with several choices, by choice; ``output_ids`` is empty
            then. No more than the options ask for, and each may be empty.
        options: sampling and stop options.
        seed: keys the random numbers.
        arrival: when the request came, in seconds of any monotonic clock.
        deadline: when it expires, by the same clock; None: never. Only an order of admission looks
            at it: it is Redis' sweep that ends what is past its time.
        new_constraint: makes the constraint of one output; None if outputs have none.
        new_parser: makes the parser of one output; None if outputs are not parsed.
    """

    id: str
    lane: Lane
    tenant: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    choice_ids: tuple[tuple[int, ...], ...] = ()
    options: SamplingOptions
    seed: int
    arrival: float
    deadline: float | None = None
    new_constraint: Callable[[], Constraint] | None = None
    new_parser: Callable[[], AnswerParser] | None = None

    @property
    def has_published(self) -> bool:
        """Whether another worker has published a part of the output."""
        return bool(self.output_ids) or any(self.choice_ids)


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request, or one of its sequences, has ended.

    Attributes:
        reason: why.
        message: for a person; empty where it completed.
        discarded_tokens: output tokens that were generated and are no part of the answer, such as
            those of candidates that were not the best.
        result: the packed answer to a payload; empty for generated tokens.
        generated_none: the model made no token: those of the update are the prompt's, for a request
            that asks for no more, or one stands for a result.
    """

    reason: Reason
    message: str = ""
    discarded_tokens: int = 0
    result: bytes = b""
    generated_none: bool = False


# Never changed once made; not frozen for the same reason as `Span`.
@dataclass(slots=True)
class Update:
    """What steps added to a request, or to one of its choices. The last one has ``finish``.

    Attributes:
        id: the request's.
        start: index of the first of ``token_ids`` in the choice's output.
        token_ids: new output tokens. Empty only together with ``finish``.
        text: what they add to the output text. Empty where ``token_ids`` is: text is published with
            tokens or not at all, so that the log of a request fixes both.
        finish: why it ended, or None if it goes on.
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens taken from the prefix cache.
        logprobs: one per token if the request asks for them, else empty.
        prompt_logprobs: with the first token, one per token of the prompt if the request asks for
            them, else empty; None of the first.
        choice: which of the request's outputs it is about.
        parts: of a request with several, whose the tokens are and why that choice ended, if it did.
        text_lengths: of several tokens, how many bytes of the text (UTF-8) came with each but the
            last, which has the rest. Empty if not known.
        deltas: what the tokens add to the parsed answer; empty if it is not parsed.
    """

    id: str
    start: int
    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    parts: tuple[Part, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    text_lengths: tuple[int, ...] = ()
    deltas: tuple[Delta, ...] = ()

    @property
    def bytes_by_token(self) -> tuple[int, ...]:
        """How many bytes of the text came with each token; those not known count as the last's."""
        count = len(self.token_ids)
        if not count:
            return ()
        before = self.text_lengths or (0,) * (count - 1)
        return (*before, len(self.text.encode()) - sum(before))


def joined_updates(updates: Sequence[Update]) -> Update:
    """Consecutive updates of a run as one."""
    first, last = updates[0], updates[-1]
    if first is last:
        return first
    ids, logprobs, parts, deltas = list(first.token_ids), first.logprobs, first.parts, first.deltas
    for update in updates[1:]:
        if update.logprobs:
            logprobs += update.logprobs
        if update.parts or parts:
            parts = joined_parts(parts, update.parts)
        if update.deltas:
            deltas += moved_deltas(update.deltas, len(ids))
        ids += update.token_ids
    lengths = tuple(chain.from_iterable([update.bytes_by_token for update in updates]))
    return Update(
        last.id, first.start, tuple(ids), "".join([update.text for update in updates]),
        last.finish, last.prompt_tokens, last.cached_tokens, logprobs, last.choice, parts,
        first.prompt_logprobs,  # they come with the first tokens
        lengths[:-1], deltas,
    )  # fmt: skip
