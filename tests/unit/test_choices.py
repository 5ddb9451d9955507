"""Requests with several choices, from the engine's updates to a reader's texts."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_worker.edge.outbox import Outbox
from penstock.gpu_worker.edge.owned_requests import OwnedRequests
from penstock.gpu_worker.engine.requests.engine_request import Finish, Update
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics
from penstock.producer.choices import Choice, gather_choices
from penstock.producer.reading.merge import Merger
from penstock.shared.errors import ProtocolError, StreamDiverged
from penstock.shared.protocol.choice_parts import Part
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, TokenLogprobs, rolling_digest
from penstock.shared.protocol.states import Answer, Reason
from penstock.shared.scripts.compaction import compacted
from penstock.shared.scripts.operations import Append, AppendStatus, Claim


@dataclass(frozen=True)
class Token:
    """One token of the published order: whose, what it adds, and whether it was the last."""

    choice: int
    start: int
    id: int
    text: str
    reason: Reason | None


@st.composite
def orders(draw: st.DrawFn) -> list[Token]:
    """Tokens of up to four choices in the order in which a worker might publish them."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    turns = draw(st.permutations([c for c, length in enumerate(lengths) for _ in range(length)]))
    done = [0] * len(lengths)
    tokens = []
    for choice in turns:
        start, done[choice] = done[choice], done[choice] + 1
        last = done[choice] == lengths[choice]
        reason = draw(st.sampled_from([Reason.STOP, Reason.LENGTH])) if last else None
        text = draw(st.text("aé\n", max_size=3))
        tokens.append(Token(choice, start, draw(st.integers(0, 3)), text, reason))
    return tokens


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    inner = st.lists(st.integers(1, max(1, length - 1)), max_size=6)
    return [0, *sorted({at for at in draw(inner) if at < length}), length]


def part(tokens: list[Token]) -> Part:
    first, last = tokens[0], tokens[-1]
    text = "".join(token.text for token in tokens)
    return Part(first.choice, first.start, len(tokens), text, last.reason)


def published(tokens: list[Token], bounds: list[int]) -> list[Chunk]:
    """The order, cut into chunks there, made by hand."""
    chunks, digest = [], 0
    for begin, end in itertools.pairwise(bounds):
        runs: list[list[Token]] = []
        for token in tokens[begin:end]:
            if runs and runs[-1][-1].choice == token.choice:
                runs[-1].append(token)
            else:
                runs.append([token])
        words = [word for token in tokens[begin:end] for word in (token.choice, token.id)]
        digest = rolling_digest(words, digest)
        ids = tuple(token.id for token in tokens[begin:end])
        lengths = tuple(len(token.text.encode()) for token in tokens[begin:end])
        if len(runs) == len(ids):
            lengths = ()
        chunks.append(Chunk(begin, ids, "", digest, (), lengths, tuple(map(part, runs))))
    return chunks


def expected(tokens: list[Token]) -> tuple[Choice, ...]:
    choices = []
    for index in range(1 + max(token.choice for token in tokens)):
        mine = [token for token in tokens if token.choice == index]
        choices.append(
            Choice(
                index=index,
                text="".join(token.text for token in mine),
                token_ids=tuple(token.id for token in mine),
                reason=mine[-1].reason if mine else None,
            )
        )
    return tuple(choices)


END = End(n=0, reason=Reason.LENGTH)


@given(st.data())
def test_a_reader_gets_each_choice_whatever_the_cut(data: st.DataObject) -> None:
    tokens = data.draw(orders())
    chunks = published(tokens, data.draw(cuts(len(tokens))))
    again = published(tokens, data.draw(cuts(len(tokens))))
    merger = Merger("r")
    for chunk in chunks[: data.draw(st.integers(0, len(chunks)))]:
        assert merger.add(chunk)
    # The log was published again after a failover, cut elsewhere.
    for chunk in again:
        assert merger.add(chunk)
    assert gather_choices(merger.ready, END) == expected(tokens)
    assert merger.digest == chunks[-1].digest


@given(st.data())
def test_a_reader_may_begin_anywhere(data: st.DataObject) -> None:
    tokens = data.draw(orders())
    bounds = data.draw(cuts(len(tokens)))
    index = data.draw(st.integers(0, len(tokens) - 1))
    merger = Merger("r", index)
    for chunk in published(tokens, bounds):
        merger.add(chunk)
    runs = [run for chunk in merger.ready for run in chunk.runs()]
    found = [
        (run.choice, run.start + offset, token_id)
        for run in runs
        for offset, token_id in enumerate(run.token_ids)
    ]
    assert found == [(token.choice, token.start, token.id) for token in tokens[index:]]
    for choice in {run.choice for run in runs}:
        text = "".join(run.text for run in runs if run.choice == choice)
        mine = "".join(token.text for token in tokens[index:] if token.choice == choice)
        assert text == mine


def test_equal_choices_that_took_turns_differently_are_not_the_same_stream() -> None:
    """Their ids are equal, their digests are not: one cannot go on as the other."""
    turns = [[0, 0, 1, 1], [0, 1, 0, 1]]
    logs = []
    for order in turns:
        done, tokens = [0, 0], []
        for choice in order:
            tokens.append(Token(choice, done[choice], 7 + done[choice] * 0, "x", None))
            done[choice] += 1
        logs.append(published(tokens, [0, 2, 4]))
    merger = Merger("r")
    assert merger.add(logs[0][0])
    with pytest.raises(StreamDiverged):
        merger.add(logs[1][0])


