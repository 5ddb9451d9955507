"""``penstock ingress``: which tenants have an ingress stream of their own."""

from __future__ import annotations

import json

import pytest
import redis

from penstock.producer.cli import main
from penstock.shared.keys import Keys


def test_add_list_remove(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--redis", redis_url, "--model", "m"]
    assert main(["ingress", "add", "acme", *at]) == 0
    assert main(["ingress", "add", "rival", "--json", *at]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "tenant": "rival",
        "stream": "ps:{m.0}:ingress:rival",
        "changed": True,
    }
    assert err == "ps:{m.0}:ingress:acme is read from now on\n"
    assert main(["ingress", "add", "acme", *at]) == 0
    assert "is read already" in capsys.readouterr().err
    with redis.Redis.from_url(redis_url) as client:
        assert client.smembers(Keys("m").ingress_tenants) == {b"acme", b"rival"}
    assert main(["ingress", "remove", "rival", *at]) == 0
    assert main(["ingress", "remove", "rival", *at]) == 0
    assert "was not read" in capsys.readouterr().err
    assert main(["ingress", "list", *at]) == 0
    assert capsys.readouterr().out == "acme\n"
    assert main(["ingress", "list", "--json", *at]) == 0
    assert json.loads(capsys.readouterr().out) == {"tenants": ["acme"]}


def test_a_name_that_is_none(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ingress", "add", "a.b", "--redis", redis_url]) == 2
    assert "no dot" in capsys.readouterr().err


def test_a_tenant_too_many(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.sadd(Keys("demo").ingress_tenants, *(f"t{i}" for i in range(1000)))
    assert main(["ingress", "add", "acme", "--redis", redis_url]) == 2
    assert "1000 ingress tenants already" in capsys.readouterr().err


def test_a_key_of_another_type(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set(Keys("demo").ingress_tenants, "x")
    assert main(["ingress", "list", "--redis", redis_url]) == 2
    assert "WRONGTYPE" in capsys.readouterr().err
