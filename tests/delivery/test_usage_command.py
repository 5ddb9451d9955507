"""``penstock usage`` sums the ledgers of all shards, and says what it was asked wrongly."""

from __future__ import annotations

import csv
import datetime
import io
import json

import pytest
from redis import Redis

from penstock.producer.cli import main
from penstock.shared.keys import Keys
from penstock.shared.scripts.usage_ledger import day_number

MONDAY = datetime.date(2026, 11, 2)


@pytest.fixture
def at(redis_url: str) -> list[str]:
    """Two shards of a model and one of another, over two days."""
    with Redis.from_url(redis_url) as redis:
        for model, shard, day, rows in (
            ("demo", 0, 0, {"normal completed acme": "2 10 4 20 6 8 1500000"}),
            ("demo", 0, 1, {"normal cancelled acme": "1 5 0 1 0 2 7", "rows": "1"}),
            ("demo", 1, 0, {"batch completed acme": "1 1 0 1 0 1 1"}),
            ("big/llama.3", 0, 1, {"critical completed two words": "1 7 0 7 0 0 0"}),
            ("demo", 0, 1, {"broken": "1 2 3", "normal completed": "1 1 1 1 1 1 1"}),
        ):
            key = Keys(model, shard).usage(day_number(MONDAY) + day)
            redis.hset(key, mapping=rows)
    return ["--redis", redis_url, "--from", "2026-11-02", "--to", "2026-11-03"]


def usage(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["usage", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_json_sums_over_shards_days_and_states(
    at: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    facts = json.loads(usage(capsys, *at, "--json"))
    assert facts["by"] == ["tenant", "model"]
    acme, words = facts["usage"]
    assert acme == {
        "tenant": "acme", "model": "demo", "requests": 4, "prompt_tokens": 16, "cached_tokens": 4,
        "output_tokens": 22, "drafted_tokens": 6, "queue_ms": 11, "device_us": 1_500_008,
    }  # fmt: skip
    assert (words["tenant"], words["model"], words["requests"]) == ("two words", "big/llama.3", 1)


def test_csv_has_a_line_per_group(at: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = usage(capsys, *at, "--csv", "--by", "day,state", "--model", "demo")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["day"], row["state"], row["requests"]) for row in rows] == [
        ("2026-11-02", "completed", "3"),
        ("2026-11-03", "cancelled", "1"),
    ]


def test_the_table_has_a_sum(at: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = usage(capsys, *at)
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert ["all", "5", "23", "4", "29", "6", "0.0", "1.5"] in lines


def test_one_tenant_and_one_day(at: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*at[:4], "--to", "2026-11-02", "--tenant", "acme", "--by", "tenant", "--json"]
    (line,) = json.loads(usage(capsys, *arguments))["usage"]
    assert line["requests"] == 3
    nobody = [*at, "--tenant", "nobody"]
    assert usage(capsys, *nobody) == "no usage\n"
    assert usage(capsys, *at[:2]) != ""  # the default is the last 30 days


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--by", "colour"], "by"),
        (["--by", "day,day"], "by"),
        (["--from", "2026-13-01"], "from"),
        (["--to", "2020-01-01"], "to"),
        (["--from", "1900-01-01"], "to"),
    ],
)
def test_wrong_questions(
    at: list[str], wrong: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", *at, *wrong]) == 2
    assert f"error: {named}" in capsys.readouterr().err
