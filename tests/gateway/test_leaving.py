"""Clients that leave, gateways that die or end, and readers that are slow."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from gateway.rig import Event, GatewayProcess, events
from waiting import wait_until

from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.settings import load_settings

pytestmark = pytest.mark.usefixtures("synthetic_worker")

LONG = {"model": "letters", "prompt": "abc", "max_tokens": 60_000}


@pytest.fixture
def state(server: EmbeddedRedis) -> Iterator[Callable[[str], str]]:
    """The state of a request, and why it ended."""
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        yield lambda name: str(client.hget(f"ps:{{letters.0}}:request:{name}", "state"))


def running(server: EmbeddedRedis) -> list[str]:
    """Ids of the requests that have not ended."""
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return list(client.zrange("ps:{letters.0}:deadlines", 0, -1))


def first_event(gateway: GatewayProcess, body: dict[str, Any], **headers: str) -> Event:
    """The first event of a stream, which is then left."""
    url = f"{gateway.url}/v1/completions"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.stream(
        "POST", url, json={**body, "stream": True}, headers=named, timeout=60
    ) as response:
        return next(events(response))


def test_a_client_that_leaves_ends_its_stream(
    gateway: GatewayProcess, state: Callable[[str], str]
) -> None:
    name = first_event(gateway, LONG).data["id"]
    wait_until(lambda: state(name) == "cancelled", "cancelled")


def test_a_client_that_leaves_ends_what_it_waits_for_whole(
    gateway: GatewayProcess, server: EmbeddedRedis
) -> None:
    wait_until(lambda: not running(server), "an idle server")
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        body = json.dumps(LONG).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: running(server), "the request")
    wait_until(lambda: not running(server), "its end")


def test_a_client_may_keep_its_stream(
    gateway: GatewayProcess, state: Callable[[str], str], server: EmbeddedRedis
) -> None:
    body = {**LONG, "max_tokens": 500}
    kept = first_event(gateway, body, x_penstock_on_disconnect="continue").data["id"]
    keyed = first_event(gateway, body, idempotency_key="kept").data["id"]
    for name in (kept, keyed):
        wait_until(lambda name=name: state(name) == "completed", "completed")  # type: ignore[misc]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_of_two_readers_the_first_leaves(
    gateway: GatewayProcess,
    state: Callable[[str], str],
    server: EmbeddedRedis,
    folder: Path,
    where: str,
) -> None:
    """A client that resumes is the second: its first connection may break much later."""
    url, body = f"{gateway.url}/v1/completions", {**LONG, "stream": True}
    with contextlib.ExitStack() as second:
        other = gateway
        if where == "elsewhere":
            other = GatewayProcess(server.url, folder / "second.log")
            second.callback(other.kill)
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            first = events(response)  # which closes the response when it is forgotten
            name = next(first).data["id"]
            path = f"{other.url}/v1/streams/{name}"
            found = events(second.enter_context(httpx.stream("GET", path, timeout=60)))
            next(found)
            with redis.Redis.from_url(server.url) as client:
                shared, record = where == "elsewhere", f"ps:{{letters.0}}:request:{name}"
                wait_until(lambda: client.hexists(record, "shared") == shared, "the heartbeat")
        wait_until(lambda: f" 499 {name}" in gateway.log.read_text(), "that the first has left")
        assert state(name) == "running"
        assert next(found).data["id"] == name
    wait_until(lambda: state(name) == "cancelled", "cancelled")


@pytest.mark.parametrize("beats", [False, True], ids=["at once", "later"])
def test_a_dead_gateway_ends_its_streams(server: EmbeddedRedis, folder: Path, beats: bool) -> None:
    """A second by Redis' clock, and then the first sweep of the workers, which sweep each second.

    No time is measured here, since all of them may stand still.
    """
    wait_until(lambda: not running(server), "an idle server")
    doomed = GatewayProcess(server.url, folder / "doomed.log")
    found: list[Event] = []

    def read() -> None:
        body = {**LONG, "stream": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{doomed.url}/v1/completions", json=body, timeout=60) as response,
        ):
            found.extend(events(response))

    # The reader does not know that it lost its stream before the connection breaks.
    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: running(server), "the request")
    (name,) = running(server)
    record, grace_ms = f"ps:{{letters.0}}:request:{name}", 1000
    assert load_settings({}).gateway.reader_grace_ms == grace_ms
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        # It is gone, too, if the gateway stood still for a grace: that is no other end.
        readers, ends = "ps:{letters.0}:readers", list[float]()
        wait_until(lambda: client.zscore(readers, name), "the first grace")
        first = client.zscore(readers, name)
        if beats:
            wait_until(lambda: client.zscore(readers, name) != first, "a later heartbeat")
        doomed.kill()

        def has_ended() -> bool:
            with client.pipeline(transaction=True) as reads:
                reads.hget(record, "state").zscore(readers, name).time()
                reads.hmget("ps:{letters.0}:sweep", "swept_at", "readers_spared_until")
                state, end, (now_s, now_us), (swept, spared) = reads.execute()
            if state == "cancelled":
                return True
            ends.append(end)
            assert end <= now_s * 1000 + now_us / 1000 + grace_ms
            # A sweep at that time or later would have ended it, but for what follows an outage.
            assert float(swept) < max(end, float(spared or 0))
            return False

        wait_until(has_ended, "cancelled")
        assert client.hget(record, "reason") == "disconnected"
        if ends:
            assert float(client.hget(record, "ended_at") or 0) >= ends[-1]
    reader.join(60)


def test_a_gateway_that_ends_says_where_to_go_on(
    gateway: GatewayProcess, server: EmbeddedRedis, folder: Path
) -> None:
    ending = GatewayProcess(server.url, folder / "ending.log", gateway__drain_timeout_s=0.2)
    body = {**LONG, "max_tokens": 1500, "stream": True}
    url = "/v1/completions"
    headers = {"idempotency-key": "moved"}
    with httpx.stream("POST", ending.url + url, json=body, headers=headers, timeout=60) as response:
        found = []
        for event in events(response):
            found.append(event)
            if len(found) == 1:
                ending.process.send_signal(signal.SIGTERM)
    assert ending.process.wait(60) == 0
    *seen, last = found
    assert last.data["error"]["code"] == "gateway_shutdown"
    index = seen[-1].id
    assert f"/v1/streams/{seen[0].data['id']}?from={index}" in last.data["error"]["message"]
    path = f"{gateway.url}/v1/streams/{seen[0].data['id']}"
    with httpx.stream("GET", path, params={"from": index}, timeout=60) as response:
        rest = list(events(response))
    assert len("".join(event.text for event in [*seen, *rest])) == 1500


def test_who_is_sent_away_has_time_to_come_back(server: EmbeddedRedis, folder: Path) -> None:
    """No worker looks after this model, so that what is written of its readers stays as it is."""
    ending = GatewayProcess(
        server.url,
        folder / "sending-away.log",
        gateway__drain_timeout_s=0.2,
        gateway__keep_alive_s=0.4,
        gateway__extra_models="nobody",
    )
    body = {**LONG, "model": "nobody", "stream": True}
    url = f"{ending.url}/v1/completions"
    with redis.Redis.from_url(server.url) as client:
        before_ms = client.time()[0] * 1000
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            ending.process.send_signal(signal.SIGTERM)
            (last,) = events(response)
        assert ending.process.wait(60) == 0
        message = last.data["error"]["message"]
        name = response.headers["x-request-id"]
        assert f"/v1/streams/{name}?from=0 at another one within 10 s" in message
        assert client.zscore("ps:{nobody.0}:readers", name) >= before_ms + 10_000


def test_a_slow_reader_takes_no_memory_and_loses_nothing(
    gateway: GatewayProcess, server: EmbeddedRedis
) -> None:
    body = {**LONG, "prompt": "slow", "max_tokens": 1500, "n": 16, "stream": True}
    data = json.dumps(body).encode()
    wait_until(lambda: not running(server), "an idle server")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
        head += b"idempotency-key: slow\r\nconnection: close\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        wait_until(lambda: running(server), "the request")
        before = memory_kb(gateway)
        wait_until(lambda: not running(server), "its end", 100)
        grown = memory_kb(gateway) - before
        received = b""
        while part := connection.recv(1 << 20):
            received += part
    assert b"data: [DONE]" in received[-100:]
    assert sum(map(len, re.findall(rb'"text":"([a-z]*)"', received))) == 16 * 1500
    assert grown < 20_000


def memory_kb(gateway: GatewayProcess) -> int:
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])
