"""Access to a running gateway: who gets in, what is answered, and what a dead gateway leaves."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from gateway.rig import GatewayProcess, trickle
from waiting import wait_until

from penstock.producer.cli import main
from penstock.shared.local.embedded import EmbeddedRedis

LEASE_MS = 4000

LAX = {"_strict_response_validation": False}
"""OpenAI's own type of a completion's chunk knows no reason that is not known yet."""


class Keys:
    """``penstock keys`` on the module's server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
        capsys.readouterr()
        assert main(["keys", *words, "--json", "--redis", self.url]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    def create(self, capsys: pytest.CaptureFixture[str], tenant: str, *flags: str) -> str:
        return str(self.run(capsys, "create", "--tenant", tenant, *flags)["secret"])


@pytest.fixture(scope="module")
def keys(server: EmbeddedRedis) -> Keys:
    return Keys(server.url)


@pytest.fixture(scope="module")
def locked(server: EmbeddedRedis, folder: Path, synthetic_worker: None) -> Iterator[GatewayProcess]:
    """A gateway on a server with a key, so that it lets in nobody without one."""
    assert main(["keys", "create", "--tenant", "first", "--json", "--redis", server.url]) == 0
    process = GatewayProcess(
        server.url, folder / "locked.log", gateway__admission_lease_ms=LEASE_MS
    )
    yield process
    process.kill()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    values = {"model": "letters", "prompt": "abc", "max_tokens": 4}
    return client.completions.with_raw_response.create(**(values | fields))


@pytest.mark.parametrize("key", ["none", "sk-penstock-wrong", "x" * 1000])
def test_nobody_gets_in_without_a_key(locked: GatewayProcess, key: str) -> None:
    with locked.client(api_key=key) as client, pytest.raises(openai.AuthenticationError) as caught:
        ask(client)
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.AuthenticationError), locked.client(api_key=key) as client:
        client.models.list()
    assert httpx.get(f"{locked.url}/v1/usage", timeout=60).status_code == 401
    assert httpx.get(f"{locked.url}/health", timeout=60).status_code == 200


def test_nobody_holds_a_connection_without_a_key(locked: GatewayProcess) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
            b"content-length: 1000000\r\n\r\n"
        )
        assert trickle(connection).startswith(b"HTTP/1.1 401 ")


