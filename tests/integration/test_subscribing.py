"""Subscriptions that come, go and are denied while the connection is made, each with its fate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from integration.reading import Client
from log_writer import eventually

from penstock.producer.reading.subscriber import Subscriber
from penstock.producer.reading.subscription import Subscription
from penstock.shared.errors import RedisUnavailable


async def is_confirmed(subscription: Subscription) -> bool:
    deadline = asyncio.get_running_loop().time() + 5
    return await subscription.wait(deadline) and subscription.take() is None


async def next_message(subscription: Subscription) -> bytes:
    deadline = asyncio.get_running_loop().time() + 5
    assert await subscription.wait(deadline)
    messages = subscription.take()
    assert messages is not None
    (message,) = messages
    return message


@pytest.fixture
async def subscriber(redis_client: Client) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(redis_client)
    yield subscriber
    await subscriber.aclose()


@pytest.fixture
async def limited(redis_url: str, redis_client: Client) -> AsyncIterator[Subscriber]:
    """A subscriber that may use the channels ``good:*`` and no others."""
    user = ("limited", "reset", "on", ">secret", "+@all", "resetchannels", "&good:*")
    await redis_client.execute_command("ACL", "SETUSER", *user)
    async with Client.from_url(redis_url.replace("redis://", "redis://limited:secret@")) as client:
        subscriber = Subscriber(client)
        yield subscriber
        await subscriber.aclose()
    await redis_client.execute_command("ACL", "DELUSER", "limited")


async def test_the_last_reader_leaves_while_the_connection_is_made(
    subscriber: Subscriber, redis_client: Client
) -> None:
    left = subscriber.open("left")
    await asyncio.sleep(0)  # the connection is begun
    subscriber.close(left)
    while subscriber.connections == 0:
        await asyncio.sleep(0)
    opened = subscriber.open("opened")
    assert await is_confirmed(opened)
    await redis_client.publish("opened", "message")
    assert await next_message(opened) == b"message"
    assert subscriber.connections == 1


async def test_of_many_channels_only_the_denied_ones_fail(
    limited: Subscriber, redis_client: Client
) -> None:
    good = [limited.open(f"good:{n}") for n in range(10)]
    denied = [limited.open("denied"), limited.open_inbox("denied inbox", "request")]
    for subscription in denied:  # in one command with the others, as the first of the connection
        with pytest.raises(RedisUnavailable, match=r"refuses to subscribe.*\+subscribe"):
            await is_confirmed(subscription)
    assert all([await is_confirmed(subscription) for subscription in good])
    good += [limited.open("good:late"), limited.open("good:later")]
    again = limited.open("denied")  # together with those, on a connection that stands
    with pytest.raises(RedisUnavailable, match="refuses to subscribe"):
        await is_confirmed(again)
    assert all([await is_confirmed(subscription) for subscription in good[10:]])
    for number, subscription in enumerate(good):
        await redis_client.publish(subscription.channel, f"{number}")
        assert await next_message(subscription) == b"%d" % number
    for subscription in (*denied, again):
        limited.close(subscription)
    assert limited.channels == len(good)


async def test_a_denied_channel_is_not_asked_for_by_the_next_connection(
    limited: Subscriber, redis_client: Client
) -> None:
    good, denied = limited.open("good:1"), limited.open("denied")
    with pytest.raises(RedisUnavailable):
        await is_confirmed(denied)
    assert await is_confirmed(good)
    assert limited.channels == 1
    refusals = await count_refusals(redis_client)
    await redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    assert await is_confirmed(good)
    assert limited.connections == 2
    assert await count_refusals(redis_client) == refusals


async def test_a_refused_ping_fails_no_reader(
    redis_url: str, redis_client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    user = ("deaf", "reset", "on", ">secret", "+@all", "-ping", "allchannels")
    await redis_client.execute_command("ACL", "SETUSER", *user)
    async with Client.from_url(redis_url.replace("redis://", "redis://deaf:secret@")) as client:
        caplog.set_level("INFO")
        subscriber = Subscriber(client, ping_after_s=0.05)
        first = subscriber.open("first")
        assert await is_confirmed(first)

        async def refused() -> bool:
            return "refuses PING" in caplog.text

        await eventually(refused, "a ping was refused")
        second = subscriber.open("second")
        assert await is_confirmed(second)
        assert subscriber.connections == 1
        await subscriber.aclose()
    await redis_client.execute_command("ACL", "DELUSER", "deaf")


async def count_refusals(client: Client) -> int:
    """Commands that Redis has refused to users so far."""
    log = await client.execute_command("ACL", "LOG")
    return sum(int(dict(zip(row[::2], row[1::2], strict=True))[b"count"]) for row in log)
