"""What edge and engine tell each other arrives whole and in order, however it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_worker.engine.requests.engine_request import Finish, Update
from penstock.gpu_worker.engine.stats import Load
from penstock.gpu_worker.messages import (
    Abort,
    Frames,
    StepRecord,
    StepReport,
    bare_end,
    frame,
    packed_updates,
    unpacked_updates,
)
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.states import Lane, Reason

UPDATES = [
    Update("a#1", 3, (7,), "x", None, 10, 4),
    Update("b#1", 0, (8, 9), "yz", Finish(Reason.STOP), 10, 0),
    Update("c#1", 0, (8,), "y", None, 10, 0, logprobs=(TokenLogprobs(-0.5, ((8, -0.5),)),)),
    Update("d#1", 5, (1,), "q", None, 10, 0, choice=2),
    Update("f#1", 5, (1, 2), "é!", None, 10, 0, text_lengths=(2,)),
    bare_end("e#1", Reason.INVALID, "no"),
]


def test_updates_survive_the_way() -> None:
    packed = packed_updates(UPDATES)
    assert isinstance(packed[0], tuple), "a plain token travels as a tuple"
    assert unpacked_updates(packed) == UPDATES


@given(st.lists(st.integers(1, 200), max_size=60))
def test_messages_come_out_as_they_went_in_wherever_they_are_cut(cuts: list[int]) -> None:
    step = StepReport(
        packed_updates(UPDATES), Load({Lane.BATCH: 3}, 77), StepRecord(0.1, 1, 2, 3, 4)
    )
    sent = [Abort("x"), step, Abort("y" * 500)]
    data, frames, got = b"".join(map(frame, sent)), Frames(), []
    for cut in cuts:
        got += list(frames.feed(data[:cut]))
        data = data[cut:]
    got += list(frames.feed(data))
    assert got == sent
