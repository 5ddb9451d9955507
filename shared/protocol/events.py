"""The answer to a request: ``Chunk`` and ``End``, in msgpack or, if the request asks for it, JSON.

:mod:`.event_reader` reads them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple
from zlib import crc32

import msgpack

from ..quoting import one_line
from .chat.deltas import Delta, cut_deltas, packed_deltas
from .choice_parts import Part, cut_parts, digest_words
from .payload import result_as_json
from .states import Answer, Reason, State

__all__ = [
    "Chunk",
    "End",
    "Run",
    "TokenLogprobs",
    "Usage",
    "chunk_packer",
    "rolling_digest",
]

END_MARK = -1

MAX_MESSAGE_CHARS = 2000
"""Longest message of an end."""


def rolling_digest(token_ids: Sequence[int], digest: int = 0) -> int:
    """CRC-32 (ISO 3309) of the ids as little-endian unsigned 32-bit words, chained.

    Args:
        token_ids: the ids to add.
        digest: the digest of the ids before them; 0 for none.
    """
    if len(token_ids) == 1:  # what nearly every chunk holds
        return crc32(_pack_word(token_ids[0]), digest)
    return crc32(struct.pack(f"<{len(token_ids)}I", *token_ids), digest)


_pack_word = struct.Struct("<I").pack


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one token and of the most likely ones in its place.

    Natural logarithms of the probabilities that the model's logits give, before temperature and
    anything else that options do; float32.

    Attributes:
        logprob: of the token.
        top: the most likely tokens and theirs, most likely first, the token among them or not.
            As many as were asked for, unless fewer have any probability.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Run(NamedTuple):
    """Consecutive tokens of one choice.

    Attributes:
        choice: the choice's index, from 0 on; 0 for a request that has one.
        start: index of the first token in the choice's own output.
        token_ids: the tokens.
        text: what the tokens add to the choice's text.
        reason: why the choice ended with the last token; only for requests with several choices.
        logprobs: one per token if the request asked for them, else empty.
        deltas: of the tokens, if the request asked for them, else empty; ``token`` counts within
            the run.
    """

    choice: int
    start: int
    token_ids: tuple[int, ...]
    text: str
    reason: Reason | None
    logprobs: tuple[TokenLogprobs, ...]
    deltas: tuple[Delta, ...] = ()


PlainChunk = (
    tuple[int, Sequence[int], str, int] | tuple[int, Sequence[int], str, int, None, Sequence[int]]
)
"""A chunk's ``(start, token_ids, text, digest)``; then its ``text_lengths`` behind a None."""


