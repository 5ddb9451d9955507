"""The outbox: what the engine produced becomes appends whose index and digest always agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_worker.edge.outbox import Outbox
from penstock.gpu_worker.edge.owned_requests import OwnedRequests
from penstock.gpu_worker.engine.requests.engine_request import Finish, Update
from penstock.gpu_worker.messages import RunUsage
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, TokenLogprobs, rolling_digest
from penstock.shared.protocol.states import Answer, Reason
from penstock.shared.scripts.operations import Append, AppendStatus, Claim
from penstock.shared.scripts.replies import Used


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


@pytest.fixture
def owned() -> OwnedRequests:
    return OwnedRequests()


@pytest.fixture
def outbox(owned: OwnedRequests, metrics: WorkerMetrics, clock: Clock) -> Outbox:
    return Outbox(owned, metrics, wake=lambda: None, clock=clock)


def claim(request_id: str = "a", *chunks: Chunk, epoch: int = 1) -> Claim:
    return Claim(
        id=request_id,
        epoch=epoch,
        attempts=1 + bool(chunks),
        suspect=False,
        payload=b"",
        age_ms=500,
        queue_ms=400,
        ttft_ms=450 if chunks else None,
        deadline_in_ms=60_000,
        chunks=chunks,
        n=sum(len(chunk.token_ids) for chunk in chunks),
    )


def update(
    ids: tuple[int, ...], text: str = "", finish: Finish | None = None, run: str = "a#1"
) -> Update:
    return Update(
        id=run,
        start=0,
        token_ids=ids,
        text=text,
        finish=finish,
        prompt_tokens=7,
        cached_tokens=3,
    )


def take(outbox: Outbox, limit: int = 256) -> list[Append]:
    """What is pending, with names to its fields."""
    return [Append(*row) for row in outbox.take(limit)]


def sample(metrics: WorkerMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"penstock_{name}", labels) or 0.0


def test_updates_between_two_takes_become_one_chunk(outbox: Outbox) -> None:
    outbox.open(claim(), "normal")
    outbox.post([update((5,), "He")])
    outbox.post([update((6, 7), "llo")])
    (item,) = take(outbox)
    assert (item.start, item.num_tokens, item.end) == (0, 3, b"")
    # The engine told the second update's text as a whole.
    assert unpack_event(item.chunk) == Chunk(
        0, (5, 6, 7), "Hello", rolling_digest((5, 6, 7)), text_lengths=(2, 0, 3)
    )
    assert take(outbox) == []
    cut = update((8, 9), "é!")
    cut.text_lengths = (2,)
    outbox.take_answer([item], [AppendStatus.WRITTEN])
    outbox.post([cut])
    (item,) = take(outbox)
    chunk = unpack_event(item.chunk)
    assert isinstance(chunk, Chunk)
    assert (chunk.text_lengths, chunk.without(1).text) == ((2, 1), "!")


def test_the_tokens_of_a_prompt_are_no_output_to_the_bill(outbox: Outbox) -> None:
    outbox.open(claim(), "normal")
    asked = update((5, 6, 7), "abc", Finish(Reason.STOP, generated_none=True))
    asked.prompt_tokens = 0
    outbox.post([asked])
    (item,) = take(outbox)
    end = unpack_event(item.end)
    assert isinstance(end, End)
    assert end.usage is not None
    assert (end.n, end.usage.prompt_tokens, end.usage.output_tokens) == (3, 0, 0)


def test_logprobs_travel_with_their_tokens(outbox: Outbox) -> None:
    reports = [TokenLogprobs(-float(i), ((i, -0.5),)) for i in range(3)]
    outbox.open(claim(), "normal")
    for i, report in enumerate(reports):
        step = update((i,), "x")
        step.logprobs = (report,)
        outbox.post([step])
        if i:
            (item,) = take(outbox)
            outbox.take_answer([item], [AppendStatus.WRITTEN])
            chunk = unpack_event(item.chunk)
            assert isinstance(chunk, Chunk)
            assert chunk.logprobs == tuple(reports[:2] if i == 1 else reports[2:])


def test_chunks_join_by_index_and_digest(outbox: Outbox) -> None:
    outbox.open(claim(), "normal")
    outbox.post([update((5,), "x")])
    first = take(outbox)
    outbox.take_answer(first, [AppendStatus.WRITTEN])
    outbox.post([update((6,), "y")])
    (second,) = take(outbox)
    assert unpack_event(second.chunk) == Chunk(1, (6,), "y", rolling_digest((5, 6)))


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3),
        st.booleans(),  # a probe before it
        st.booleans(),  # taken after it
    ),
    min_size=1,
    max_size=12,
)


@given(STEPS, st.sampled_from(Answer), st.booleans())
def test_whatever_a_step_brings_the_log_is_one_line(
    steps: list[tuple[list[int], bool, bool]], answer: Answer, with_logprobs: bool
) -> None:
    outbox = Outbox(OwnedRequests(), WorkerMetrics(), wake=lambda: None)
    outbox.open(claim(), "normal", answer)
    said: list[int] = []
    told: list[Chunk] = []
    for ids, probed, taken in [*steps, ([0], False, True)]:
        if probed:
            outbox.probe()
        step = update(tuple(ids), "".join(map(chr, range(65, 65 + len(ids)))))
        step.logprobs = tuple(TokenLogprobs(-0.5) for _ in ids if with_logprobs)
        outbox.post([step])
        said += ids
        if taken:
            (item,) = take(outbox)
            outbox.take_answer([item], [AppendStatus.WRITTEN])
            assert item.start + item.num_tokens == len(said)
            chunk = unpack_event(item.chunk)
            assert isinstance(chunk, Chunk)
            assert (item.start, item.num_tokens) == (chunk.start, len(chunk.token_ids))
            assert chunk.digest == rolling_digest(said)
            told.append(chunk)
    assert [token for chunk in told for token in chunk.token_ids] == said
    assert sum(len(chunk.text) for chunk in told) == len(said)
    assert sum(len(chunk.logprobs) for chunk in told) == with_logprobs * len(said)


def test_tokens_that_wait_for_each_other_can_be_told_apart(outbox: Outbox) -> None:
    """Who reads on from the second of them needs its text alone."""
    outbox.open(claim(), "normal")
    outbox.post([update((4,), "a")])
    take(outbox)
    for token, text in ((5, "b\u00e9"), (6, ""), (7, "cd")):
        outbox.post([update((token,), text)])
    (item,) = take(outbox)
    assert (item.start, item.num_tokens) == (1, 3)
    assert unpack_event(item.chunk) == Chunk(
        1, (5, 6, 7), "b\u00e9cd", rolling_digest((4, 5, 6, 7)), text_lengths=(3, 0, 2)
    )


def test_continued_request_goes_on_after_its_log(outbox: Outbox) -> None:
    before = Chunk(0, (5, 6), "He", rolling_digest((5, 6)))
    outbox.open(claim("a", before, epoch=4), "normal")
    outbox.post([update((7,), "llo", run="a#4")])
    (item,) = take(outbox)
    assert (item.epoch, item.start) == (4, 2)
    assert unpack_event(item.chunk) == Chunk(2, (7,), "llo", rolling_digest((5, 6, 7)))


def test_end_travels_with_the_last_tokens_and_closes(
    outbox: Outbox, owned: OwnedRequests, metrics: WorkerMetrics, clock: Clock
) -> None:
    outbox.open(claim(), "critical")
    clock.now += 1.5
    outbox.post([update((5,), "x", Finish(Reason.LENGTH))])
    (item,) = take(outbox)
    end = unpack_event(item.end)
    assert isinstance(end, End)
    assert (end.n, end.reason, item.spent) == (1, Reason.LENGTH, 8)
    assert end.usage is not None
    assert (end.usage.prompt_tokens, end.usage.cached_tokens) == (7, 3)
    assert (end.usage.queue_ms, end.usage.ttft_ms) == (400, 2000)
    assert len(owned) == 1, "owned until Redis has confirmed the end"
    outbox.take_answer([item], [AppendStatus.WRITTEN])
    assert len(owned) == 0
    assert sample(metrics, "requests_total", state="completed", reason="length") == 1
    assert sample(metrics, "time_to_first_token_seconds_sum", lane="critical") == 2.0


def test_repeated_writes_are_counted_once(outbox: Outbox, metrics: WorkerMetrics) -> None:
    outbox.open(claim(), "normal")
    outbox.post([update((5,), "x", Finish(Reason.STOP))])
    batch = take(outbox)
    outbox.take_answer(batch, [AppendStatus.WRITTEN])
    outbox.take_answer(batch, [AppendStatus.WRITTEN])
    assert sample(metrics, "generation_tokens_total") == 1


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (AppendStatus.FENCED, "fenced"),
        (AppendStatus.GONE, "gone"),
        (AppendStatus.MISMATCH, "mismatch"),
    ],
)
def test_lost_request_is_dropped_and_its_tokens_are_waste(
    outbox: Outbox, owned: OwnedRequests, metrics: WorkerMetrics, status: int, why: str
) -> None:
    outbox.open(claim(), "normal")
    outbox.open(claim("b"), "normal")
    outbox.post([update((5,), "x"), update((9,), "z", run="b#1")])
    batch = take(outbox)
    outcome = outbox.take_answer(batch, [status, AppendStatus.WRITTEN])
    assert outcome.lost == ("a#1",)
    assert outcome.mismatched == (("a",) if status == AppendStatus.MISMATCH else ())
    outbox.post([update((6,), "late")])
    assert take(outbox) == []
    assert tuple(owned.by_id) == ("b",), "a bystander stays"
    assert sample(metrics, "orphan_tokens_total") == 2
    assert sample(metrics, "append_refusals_total", why=why) == 1


def test_a_step_for_the_claim_before_is_not_the_new_claims(
    outbox: Outbox, metrics: WorkerMetrics
) -> None:
    """Lost and claimed again within one exchange, while the engine was in the middle of a step."""
    outbox.open(claim(epoch=1), "normal")
    outbox.post([update((5,), "x")])
    outbox.take_answer(take(outbox), [AppendStatus.FENCED])
    again = claim(epoch=2)
    outbox.open(again, "normal")
    outbox.post([update((6,), "stale", run="a#1")])
    outbox.end(claim(epoch=1), Reason.INVALID, "stale, too")
    assert take(outbox) == []
    assert sample(metrics, "orphan_tokens_total") == 2
    outbox.post([update((5,), "x", run="a#2")])
    (item,) = take(outbox)
    assert (item.epoch, item.start, item.num_tokens) == (2, 0, 1)


def test_broken_log_ends_its_request_with_a_reason(outbox: Outbox, owned: OwnedRequests) -> None:
    outbox.open(claim(), "normal")
    outbox.post([update((5,), "x")])
    outcome = outbox.take_answer(take(outbox), [AppendStatus.BROKEN])
    assert outcome.lost == ("a#1",), "the engine must stop"
    outbox.post([update((6,), "still running when the refusal came")])
    (item,) = take(outbox)
    end = unpack_event(item.end)
    assert isinstance(end, End)
    assert (item.start, item.num_tokens, end.n, end.reason) == (0, 0, 0, Reason.ENGINE_ERROR)
    outbox.take_answer([item], [AppendStatus.BROKEN])
    assert len(owned) == 0, "a record that is broken, too, must not be tried for ever"


def test_probe_asks_without_writing(outbox: Outbox) -> None:
    outbox.open(claim(), "normal")
    outbox.probe()
    (item,) = take(outbox)
    assert (item.start, item.num_tokens, item.chunk, item.end) == (0, 0, b"", b"")
    assert outbox.take_answer([item], [AppendStatus.FENCED]).lost == ("a#1",)


def test_take_is_bounded_and_keeps_the_rest(outbox: Outbox) -> None:
    for name in "abc":
        outbox.open(claim(name), "normal")
        outbox.post([update((1,), name, run=f"{name}#1")])
    assert [item.id for item in take(outbox, 2)] == ["a", "b"]
    assert [item.id for item in take(outbox, 2)] == ["c"]


def test_request_that_never_reached_the_engine_still_ends(outbox: Outbox) -> None:
    outbox.open(claim(), "normal")
    outbox.end(claim(), Reason.INVALID, "prompt: got nothing")
    (item,) = take(outbox)
    end = unpack_event(item.end)
    assert isinstance(end, End)
    assert (end.n, end.state, end.message) == (0, "failed", "prompt: got nothing")


def test_a_place_is_free_while_the_last_token_of_its_request_is_computed(
    outbox: Outbox, owned: OwnedRequests
) -> None:
    """So that a request claimed now takes the place over without leaving a step out."""
    outbox.open(claim(), "normal", max_tokens=3)
    outbox.open(claim("stops"), "normal", max_tokens=100)
    open_then = []
    for step in range(3):
        finish = Finish(Reason.LENGTH) if step == 2 else None
        outbox.post([update((step,), "x", finish)])
        take(outbox)
        open_then.append(owned.open_sequences["normal"])
    assert open_then == [2, 1, 1], "one fewer from the second token on, and not twice"
    outbox.forget(["a", "stops"])
    assert owned.open_sequences["normal"] == 0


@pytest.mark.parametrize("first", [True, False], ids=["first token", "in the stream"])
def test_output_that_cannot_be_packed_ends_its_request_and_no_other(
    outbox: Outbox, owned: OwnedRequests, metrics: WorkerMetrics, first: bool
) -> None:
    for name in "ab":
        outbox.open(claim(name), "normal")
    if not first:
        outbox.post([update((4,), "x"), update((4,), "x", run="b#1")])
        outbox.take_answer(take(outbox), [AppendStatus.WRITTEN] * 2)
    outbox.post([update((5,), "\ud800"), update((5,), "y", run="b#1")])
    bad, good = take(outbox)
    end = unpack_event(bad.end)
    assert isinstance(end, End)
    assert (end.reason, end.n, bad.num_tokens) == (Reason.ENGINE_ERROR, 0 if first else 1, 0)
    assert "UnicodeEncodeError" in end.message
    chunk = unpack_event(good.chunk)
    assert isinstance(chunk, Chunk)
    assert (chunk.text, chunk.start) == ("y", 0 if first else 1)
    outcome = outbox.take_answer([bad, good], [AppendStatus.WRITTEN] * 2)
    assert outcome.lost == ("a#1",), "the engine must stop"
    assert tuple(owned.by_id) == ("b",)
    assert sample(metrics, "isolated_errors_total", task="outbox") == 1


def test_what_was_used_is_told_with_the_next_tokens(outbox: Outbox, owned: OwnedRequests) -> None:
    """With the first of a worker, then whenever it is more, then in the end."""
    before = claim("a", Chunk(0, (5,), "x", rolling_digest((5,))))
    outbox.open(replace(before, used=Used(7, 3, 4, 1000)), "normal")
    outbox.post([update((6,))])
    (item,) = take(outbox)
    assert item.used == "", "nothing is new"
    owned.used_more([RunUsage("a#1", 500, 2), RunUsage("gone#1", 1, 1)])
    for ids, told in (((7,), "7 3 6 1500"), ((8,), "")):
        outbox.post([update(ids)])
        (item,) = take(outbox)
        assert (item.used, item.end) == (told, b"")
    owned.used_more([RunUsage("a#1", 700, 2)])
    outbox.post([update((9,), finish=Finish(Reason.LENGTH))])
    (item,) = take(outbox)
    end = unpack_event(item.end)
    assert isinstance(end, End)
    assert end.usage is not None
    assert (end.usage.drafted_tokens, end.usage.device_us) == (6, 1700)
