"""From token ids to published text: the detokeniser's interface, and stop strings in a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from penstock.shared.protocol.chat.deltas import CONTENT, Delta

__all__ = ["AnswerParser", "PlainAnswer", "StopMatcher", "TextStream"]


class TextStream(Protocol):
    """An incremental detokeniser of one sequence's output.

    Deterministic: the same ids give the same pieces. So a request continued elsewhere replays its
    ids and stands exactly where the first worker stood.
    """

    def feed(self, token_id: int) -> str:
        """The text that has become certain with this token; empty for half a character."""
        ...

    def flush(self) -> str:
        """What was held back; the output ends here."""
        ...


class AnswerParser(Protocol):
    """Takes one output apart into content, reasoning and tool calls. Deterministic, as the text is.

    Attributes:
        special_texts: tokens that add no text and that it reads nevertheless, with their texts.
    """

    special_texts: Mapping[int, str]

    def feed(self, text: str) -> Iterable[Delta]:
        """What has become certain with this text, which may hold special tokens; never raises."""
        ...

    def finish(self) -> Iterable[Delta]:
        """What was held back; the output ends here."""
        ...


class PlainAnswer:
    """An answer without a form: all of it is content."""

    def __init__(self) -> None:
        self.special_texts: Mapping[int, str] = {}

    def feed(self, text: str) -> tuple[Delta, ...]:
        """The text as content."""
        return (Delta(CONTENT, text),) if text else ()

    def finish(self) -> tuple[Delta, ...]:
        """Nothing is held back."""
        return ()


class StopMatcher:
    """Cuts a stream of text before the first stop string that appears.

    *First* is the one that is complete first; of two that are complete with the same character, the
    longer. That depends on the characters alone and not on how they were split into tokens.

    One Aho-Corasick automaton (1975) over all stop strings. Its state is the longest suffix of the
    text that begins some stop string: exactly what must be held back. Each character costs
    amortised O(1), whatever the length of the output and the number of strings.

    Args:
        stops: non-empty strings; none at all makes every call pass its text through.

    Attributes:
        matched: the stop string that was found, else None.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        # Node 0 is the root; a node stands for the prefix of stop strings that leads to it.
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]  # the longest proper suffix of the node's prefix that is a node
        self._stop: list[str | None] = [None]  # the longest stop string the node's prefix ends with
        for stop in stops:
            self._insert(stop)
        self._link_suffixes()
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take the next text; return the part that certainly stands before any stop string.

        After a match this and all later calls return only what stands before it, i.e. nothing more.
        """
        if self.matched is not None:
            return ""
        if len(self._children) == 1:
            return text
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._follow(self._node, character)
            stop = self._stop[self._node]
            if stop is not None:
                self.matched, self._held = stop, ""
                return seen[: end - len(stop)]
        # An incomplete match that begins in `seen` keeps the state at least as deep as its begin
        # lies back. So its begin is held, and released text can never be part of a match.
        certain = len(seen) - self._depth[self._node]
        self._held = seen[certain:]
        return seen[:certain]

    def flush(self) -> str:
        """The text ends here, so what was held back begins no stop string: return it."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _follow(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._fail[node]
        return self._children[node].get(character, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._children[node].get(character)
            if child is None:
                child = self._children[node][character] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._fail.append(0)
                self._stop.append(None)
            node = child
        self._stop[node] = stop

    def _link_suffixes(self) -> None:
        """Breadth first, so that all shorter prefixes are linked when a node's turn comes."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            if self._stop[node] is None:
                self._stop[node] = self._stop[self._fail[node]]
            for character, child in self._children[node].items():
                self._fail[child] = self._follow(self._fail[node], character)
                queue.append(child)
