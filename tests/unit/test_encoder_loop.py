"""The loop that serves encoders, with a channel of orders and a server that may fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.gpu_worker.engine_process.encoder_loop import BATCH_TOKENS, EncoderLoop
from penstock.gpu_worker.messages import Abort, Add, StepReport, Stop, unpacked_updates
from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol import Reason, Request
from penstock.shared.protocol.payload import unpack_result


class Channel:
    """Orders that come one group after the other, and the reports so far."""

    def __init__(self, *groups: Sequence[object]) -> None:
        self.groups = [*groups, [Stop()]]
        self.reports: list[StepReport] = []
        self.closed = False

    def read(self) -> Iterator[object]:
        yield from self.groups.pop(0)

    def wait(self, timeout_s: float | None) -> bool:
        return True

    def send(self, message: Any) -> None:
        self.reports.append(message)

    def close(self) -> None:
        self.closed = True

    def updates(self) -> dict[str, Any]:
        found = [u for report in self.reports for u in unpacked_updates(report.updates)]
        assert len({update.id for update in found}) == len(found)
        return {update.id: update for update in found}


class Server:
    """Doubles numbers; breaks on some."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def cost(self, item: Any) -> int:
        return BATCH_TOKENS // 4

    def infer(self, items: Sequence[Any]) -> list[Any]:
        self.batches.append(list(items))
        if "poison" in items:
            raise RuntimeError("out of luck")
        return [
            InvalidRequest("input", item, "a number")
            if isinstance(item, str)
            else {"tokens": 3, "twice": 2 * item}
            for item in items
        ]


def add(payload: Any, lane: str = "normal") -> Add:
    request = Request.build(id=f"r{payload}", payload=payload, lane=lane)
    return Add(request.id, request, (), (), 0.0, 0.0)


def serve(channel: Channel) -> Server:
    server = Server()
    EncoderLoop(server, channel, heartbeat_s=0.01).run()
    assert channel.closed
    return server


def test_what_has_come_is_one_batch_with_the_most_urgent_first() -> None:
    channel = Channel([add(1, "batch"), add(2), add(3, "critical"), add(4), add(5)])
    channel.groups.insert(1, [])
    server = serve(channel)
    assert server.batches == [[3, 2, 4, 5], [1]]  # four fit into the bound
    updates = channel.updates()
    assert unpack_result(updates["r3"].result) == {"tokens": 3, "twice": 6}
    assert updates["r3"].finish.reason is Reason.STOP
    assert {update.prompt_tokens for update in updates.values()} == {3}
    (first, *_) = channel.reports
    assert first.record is not None
    assert (first.record.num_tokens, first.record.num_sequences) == (12, 4)
    assert {use.run for use in first.used} == {"r2", "r3", "r4", "r5"}


def test_one_that_raises_fails_alone() -> None:
    channel = Channel([add(1), add("poison"), add(2)])
    serve(channel)
    updates = channel.updates()
    assert updates["rpoison"].finish.reason is Reason.ENGINE_ERROR
    assert "out of luck" in updates["rpoison"].finish.message
    assert unpack_result(updates["r1"].result)["twice"] == 2
    assert unpack_result(updates["r2"].result)["twice"] == 4


def test_a_bad_item_is_invalid_and_an_aborted_one_is_not_computed() -> None:
    channel = Channel([add("bad"), add(1), add(2), Abort("r1")])
    server = serve(channel)
    assert server.batches == [["bad", 2]]
    updates = channel.updates()
    assert updates.keys() == {"rbad", "r2"}
    assert updates["rbad"].finish.reason is Reason.INVALID


def test_the_order_to_stop_leaves_what_waits_to_others() -> None:
    channel = Channel([add(1), Stop()])
    assert serve(channel).batches == []
    assert channel.updates() == {}