def test_who_has_a_key_may_call_the_gateway_by_any_name(
    locked: GatewayProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = {"host": "api.example", "authorization": f"Bearer {keys.create(capsys, 'acme')}"}
    answer = httpx.get(f"{locked.url}/v1/models", headers=headers, timeout=60)
    assert answer.status_code == 200


def test_models_and_lanes_of_a_key(
    locked: GatewayProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = keys.create(capsys, "acme", "--model", "other", "--lane", "batch")
    with locked.client(api_key=secret) as client:
        assert list(client.models.list()) == []
        with pytest.raises(openai.PermissionDeniedError) as caught:
            ask(client)
        assert caught.value.param == "model"
    secret = keys.create(capsys, "acme", "--lane", "batch")
    with locked.client(api_key=secret) as client:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            ask(client)
        assert caught.value.param == "service_tier"


def test_requests_per_minute_and_what_the_headers_say(
    locked: GatewayProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = keys.create(
        capsys, "acme", "--requests-per-minute", "2", "--tokens-per-minute", "1000"
    )
    with locked.client(api_key=secret) as client:
        headers = ask(client).headers
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert headers["x-ratelimit-limit-tokens"] == "1000"
        assert headers["x-ratelimit-reset-requests"].endswith("ms")
        assert ask(client).headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client)
    assert caught.value.code == "rate_limit_exceeded"
    assert 50 <= int(caught.value.response.headers["retry-after"]) <= 61


def test_a_budget_is_settled_with_what_was_used(
    locked: GatewayProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is estimated at over a half of the budget, and uses a fraction of that."""
    secret = keys.create(capsys, "acme", "--tokens-per-day", "150")
    with locked.client(api_key=secret) as client:
        for _ in range(3):
            answer = ask(client, max_tokens=100, stop=list("etaoin")).parse()
            assert answer.usage.total_tokens < 40
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client, max_tokens=200)
    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_revoked_key_ends_no_stream_and_begins_none(
    locked: GatewayProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    made = keys.run(capsys, "create", "--tenant", "acme")
    with locked.client(api_key=made["secret"], **LAX) as client:
        stream = client.completions.create(
            model="letters", prompt="abc", max_tokens=300, stream=True
        )
        first = next(stream)
        keys.run(capsys, "revoke", made["id"])
        with pytest.raises(openai.AuthenticationError):
            ask(client)
        chunks = [first, *stream]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_killed_gateway_gives_its_places_back(
    server: EmbeddedRedis, folder: Path, locked: GatewayProcess, keys: Keys,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    secret = keys.create(capsys, "acme", "--concurrent", "1")
    dying = GatewayProcess(server.url, folder / "dying.log", gateway__admission_lease_ms=LEASE_MS)
    with dying.client(api_key=secret, **LAX) as one, locked.client(api_key=secret) as other:
        stream = one.completions.create(
            model="letters", prompt="abc", max_tokens=100_000, stream=True
        )
        next(stream)
        with pytest.raises(openai.RateLimitError) as caught:
            ask(other)
        assert caught.value.response.headers["retry-after"] == "1"
        dying.kill()

        def is_admitted() -> bool:
            try:
                ask(other)
            except openai.RateLimitError:
                return False
            return True

        wait_until(is_admitted, "the place of the dead gateway is free")
        ask(other)  # and that one's place is given back at its end


def test_what_goes_on_without_its_gateway_counts_and_is_settled(
    server: EmbeddedRedis, folder: Path, locked: GatewayProcess, keys: Keys,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """After a graceful end, too; and its estimate of the day's tokens becomes what it used."""
    made = keys.run(
        capsys, "create", "--tenant", "acme", "--concurrent", "1", "--tokens-per-day", "100100"
    )
    headers = {"authorization": f"Bearer {made['secret']}"}
    ending = GatewayProcess(server.url, folder / "ending.log", gateway__admission_lease_ms=LEASE_MS)
    body = {"model": "letters", "input": "abc", "max_output_tokens": 100_000, "background": True}
    answer = httpx.post(f"{ending.url}/v1/responses", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert ending.terminate() == 0
    leases = f"ps:{{gateway}}:leases:{made['id']}"
    with (
        redis.Redis.from_url(server.url) as client,
        locked.client(api_key=made["secret"]) as other,
    ):
        ((lease, lapses_at),) = client.zrange(leases, 0, -1, withscores=True)

        def is_taken_over() -> bool:
            with pytest.raises(openai.RateLimitError):
                ask(other)
            return bool(client.zscore(leases, lease) > lapses_at)

        wait_until(is_taken_over, "another gateway looks after the request")
        with pytest.raises(openai.RateLimitError):
            ask(other)
        url = f"{locked.url}/v1/responses/{answer.json()['id']}/cancel"
        assert httpx.post(url, headers=headers, timeout=60).status_code == 200
        wait_until(lambda: not client.zcard(leases), "it is settled")
        assert ask(other, max_tokens=50_000, stop=list("etaoin")).parse()


def test_usage_is_the_tenants_own(
    locked: GatewayProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, boss = keys.create(capsys, "mine"), keys.create(capsys, "boss", "--admin")
    for secret in (mine, keys.create(capsys, "neighbour")):
        with locked.client(api_key=secret) as client:
            ask(client)

    def usage(secret: str, query: str = "") -> Any:
        headers = {"authorization": f"Bearer {secret}"}
        return httpx.get(f"{locked.url}/v1/usage?{query}", headers=headers, timeout=60)

    (line,) = usage(mine, "by=model").json()["data"]
    assert (line["model"], line["requests"], line["output_tokens"]) == ("letters", 1, 4)
    refused = usage(mine, "tenant=neighbour")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tenant")
    rows = usage(boss, "by=tenant").json()["data"]
    assert {"neighbour", "mine"} <= {row["tenant"] for row in rows}
    assert usage(boss, "to=0001-01-01").json()["data"] == []
    refused_queries = (
        "by=colour", "from=yesterday", "colour=red", "from=2026-01-02&to=2026-01-01", "format=xml",
    )  # fmt: skip
    for wrong in refused_queries:
        assert usage(boss, wrong).status_code == 400, wrong


def test_usage_is_not_searched_for_at_every_call(
    locked: GatewayProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = {"authorization": f"Bearer {keys.create(capsys, 'curious')}"}
    with redis.Redis.from_url(keys.url) as client:

        def scans() -> int:
            return int(client.info("commandstats").get("cmdstat_scan", {}).get("calls", 0))

        before, connections, began = scans(), connections_of(client), time.monotonic()
        for _ in range(20):
            assert httpx.get(f"{locked.url}/v1/usage", headers=headers, timeout=60).is_success
        # A look counts for two seconds; all this takes a fraction of one, but may stand still.
        assert scans() - before <= 1 + (time.monotonic() - began) / 2
        assert connections_of(client) - connections < 20


def connections_of(client: redis.Redis) -> int:
    return int(client.info("stats")["total_connections_received"])


def test_usage_as_csv_is_what_the_command_writes(
    locked: GatewayProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = keys.create(capsys, "spreadsheet")
    with locked.client(api_key=secret) as client:
        ask(client)
    answer = httpx.get(
        f"{locked.url}/v1/usage?format=csv&by=tenant,model,state",
        headers={"authorization": f"Bearer {secret}"}, timeout=60,
    )  # fmt: skip
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/csv")
    capsys.readouterr()
    words = ["usage", "--csv", "--by", "tenant,model,state", "--tenant", "spreadsheet"]
    assert main([*words, "--redis", keys.url]) == 0
    assert answer.text == capsys.readouterr().out
    names, values = (line.split(",") for line in answer.text.splitlines())
    line = dict(zip(names, values, strict=True))
    assert line["tenant"] == "spreadsheet"
    assert (line["state"], line["requests"], line["output_tokens"]) == ("completed", "1", "4")


def test_keys_are_listed_without_secrets(
    keys: Keys, locked: GatewayProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    made = keys.run(capsys, "create", "--tenant", "acme", "--label", "ci", "--expires", "90d")
    rotated = keys.run(capsys, "rotate", made["id"], "--grace", "1h")
    assert rotated["id"] == made["id"]
    with locked.client(api_key=rotated["secret"]) as client:
        ask(client)
    with locked.client(api_key=made["secret"]) as client:
        ask(client)
    (listed,) = [k for k in keys.run(capsys, "list")["keys"] if k["id"] == made["id"]]
    assert (listed["tenant"], listed["label"], listed["state"]) == ("acme", "ci", "in force")
    assert "secret" not in listed
    keys.run(capsys, "revoke", made["id"])
    assert main(["keys", "list", "--redis", keys.url]) == 0
    assert made["id"] in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["create", "--tenant", "two words"],
        ["create", "--tenant", "t", "--expires", "soon"],
        ["create", "--tenant", "t", "--concurrent", "-1"],
        ["create", "--tenant", "t", "--model", "{}"],
        ["revoke", "key-unknown"],
        ["rotate", "key-unknown"],
    ],
)
def test_wrong_words(keys: Keys, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", *wrong, "--redis", keys.url]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_an_open_address_needs_a_key(
    folder: Path, keys: Keys, locked: GatewayProcess, redis_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["gateway", "--host", "0.0.0.0", "--port", "0", "--redis", redis_url]) == 2
    assert "API keys" in capsys.readouterr().err
