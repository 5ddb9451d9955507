"""Requests on their way to the engine: in the pool, side by side, each told of once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from waiting import wait_until

from penstock.gpu_worker.engine.output.text_stream import AnswerParser
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine_process.input_processor import InputProcessor
from penstock.gpu_worker.messages import Add, Prepared
from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason


def order(run: str, **fields: Any) -> Add:
    return Add(
        run, Request(**{"id": run.partition("#")[0], "prompt": "x", **fields}), (), (), 1.0, 2.0
    )


def no_parser(request: Request, prompt_ids: Sequence[int]) -> Callable[[], AnswerParser]:
    raise AssertionError("no request asks for one")


def compile_nothing(options: SamplingOptions) -> None:
    return None


class Told(list[Prepared]):
    """What was told, and what the engine was given."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[EngineRequest] = []


def prepare(
    encode: Callable[[Request], Sequence[int]],
    orders: Sequence[Add],
    compile: Callable[[Any], Any] = lambda options: None,
    gate: threading.Event | None = None,
    **settings: float,
) -> Told:
    told = Told()
    inputs = InputProcessor(
        encode, compile, no_parser, told.added.append, told.append, lambda: None, **settings
    )
    for one in orders:
        inputs.begin(one)

    def all_are() -> bool:
        inputs.deliver()
        return len(told) == len(orders)

    wait_until(all_are, "all are prepared")
    if gate is not None:
        gate.set()
    inputs.close()
    return told


def test_what_is_ordered_reaches_the_engine() -> None:
    told = prepare(lambda prompt: [1, 2], [order("a#1", tenant="t")])
    (request,) = told.added
    assert told == [Prepared("a#1")]
    assert (request.id, request.prompt_ids, request.tenant) == ("a#1", (1, 2), "t")
    assert (request.arrival, request.deadline) == (1.0, 2.0)


def test_prompts_are_tokenised_side_by_side_and_not_on_the_loops_thread() -> None:
    """Each waits for the other, which ends only if both run, and neither on this thread."""
    together = threading.Barrier(2, timeout=60)
    threads = set()

    def encode(prompt: object) -> list[int]:
        threads.add(threading.current_thread())
        together.wait()
        return [1]

    assert len((prepare(encode, [order("a"), order("b")])).added) == 2
    assert len(threads) == 2
    assert threading.current_thread() not in threads


def test_what_can_not_be_prepared_ends_and_says_why() -> None:
    def encode(request: Request) -> list[int]:
        if request.prompt == "bad":
            raise InvalidRequest("prompt", request.prompt, "a good one")
        raise RuntimeError("the tokenizer broke")

    told = prepare(encode, [order("bad", prompt="bad"), order("other")])
    ends = {item.run: item.end.finish for item in told if item.end is not None}
    assert ends["bad"] is not None
    assert ends["bad"].reason is Reason.INVALID
    assert "a good one" in ends["bad"].message
    assert ends["other"] is not None
    assert ends["other"].reason is Reason.ENGINE_ERROR
    assert not told.added


def test_a_slow_constraint_ends_its_request_and_no_other() -> None:
    gate = threading.Event()
    told = prepare(
        lambda prompt: [1],
        [order("slow", options=SamplingOptions(regex="a")), order("other")],
        lambda options: gate.wait(30),
        gate,
        compile_timeout_s=0.05,
    )
    ends = {item.run: item.end for item in told}
    assert ends["other"] is None
    assert ends["slow"] is not None
    assert ends["slow"].finish is not None
    assert (
        ends["slow"].finish.message == "regex: got 'a'; allowed: what can be compiled within 0.05 s"
    )


