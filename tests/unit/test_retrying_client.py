"""How the client meets failures of its connection. Commands are played; the server is a fake."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator

import fakeredis
import pytest
from log_writer import LogWriter, eventually
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.producer import Producer
from penstock.producer.reading.subscriber import Subscriber
from penstock.producer.reading.subscription import Subscription
from penstock.shared.errors import ConfigurationError, RedisUnavailable
from penstock.shared.protocol.states import State
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.redis.unavailable import unavailable


@pytest.fixture
async def fake() -> AsyncIterator[fakeredis.FakeAsyncRedis]:
    client = fakeredis.FakeAsyncRedis()
    yield client
    await client.aclose()


class Server:
    """Answers with what it is given, one after the other."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self) -> object:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    "error",
    [
        RedisConnectionError("reset"),
        RedisTimeoutError("slow"),
        BusyLoadingError("loading"),
        OSError("broken pipe"),
    ],
)
async def test_a_broken_connection_is_tried_again(
    fake: fakeredis.FakeAsyncRedis, error: Exception
) -> None:
    server = Server(error, error, "reply")
    assert await RetryingClient(fake).call(server) == "reply"
    assert server.asked == 3


async def test_an_outage_ends_with_an_error_that_names_the_server() -> None:
    client = RetryingClient("redis://user:secret@somewhere:7000/2", outage_s=0.05)
    server = Server(RedisConnectionError("reset by peer"))
    with pytest.raises(RedisUnavailable) as caught:
        await client.call(server)
    assert str(caught.value) == (
        "cannot reach Redis at redis://somewhere:7000/2: reset by peer; "
        "start the server, or set REDIS_URL or --redis to its address"
    )
    assert server.asked > 1
    assert caught.value.outage == "it cannot be reached"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AuthenticationError("WRONGPASS"), "refuses access: WRONGPASS; check user and password"),
        (ResponseError("ERR no"), "refused a command: ERR no"),
    ],
)
async def test_a_refusal_is_not_tried_again(
    fake: fakeredis.FakeAsyncRedis, error: Exception, message: str
) -> None:
    server = Server(error)
    with pytest.raises(RedisUnavailable, match=message) as caught:
        await RetryingClient(fake).call(server)
    assert server.asked == 1
    assert caught.value.outage == ""


@pytest.mark.parametrize(
    ("cause", "may_pass"),
    [
        (ssl.SSLCertVerificationError("self-signed certificate"), False),
        (ssl.SSLError("[SSL: WRONG_VERSION_NUMBER]"), False),
        (ssl.SSLEOFError("the server ended amid the handshake"), True),
        (ConnectionRefusedError("nothing listens"), True),
    ],
)
def test_two_sides_that_disagree_on_tls_are_no_outage(cause: Exception, may_pass: bool) -> None:
    error = RedisConnectionError("what redis-py says")
    error.__context__ = cause
    client = RetryingClient("rediss://somewhere:7000")
    assert bool(unavailable(error, client.redis.connection_pool).outage) == may_pass


async def test_a_cancellation_that_the_command_swallowed_still_counts(
    fake: fakeredis.FakeAsyncRedis,
) -> None:
    """asyncio.wait_for of Python 3.11, within redis-py, does this when the moment is right."""
    sending = asyncio.Event()

    async def send() -> str:
        sending.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "sent"
        raise AssertionError

    calling = asyncio.create_task(RetryingClient(fake).call(send))
    await sending.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await RetryingClient(fake).call(send)


def test_another_event_loop_is_named(fake: fakeredis.FakeAsyncRedis) -> None:
    client = RetryingClient(fake)

    async def send() -> None:
        pass

    async def call() -> None:
        await client.call(send)

    asyncio.run(call())
    with pytest.raises(RuntimeError, match="belongs to another event loop; make one for each"):
        asyncio.run(call())


async def test_only_so_many_commands_at_once(fake: fakeredis.FakeAsyncRedis) -> None:
    client, running, most = RetryingClient(fake), 0, 0

    async def send() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1

    await asyncio.gather(*(client.call(send) for _ in range(100)))
    assert most == 8


