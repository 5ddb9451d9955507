"""The outputs of a request, gathered from its chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.shared.protocol.chat.deltas import (
    CONTENT,
    REASONING,
    TOOL_CALL,
    Delta,
    ReasoningCount,
    moved_deltas,
)
from penstock.shared.protocol.events import Chunk, End, TokenLogprobs
from penstock.shared.protocol.states import Reason, State

__all__ = ["Choice", "gather_choices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One output of a request; most requests have one.

    Attributes:
        index: its number, from 0.
        text: its text.
        token_ids: its tokens.
        reason: why it ended; None if it did not end, because the request failed or was cancelled.
        logprobs: one per token if the request asked for them, else empty.
        deltas: the parsed answer in pieces if the request asked for it, else empty; ``token`` is
            the index of a token of this output.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    reason: Reason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    deltas: tuple[Delta, ...] = ()

    @property
    def content(self) -> str:
        """The answer without reasoning and calls; empty if it was not parsed."""
        return "".join(delta.text for delta in self.deltas if delta.kind == CONTENT)

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer; empty if it was not parsed."""
        return "".join(delta.text for delta in self.deltas if delta.kind == REASONING)

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens have brought reasoning; 0 if the answer was not parsed."""
        count = ReasoningCount()
        count.add(self.deltas)
        return count.tokens

    @property
    def tool_calls(self) -> tuple[tuple[str, str], ...]:
        """Name and arguments, as JSON text, of each call; empty if it was not parsed."""
        calls: dict[int, tuple[str, str]] = {}
        for delta in self.deltas:
            if delta.kind == TOOL_CALL:
                name, arguments = calls.get(delta.index, ("", ""))
                calls[delta.index] = (name + delta.name, arguments + delta.text)
        return tuple(calls.values())


def gather_choices(chunks: Iterable[Chunk], end: End) -> tuple[Choice, ...]:
    """The choices in these chunks by index: at least one, without gaps up to the last."""
    texts: dict[int, list[str]] = {0: []}
    ids: dict[int, list[int]] = {0: []}
    logprobs: dict[int, list[TokenLogprobs]] = {0: []}
    deltas: dict[int, list[Delta]] = {}
    reasons: dict[int, Reason] = {}
    several = False
    for chunk in chunks:
        several |= bool(chunk.parts)
        for run in chunk.runs():
            if run.deltas:
                known = len(ids.get(run.choice, ()))
                deltas.setdefault(run.choice, []).extend(moved_deltas(run.deltas, known))
            texts.setdefault(run.choice, []).append(run.text)
            ids.setdefault(run.choice, []).extend(run.token_ids)
            logprobs.setdefault(run.choice, []).extend(run.logprobs)
            if run.reason is not None:
                reasons[run.choice] = run.reason
    if not several and end.state is State.COMPLETED:
        reasons[0] = end.reason
    return tuple(
        Choice(
            index=index,
            text="".join(texts.get(index, ())),
            token_ids=tuple(ids.get(index, ())),
            reason=reasons.get(index),
            logprobs=tuple(logprobs.get(index, ())),
            deltas=tuple(deltas.get(index, ())),
        )
        for index in range(max(ids) + 1)
    )