class Slow:
    """Compiles what is called slow when its gate opens, and anything else at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: list[str] = []

    def __call__(self, options: SamplingOptions) -> None:
        self.begun.append(str(options.regex))
        if options.regex == "slow":
            self.gate.wait(30)


def slow_orders() -> list[Add]:
    """As many slow constraints as there are threads."""
    slow = SamplingOptions(regex="slow")
    return [order(f"slow{number}", options=slow) for number in range(2)]


def test_prompts_are_not_held_by_constraints() -> None:
    told, compile = Told(), Slow()
    inputs = InputProcessor(
        lambda request: [1], compile, no_parser, told.added.append, told.append, lambda: None
    )
    for one in [*slow_orders(), order("plain")]:
        inputs.begin(one)

    def plain_is_prepared() -> bool:
        inputs.deliver()
        return [item.run for item in told] == ["plain"]

    wait_until(plain_is_prepared, "the plain one is prepared")
    compile.gate.set()
    inputs.close()


def test_no_constraint_is_refused_for_the_time_in_which_the_compiler_gets_ready() -> None:
    told, clock, ready = Told(), Clock(), threading.Event()
    waiting: list[bool] = []

    def prepare_compiler() -> None:
        waiting.append(True)
        ready.wait(30)

    inputs = InputProcessor(
        lambda request: [1],
        lambda options: None,
        no_parser,
        told.added.append,
        told.append,
        lambda: None,
        prepare_compiler=prepare_compiler,
        compile_timeout_s=0.5,
        timer=clock,
    )
    inputs.begin(order("first", options=SamplingOptions(regex="a")))
    wait_until(lambda: waiting, "the first constraint waits for the compiler")
    assert clock.timers == []
    ready.set()

    def first_is_told() -> bool:
        inputs.deliver()
        return [(item.run, item.end) for item in told] == [("first", None)]

    wait_until(first_is_told, "the first constraint is prepared")
    assert len(clock.timers) == 1
    inputs.close()


class Clock:
    """Its timers end when the test says so."""

    def __init__(self) -> None:
        self.timers: list[threading.Timer] = []

    def __call__(self, seconds: float, function: Callable[..., Any], args: Any) -> threading.Timer:
        assert seconds == 0.5
        self.timers.append(threading.Timer(3600, function, args))
        return self.timers[-1]

    def let_all_end(self) -> None:
        for timer in self.timers:
            timer.cancel()
            timer.function(*timer.args)


def test_a_constraint_is_refused_for_its_own_time_only() -> None:
    """Two take all threads and are refused; the one behind them is compiled when it is its turn."""
    told, compile, clock = Told(), Slow(), Clock()
    encoded: list[object] = []

    def encode(prompt: object) -> list[int]:
        encoded.append(prompt)
        return [1]

    inputs = InputProcessor(
        encode,
        compile,
        no_parser,
        told.added.append,
        told.append,
        lambda: None,
        compile_timeout_s=0.5,
        timer=clock,
    )
    quick = order("quick", options=SamplingOptions(regex="quick"))
    for one in slow_orders():
        inputs.begin(one)
    wait_until(lambda: len(compile.begun) == 2, "all threads are taken")
    inputs.begin(quick)
    wait_until(lambda: len(encoded) == 3, "the quick one waits for a thread")
    clock.let_all_end()
    inputs.deliver()
    ends = {item.run: item.end.finish for item in told if item.end is not None}
    assert set(ends) == {"slow0", "slow1"}
    assert "what can be compiled within 0.5 s" in ends["slow0"].message
    compile.gate.set()

    def quick_is_told() -> bool:
        inputs.deliver()
        return len(told) == 3

    wait_until(quick_is_told, "the quick one is prepared")
    inputs.close()
    assert [request.id for request in told.added] == ["quick"]


def test_what_is_given_up_before_its_turn_is_not_compiled() -> None:
    told, compile, woken = Told(), Slow(), threading.Semaphore(0)
    inputs = InputProcessor(
        lambda request: [1],
        compile,
        no_parser,
        told.added.append,
        told.append,
        lambda: woken.release(),
    )
    quick = order("quick", options=SamplingOptions(regex="quick"))
    for one in slow_orders():
        inputs.begin(one)
    wait_until(lambda: len(compile.begun) == 2, "all threads are taken")
    inputs.begin(quick)
    assert inputs.cancel("quick")
    compile.gate.set()
    for _ in range(3):
        assert woken.acquire(timeout=60)
    inputs.close()
    assert compile.begun == ["slow", "slow"]


def test_ids_are_prepared_at_once() -> None:
    """A thread would take the interpreter lock from a step for longer than it takes."""
    threads = set()

    def encode(prompt: object) -> list[int]:
        threads.add(threading.current_thread())
        return [1]

    prepare(encode, [order("a", prompt=(1, 2, 3))])
    assert threads == {threading.current_thread()}


def test_what_is_given_up_while_it_is_prepared_never_reaches_the_engine() -> None:
    gate, done = threading.Event(), threading.Event()
    told, woken = Told(), threading.Semaphore(0)

    def encode(request: Request) -> list[int]:
        gate.wait(60)
        if request.prompt == "last":
            done.set()
        return [1]

    inputs = InputProcessor(
        encode, compile_nothing, no_parser, told.added.append, told.append, lambda: woken.release()
    )
    inputs.begin(order("a"))
    inputs.begin(order("b"))
    assert inputs.cancel("a")
    assert not inputs.cancel("a")
    inputs.begin(order("c", prompt="last"))
    gate.set()
    for _ in range(3):
        assert woken.acquire(timeout=60)
    assert done.is_set()
    inputs.deliver()
    inputs.close()
    assert sorted(request.id for request in told.added) == ["b", "c"]
    assert sorted(item.run for item in told) == ["b", "c"]


def test_what_a_library_panics_at_ends() -> None:
    class PanicError(BaseException):
        pass

    def encode(prompt: object) -> list[int]:
        raise PanicError("a panic")

    (item,) = prepare(encode, [order("a")])
    assert item.end is not None
    assert item.end.finish is not None
    assert item.end.finish.reason is Reason.ENGINE_ERROR