@pytest.mark.parametrize(
    ("version", "fits"),
    [("5.0.7", False), ("6.0.16", False), ("6.2.0", True), ("7.2.4", True), ("8.2.1", True)],
)
async def test_the_servers_version(
    fake: fakeredis.FakeAsyncRedis, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    async def info(section: str) -> dict[str, object]:
        return {"redis_version": version}

    monkeypatch.setattr(fake, "info", info)
    if fits:
        await RetryingClient(fake).connect("any key")
        return
    with pytest.raises(RedisUnavailable, match=rf"version '{version}' is too old.*6\.2 or newer"):
        await RetryingClient(fake).connect("any key")


async def test_a_user_who_may_not_ask_for_the_version(
    fake: fakeredis.FakeAsyncRedis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def info(section: str) -> dict[str, object]:
        raise NoPermissionError("NOPERM")

    monkeypatch.setattr(fake, "info", info)
    with caplog.at_level(logging.INFO):
        await RetryingClient(fake).connect("any key")
    assert "version is not checked" in caplog.text


def test_addresses() -> None:
    assert RetryingClient("unix:///run/redis.sock?db=1").address == "unix:///run/redis.sock"
    assert RetryingClient("rediss://:pw@h/3").address == "rediss://h:6379/3"
    with pytest.raises(ConfigurationError, match="without decode_responses"):
        RetryingClient(Redis(decode_responses=True))


async def wait(subscription: Subscription, silence_s: float) -> bool:
    return await subscription.wait(asyncio.get_running_loop().time() + silence_s)


async def all_dispatched(subscriber: Subscriber, marker_name: str) -> None:
    """One connection, so what was published before the confirmation of another channel is in."""
    marker = subscriber.open(marker_name)
    assert await wait(marker, 5)
    subscriber.close(marker)


async def test_a_subscription_says_when_it_may_have_missed_something(
    fake: fakeredis.FakeAsyncRedis,
) -> None:
    subscriber = Subscriber(fake)
    subscription = subscriber.open("news")
    assert subscription.take() == []
    assert await wait(subscription, 5)
    assert subscription.take() is None  # confirmed: what was published before is not here
    for i in range(3):
        assert await fake.publish("news", f"{i}") == 1
    messages: list[bytes] = []
    while len(messages) < 3:
        assert await wait(subscription, 5)
        came = subscription.take()
        assert came is not None
        messages += came
    assert messages == [b"0", b"1", b"2"]
    second = subscriber.open("news")
    assert second.take() is None  # a channel that is open already will not be confirmed
    for i in range(256):
        await fake.publish("news", f"{i}")
    await all_dispatched(subscriber, "marker 1")
    assert second.take() == [b"%d" % i for i in range(256)]
    await fake.publish("news", "one too many")
    await all_dispatched(subscriber, "marker 2")
    assert subscription.take() is None  # a slow reader beside a fast one
    assert second.take() == [b"one too many"]
    subscriber.close(subscription)
    subscriber.close(subscription)
    assert subscriber.channels == 1
    subscriber.close(second)
    assert subscriber.channels == 0

    async def unsubscribed() -> bool:
        return await fake.pubsub_channels() == []

    await eventually(unsubscribed, "no channel")
    assert subscriber.connections == 1
    await subscriber.aclose()


async def test_a_stream_on_a_fake_server(fake: fakeredis.FakeAsyncRedis) -> None:
    producer = Producer(fake)  # not connected: the fake has no INFO
    writer = await LogWriter(fake, "r").open()
    await writer.append(3)
    reading = asyncio.create_task(producer.result("r"))

    async def subscribed() -> bool:
        return bool(await fake.pubsub_channels())

    await eventually(subscribed, "subscribed")
    await writer.append(2)
    await writer.finish()
    result = await reading
    assert (result.token_ids, result.text) == (writer.tokens(0, 5), writer.text(0, 5))
    status = await producer.status("r")
    assert (status.state, status.n, status.end) == (State.COMPLETED, 5, writer.end())
    await producer.aclose()


def test_importing_the_client_is_light() -> None:
    program = (
        "import sys, penstock.producer\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'typer', 'rich'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_a_deadline_ends_a_wait_and_news_end_it_sooner() -> None:
    loop = asyncio.get_running_loop()
    subscription = Subscription(b"news", None, behind=False)
    began = loop.time()
    assert not await wait(subscription, 0.05)
    assert loop.time() - began >= 0.05
    loop.call_later(0.05, subscription.push, b"one")
    assert await wait(subscription, 5)
    assert subscription.take() == [b"one"]
    began = loop.time()
    assert not await wait(subscription, 0.05), "sooner than the alarm of the wait before"
    assert 0.05 <= loop.time() - began < 4
    loop.call_later(0.05, subscription.push, b"two")
    assert await wait(subscription, 0.1)
    subscription.take()
    began = loop.time()
    assert not await wait(subscription, 0.1), "later than the alarm of the wait before"
    assert loop.time() - began >= 0.1
    subscription.close()


async def test_silence_sends_the_reader_to_the_log_and_news_put_it_off() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    subscription = Subscription(b"news", None, behind=False)
    while loop.time() < began + 0.5:
        assert not await wait(subscription, 0.1)
    heard_at = loop.time()
    subscription.push(b"one")
    assert await subscription.wait()
    assert subscription.take() == [b"one"]
    assert await subscription.wait()
    assert subscription.take() is None
    assert 1 <= loop.time() - heard_at < 10
    began = loop.time()
    assert await subscription.wait()
    assert subscription.take() is None
    assert 1.9 <= loop.time() - began < 15, "a silence that goes on"
    subscription.close()


async def test_a_wait_that_was_given_up_leaves_the_next_in_peace() -> None:
    subscription = Subscription(b"news", None, behind=False)
    first = asyncio.create_task(wait(subscription, 5))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one task at a time"):
        await wait(subscription, 5)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(wait(subscription, 5))
    await asyncio.sleep(0)
    subscription.push(b"one")
    assert await second
    subscription.push(b"two")
    assert await wait(subscription, 5)
    assert subscription.take() == [b"one", b"two"]