class Chunk(NamedTuple):
    """Tokens of one request that were published together. Never empty.

    A tuple, because readers make one for every token, and a frozen dataclass takes three times as
    long to make.

    Attributes:
        start: index of the first token in the request's output. Tokens of all its choices are
            counted together, in the order in which they are published.
        token_ids: the tokens; the chunk covers indexes ``[start, stop)``.
        text: what they add to the output text. May be empty (half a character, or held back as
            the possible begin of a stop string) and comes with a later chunk then. Always empty
            for a request with several choices, whose text stands in ``parts``.
        digest: :func:`rolling_digest` of all output ids up to and including this chunk; for a
            request with several choices of the words of :func:`~.choice_parts.digest_words`.
        logprobs: one per token if the request asked for them, else empty.
        text_lengths: for each of several tokens how many bytes of the text (UTF-8) came with it.
            With ``parts``, of the text of the token's part. Empty if the chunk has one token, or if
            its text cannot be cut by token (the answer of a beam search, say).
        parts: which tokens belong to which choice, for a request with several; else empty.
        prompt_logprobs: in the first chunk, one per token of the prompt if the request asked for
            them, else empty. Of the first token, which nothing comes before, None.
        deltas: what the tokens add to the parsed answer if the request asked for it
            (``parse_response``), else empty; in the order of their tokens.
        result: the answer to a payload, packed by :func:`~.payload.pack_result`; else empty. Such a
            chunk has index 0, one token of id 0, and no text.
    """

    start: int
    token_ids: tuple[int, ...]
    text: str
    digest: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_lengths: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    deltas: tuple[Delta, ...] = ()
    result: bytes = b""

    @property
    def stop(self) -> int:
        """One past the index of the last token: also the count in the log's entry id."""
        return self.start + len(self.token_ids)

    def runs(self) -> Iterator[Run]:
        """The tokens by choice, whether the request has one or several."""
        if not self.parts:
            whole = (self.start, self.token_ids, self.text, None, self.logprobs, self.deltas)
            yield Run(0, *whole)
        at = 0
        for choice, start, count, text, reason in self.parts:
            piece = slice(at, at + count)
            deltas = cut_deltas(self.deltas, at, at + count)
            logprobs = self.logprobs[piece]
            yield Run(choice, start, self.token_ids[piece], text, reason, logprobs, deltas)
            at += count

    def has_seam(self, known: int) -> bool:
        """Whether the text can be cut behind the first ``known`` tokens.

        With ``text_lengths`` it can anywhere, without them between parts.
        """
        if self.text_lengths:
            return True
        for part in self.parts:
            if known <= 0:
                break
            known -= part.num_tokens
        return bool(self.parts) and known == 0

    def digest_after(self, before: int, known: int = 0) -> int:
        """What ``digest`` must be, given the digest before the chunk's token ``known``."""
        if self.parts:
            return rolling_digest(tuple(digest_words(self.parts, self.token_ids, known)), before)
        return rolling_digest(self.token_ids[known:] if known else self.token_ids, before)

    def without(self, known: int) -> Chunk:
        """The chunk without its first ``known`` tokens, of which it has more.

        Their text goes with them, where the chunk :meth:`has_seam`; else its text stays whole.
        """
        text = self.text
        if self.text_lengths and not self.parts:
            text = text.encode()[sum(self.text_lengths[:known]) :].decode()
        return self._replace(
            start=self.start + known,
            token_ids=self.token_ids[known:],
            text=text,
            logprobs=self.logprobs[known:],
            text_lengths=self.text_lengths[known:],
            parts=cut_parts(self.parts, known, self.text_lengths),
            prompt_logprobs=() if known else self.prompt_logprobs,
            deltas=cut_deltas(self.deltas, known, len(self.token_ids)),
        )

    def pack(self, answer: Answer = Answer.MSGPACK) -> bytes:
        """Msgpack ``[start, [ids...], text, digest]``, or a JSON object of the same.

        Further elements, named as in JSON: fifth, ``logprobs``, ``[[logprob, [[id,
        logprob]...]]...]``; sixth, ``text_lengths``. Seventh, ``parts``, ``[[choice, start,
        num_tokens, text, reason or nil]...]``; eighth, ``prompt_logprobs``, like the fifth, its
        first entry nil. Ninth, ``deltas``, ``[[token, kind, text, index, name]...]``; tenth,
        ``result``, *bin*, in JSON the value itself. Elements before the last that do not apply are
        nil.

        Raises:
            ValueError: the result has no form in JSON.
        """
        if answer is Answer.JSON:
            more: dict[str, Any] = {"logprobs": self.logprobs} if self.logprobs else {}
            if self.text_lengths:
                more["text_lengths"] = self.text_lengths
            if self.parts:
                more["parts"] = [part._asdict() for part in self.parts]
            if self.prompt_logprobs:
                more["prompt_logprobs"] = self.prompt_logprobs
            if self.deltas:
                more["deltas"] = [delta._asdict() for delta in self.deltas]
            if self.result:
                more["result"] = result_as_json(self.result)
            return _json(
                {"start": self.start, "ids": self.token_ids, "text": self.text,
                 "digest": self.digest, **more}
            )  # fmt: skip
        further: list[Any] = [
            self.logprobs, self.text_lengths, self.parts, self.prompt_logprobs,
            packed_deltas(self.deltas), self.result,
        ]  # fmt: skip
        while further and not further[-1]:
            further.pop()
        wire = (self.start, self.token_ids, self.text, self.digest)
        packed: bytes = msgpack.packb(
            (*wire, *(item or None for item in further)), use_single_float=True
        )
        return packed


def chunk_packer() -> Callable[[PlainChunk], bytes]:
    """Return a function that packs plain chunks as :meth:`Chunk.pack` does, but faster.

    It is not thread-safe.
    """
    pack: Callable[[PlainChunk], bytes] = msgpack.Packer().pack
    return pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts and times of a request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens generated: those published, and those of candidates and beams that
            are not part of the answer.
        cached_tokens: prompt tokens whose KV was reused and not computed.
        queue_ms: acceptance to first claim, in ms of Redis' clock.
        ttft_ms: acceptance to first published token, in ms; None if there was none.
        attempts: how many workers claimed it.
        drafted_tokens: output tokens that were drafted, accepted or not; None if not known.
        device_us: the request's share of the device's time in microseconds; None if not known.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: int | None = None
    ttft_ms: int | None = None
    attempts: int = 0
    drafted_tokens: int | None = None
    device_us: int | None = None


_USAGE_NAMES = tuple(f.name for f in fields(Usage))


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The one terminal event of a request.

    Attributes:
        n: number of output tokens; the log holds indexes ``[0, n)``.
        reason: why it ended; its :attr:`Reason.state` is the terminal state.
        message: detail for a person; empty for ``completed``. :meth:`pack` escapes unprintable
            characters and cuts it to :data:`MAX_MESSAGE_CHARS`.
        usage: None if no worker had claimed it. Of a request that ended without its worker
            (cancel, expiry) it is what the worker had told.
    """

    n: int
    reason: Reason
    message: str = ""
    usage: Usage | None = None

    @property
    def state(self) -> State:
        """The terminal state."""
        return self.reason.state

    def pack(self, answer: Answer = Answer.MSGPACK) -> bytes:
        """Msgpack ``[-1, n, state, reason, message, usage map or nil]``, or a JSON object."""
        usage = None
        if self.usage is not None:
            pairs = ((name, getattr(self.usage, name)) for name in _USAGE_NAMES)
            usage = {name: value for name, value in pairs if value is not None}
        # It may quote what an exception says, so it is made safe here, where all ends are written.
        message = one_line(self.message, MAX_MESSAGE_CHARS)
        if answer is Answer.JSON:
            return _json(
                {"end": True, "n": self.n, "state": self.state.value, "reason": self.reason.value,
                 "message": message, "usage": usage}
            )  # fmt: skip
        packed: bytes = msgpack.packb(
            (END_MARK, self.n, self.state.value, self.reason.value, message, usage)
        )
        return packed


def _json(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