REPORTS = tuple(TokenLogprobs(-float(i) / 2, ((i, -0.5),)) for i in range(3))
PARTED = Chunk(
    2, (5, 6, 7), "", 99, (), (), (Part(1, 0, 2, "a\u00e9"), Part(0, 2, 1, "b", Reason.STOP))
)


@pytest.mark.parametrize("answer", Answer)
@pytest.mark.parametrize("logprobs", [(), REPORTS])
def test_parts_survive_the_wire(answer: Answer, logprobs: Any) -> None:
    chunk = Chunk(2, PARTED.token_ids, "", 99, logprobs, (), PARTED.parts)
    event = unpack_event(chunk.pack(answer))
    assert event == chunk
    assert isinstance(event, Chunk)
    assert [type(part) for part in event.parts] == [Part, Part]
    assert event.parts[1].reason is Reason.STOP


def test_parts_are_a_seventh_element_that_others_may_ignore() -> None:
    wire = msgpack.unpackb(PARTED.pack())
    assert wire[4:] == [None, None, [[1, 0, 2, "aé", None], [0, 2, 1, "b", "stop"]]]
    shown = json.loads(PARTED.pack(Answer.JSON))
    assert shown["parts"][1] == {
        "choice": 0, "start": 2, "num_tokens": 1, "text": "b", "reason": "stop",
    }  # fmt: skip
    assert unpack_event(msgpack.packb([*wire, None, None, None, "of a later version"])) == PARTED
    later = [[*row, "more"] for row in wire[6]]
    assert unpack_event(msgpack.packb([*wire[:6], later])) == PARTED


@pytest.mark.parametrize(
    "parts",
    [
        7,
        [1, 2],
        [[0, 0, 2, "a", None]],  # of two tokens, where there are three
        [[0, 0, 3, "a", "nonsense"]],
        [[-1, 0, 3, "a", None]],
        [[0, -1, 3, "a", None]],
        [[0, 0, 3, 5, None]],
        [[0, 0, 3, "a"]],
        [[0, 0, 3, "a", None], [1, 0, 0, "", None]],
    ],
)
def test_malformed_parts_are_refused(parts: Any) -> None:
    wire = msgpack.unpackb(PARTED.pack())
    with pytest.raises(ProtocolError):
        unpack_event(msgpack.packb([*wire[:6], parts]))


def test_a_log_of_several_choices_is_not_made_compact() -> None:
    assert compacted([PARTED.pack(), PARTED.pack()]) is None


def claim(*chunks: Chunk) -> Claim:
    return Claim(
        id="a",
        epoch=1,
        attempts=1 + bool(chunks),
        suspect=False,
        payload=b"",
        age_ms=5,
        queue_ms=4,
        ttft_ms=None,
        deadline_in_ms=60_000,
        chunks=chunks,
        n=sum(len(chunk.token_ids) for chunk in chunks),
    )


def outbox() -> tuple[Outbox, OwnedRequests]:
    owned = OwnedRequests()
    return Outbox(owned, WorkerMetrics(), wake=lambda: None), owned


@given(st.data())
def test_the_outbox_publishes_what_the_engine_gave(data: st.DataObject) -> None:
    tokens = data.draw(orders())
    bounds = data.draw(cuts(len(tokens)))
    answer = data.draw(st.sampled_from(Answer))
    box, owned = outbox()
    box.open(claim(), "normal", answer, sequences=4)
    assert owned.open_sequences["normal"] == 4
    chunks: list[Chunk] = []
    for begin, end in itertools.pairwise(bounds):
        for at, token in enumerate(tokens[begin:end], begin):
            ends = at == len(tokens) - 1
            finish = Finish(Reason.LENGTH, discarded_tokens=11) if ends else None
            box.post(
                [
                    Update(
                        "a#1", token.start, (token.id,), token.text, finish, 3, 0, (),
                        token.choice, (part([token]),),
                    )
                ]
            )  # fmt: skip
        (row,) = box.take(10)
        chunks.append(unpack_event(row[4]))  # type: ignore[arg-type]
        box.take_answer([row], [AppendStatus.WRITTEN])
    assert chunks == published(tokens, bounds)
    assert isinstance(row, Append)
    ended = unpack_event(row.end)
    assert isinstance(ended, End)
    assert ended.usage is not None
    assert (ended.n, ended.usage.output_tokens) == (len(tokens), len(tokens) + 11)
    assert row.spent == 3 + len(tokens) + 11
    assert owned.open_sequences["normal"] == 0


def test_a_continued_request_goes_on_with_its_digest() -> None:
    tokens = [
        Token(0, 0, 5, "x", None),
        Token(1, 0, 5, "y", None),
        Token(0, 1, 6, "z", Reason.STOP),
    ]
    before, after = published(tokens, [0, 2, 3])
    box, _ = outbox()
    box.open(claim(before), "normal", sequences=2)
    last = tokens[2]
    box.post([Update("a#1", 1, (6,), "z", None, 3, 0, (), 0, (part([last]),))])
    (row,) = box.take(10)
    assert unpack_event(row[4]) == after
