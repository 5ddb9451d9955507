"""One chunk in place of many: whoever reads from anywhere gets what the many would have given."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.reading.merge import Merger
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.chat.deltas import Delta
from penstock.shared.protocol.choice_parts import Part, digest_words
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, TokenLogprobs, rolling_digest
from penstock.shared.protocol.states import Answer, Reason
from penstock.shared.scripts.compaction import compacted

TEXTS = ("", "a", " word", "ü", "日本", "👍🏽", "\x00", "e\u0301")


@st.composite
def logs(draw: st.DrawFn) -> list[Chunk]:
    """Two chunks or more, of one token as a rule; all with logprobs or none."""
    sizes = draw(st.lists(st.sampled_from((1, 1, 1, 2, 5)), min_size=2, max_size=20))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(sizes), max_size=sum(sizes)))
    with_logprobs, of_prompt = draw(st.booleans()), draw(st.booleans())
    chunks, start = [], 0
    for size in sizes:
        logprobs = some_logprobs(size) if with_logprobs else ()
        chunk = Chunk(
            start, tuple(ids[start : start + size]), draw(st.sampled_from(TEXTS)),
            rolling_digest(ids[: start + size]), logprobs,
            prompt_logprobs=(None, *some_logprobs(2)) if of_prompt and not start else (),
            deltas=draw(some_deltas(size)),
        )  # fmt: skip
        chunks.append(chunk)
        start += size
    return chunks


@st.composite
def some_deltas(draw: st.DrawFn, num_tokens: int) -> tuple[Delta, ...]:
    tokens = sorted(draw(st.lists(st.integers(0, num_tokens - 1), max_size=3)))
    kinds = st.sampled_from(("content", "reasoning", "tool_call"))
    return tuple(
        Delta(draw(kinds), draw(st.sampled_from(TEXTS)), draw(st.integers(0, 3)), "f", token)
        for token in tokens
    )


def some_logprobs(count: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-i / 4, ((i, -0.5), (7, -float("inf")))) for i in range(count))


@st.composite
def logs_of_several(draw: st.DrawFn) -> list[Chunk]:
    """The same of a request with three choices: up to three parts in a chunk."""
    with_logprobs, of_prompt = draw(st.booleans()), draw(st.booleans())
    chunks: list[Chunk] = []
    counts, start, digest = [0, 0, 0], 0, 0
    for _ in range(draw(st.integers(2, 10))):
        parts = []
        for choice in draw(st.sampled_from(((0, 1, 2), (0, 2), (1,)))):
            size = draw(st.sampled_from((1, 1, 3)))
            reason = draw(st.sampled_from((None, None, Reason.STOP)))
            text = draw(st.sampled_from(TEXTS))
            parts.append(Part(choice, counts[choice], size, text, reason))
            counts[choice] += size
        size = sum(part.num_tokens for part in parts)
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))
        chunk = Chunk(
            start, tuple(ids), "", 0, some_logprobs(size) if with_logprobs else (), (),
            tuple(parts), (None, *some_logprobs(2)) if of_prompt and not start else (),
            draw(some_deltas(size)),
        )  # fmt: skip
        digest = chunk.digest_after(digest)
        chunks.append(chunk._replace(digest=digest))
        start += size
    return chunks


def whole(chunks: list[Chunk]) -> Chunk:
    packed = compacted([chunk.pack() for chunk in chunks])
    assert packed is not None
    event = unpack_event(packed)
    assert isinstance(event, Chunk)
    assert event.pack() == packed
    return event


def read(events: list[Chunk], index: int, digest: int | None = None) -> tuple[Any, ...]:
    """What a reader gets that comes back at an index."""
    merger = Merger("x", index, digest)
    for event in events:
        assert merger.add(event)
    assert merger.add(End(n=events[-1].stop, reason=Reason.STOP))
    ready = list(merger.ready)
    runs = [run for chunk in ready for run in chunk.runs()]
    return (
        [token for chunk in ready for token in chunk.token_ids],
        ["".join(run.text for run in runs if run.choice == choice) for choice in range(3)],
        [
            (run.choice, run.start + i)
            for run in runs
            for i in range(len(run.token_ids))
            if ready[0].parts
        ],
        [(run.choice, run.reason) for run in runs if run.reason],
        [entry for chunk in ready for entry in chunk.prompt_logprobs],
        [entry for chunk in ready for entry in chunk.logprobs],
        [(run.choice, run.start + d.token, d[:4]) for run in runs for d in run.deltas],
        merger.digest,
    )


@given(chunks=st.one_of(logs(), logs_of_several()))
def test_from_every_index_it_reads_as_the_log(chunks: list[Chunk]) -> None:
    one = whole(chunks)
    assert (one.start, one.stop) == (0, chunks[-1].stop)
    words = tuple(digest_words(one.parts, one.token_ids, 0)) if one.parts else one.token_ids
    for index in range(one.stop + 1):
        later = [chunk for chunk in chunks if chunk.stop > index] or chunks[-1:]
        assert read([one], index) == read(later, index)
        digest = rolling_digest(words[: index * len(words) // one.stop])
        assert read([one], index, digest) == read(later, index, digest)


@given(chunks=st.one_of(logs(), logs_of_several()), data=st.data())
def test_a_reader_in_the_middle_notices_nothing(chunks: list[Chunk], data: st.DataObject) -> None:
    seen = data.draw(st.integers(0, len(chunks)))
    mixed = [*chunks[:seen], whole(chunks)]
    assert read(mixed, 0) == read(chunks, 0)
    # And one that has it takes old chunks for what they are: known.
    assert read([whole(chunks), *chunks[seen:]], 0) == read(chunks, 0)


def chunk(start: int, *ids: int, text: str = "x") -> Chunk:
    return Chunk(start, ids, text, rolling_digest(range(1, start + len(ids) + 1)))


GOOD = [chunk(0, 1).pack(), chunk(1, 2).pack()]


def changed(packed: bytes, at: int, value: Any) -> bytes:
    wire = msgpack.unpackb(packed)
    wire[at : at + 1] = [value]
    return msgpack.packb(wire)


def longer(
    start: int,
    *,
    text: str = "",
    lengths: Any = None,
    parts: Any = None,
    of_prompt: Any = None,
) -> bytes:
    """A chunk of one token in its longest form."""
    ids = [start + 1]
    digest = rolling_digest(range(1, start + 2))
    wire = [start, ids, text, digest, None, lengths, parts]
    return msgpack.packb(wire if of_prompt is None else [*wire, of_prompt])


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        GOOD[:1],
        [GOOD[0], GOOD[0]],
        [GOOD[1], GOOD[0]],
        [chunk(0, 1).pack(Answer.JSON), chunk(1, 2).pack(Answer.JSON)],
        [*GOOD, whole([chunk(0, 1), chunk(1, 2)]).pack()],
        [*GOOD, longer(2, lengths=[0, 0])],
        [*GOOD, changed(chunk(2, 3).pack(), 1, {"a": [3]})],
        [*GOOD, changed(chunk(2, 3).pack(), 1, [])],
        [*GOOD, changed(chunk(2, 3).pack(), 2, ["x"])],
        [*GOOD, changed(chunk(2, 3).pack(), 4, "of a later version")],
        [*GOOD, changed(chunk(2, 3).pack(), 4, [[-1.0, []]])],
        [*GOOD, longer(2, parts=[[0, 0, 1, "x", None]])],
        [longer(0, text="x", parts=[[0, 0, 1, "x", None]]), GOOD[1]],
        [longer(0, parts=[[0, 0, 2, "", None]]), longer(1, parts=[[1, 0, 1, "", None]])],
        [longer(0, parts=[[0, 0, 1, "", None]]), longer(1, parts=[[1]])],
        [longer(0, parts=[[0, 0, 1, "", None]]), longer(1, lengths=[0])],
        [GOOD[0], longer(1, of_prompt=[None, [-1.0, []]])],
        [*GOOD, b"\x94"],
        [*GOOD, b"\x94\x02\x91\x03\xa1\xff\x00"],
        [*GOOD, b""],
    ],
    ids=[
        "nothing", "one", "twice", "gap", "json", "compact", "other-lengths", "map", "empty",
        "parts", "later",
        "some-logprobs", "some-parts", "parts-and-text", "too-many-in-parts", "cut-part",
        "parts-and-lengths", "prompt-later", "cut", "no-text", "no-bytes",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_left(chunks: list[bytes]) -> None:
    assert compacted(GOOD) is not None
    assert compacted(chunks) is None


@pytest.mark.parametrize("lengths", [[1], [1, 2], [2, 1, 0], 7, "ab", [1, None]])
def test_lengths_of_another_text_are_refused(lengths: Any) -> None:
    packed = compacted(GOOD)
    assert packed is not None
    with pytest.raises(ProtocolError):
        unpack_event(changed(packed, 5, lengths))
