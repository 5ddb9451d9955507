"""Addresses of servers: what is refused before anything is sent, and what is never shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer import Producer
from penstock.shared.errors import ConfigurationError
from penstock.shared.redis.address import check_address, redact_url
from penstock.shared.redis.opening import open_client

GOOD = [
    "redis://127.0.0.1:6379/0",
    "redis://host",
    "redis://host/",
    "redis://host/15/",
    "redis://host?db=3",
    "redis://user:pass@[::1]:1/2?client_name=shop&protocol=3&socket_keepalive=yes",
    "rediss://a-b.example/1?ssl_cert_reqs=none&ssl_ca_certs=/etc/ca.pem",
    "unix:///run/redis.sock?db=1",
    "unix://user:pass@/run/redis.sock",
]
BAD = [
    ("localhost:6379", "must be redis://host:port/db"),
    ("http://host", "must be redis://host:port/db"),
    ("redis://", "must be redis://host:port/db"),
    ("redis://host:0", "must be redis://host:port/db"),
    ("redis://host:port", "must be redis://host:port/db"),
    ("unix://", "or unix:///path"),
    ("unix://run/redis.sock", "or unix:///path"),
    # redis-py would take database 0 for the first two, and 12 for the third.
    ("redis://host/abc", r"redis://host/abc cannot be used.*db is the database's number"),
    ("redis://host/-1", "db is the database's number"),
    ("redis://host/1/2", "db is the database's number"),
    ("redis://host?db=abc", "'db'"),
    ("redis://host?socket_timeout=soon", "'socket_timeout'"),
    ("redis://host?max_connections=0", "max_connections must be at least 1"),
    ("redis://host?protocol=9", "protocol must be either 2 or 3"),
    ("redis://host?timeuot=3", "no option timeuot; leave it out, or take one of client_name, db,"),
    ("redis://host?decode_responses=yes", "no option decode_responses"),
    ("redis://host?retry=3", "no option retry"),
    ("redis://host?ssl_keyfile=/key", "ssl_keyfile"),
    ("rediss://host?ssl_cert_reqs=perhaps", "perhaps"),
]


@pytest.mark.parametrize("url", GOOD)
def test_addresses_that_client_and_worker_take(url: str) -> None:
    assert Producer(url).keys.counters
    assert open_client(url, timeout_s=1).connection_pool


@pytest.mark.parametrize(("url", "why"), BAD)
def test_addresses_that_client_and_worker_refuse_alike(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as of_client:
        Producer(url)
    with pytest.raises(ConfigurationError) as of_worker:
        open_client(url, timeout_s=1)
    assert str(of_client.value) == str(of_worker.value)


@given(st.text(), st.text(min_size=1))
def test_redacting_drops_the_password_whatever_is_in_it(start: str, end: str) -> None:
    password = f"{start}Geheim{end}"
    assert "Geheim" not in redact_url(f"redis://user:{password}@host:6379/0")
    assert "Geheim" not in redact_url(f"redis://:{password}@host")
    assert "Geheim" not in redact_url(f"redis://host/0?password={password}")


@pytest.mark.parametrize("mark", ["/", "?", "#", "?x=1&", "#/", "/?", "@/"])
@pytest.mark.parametrize("start", ["", "1", "a"])
def test_a_refusal_says_nothing_of_a_password(start: str, mark: str) -> None:
    url = f"redis://user:{start}{mark}Geheim=1@host:6379/0"
    with pytest.raises(ValueError, match="must be redis://") as caught:
        check_address(url)
    assert "Geheim" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"address \*\*\* cannot be used") as refused:
        Producer(url)
    assert "Geheim" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "rediss://a-b.example/1",
        "unix:///run/redis.sock",
        "redis://[::1]:1",
    ],
)
def test_redacting_leaves_an_address_without_secrets_as_it_is(url: str) -> None:
    assert redact_url(url) == url
