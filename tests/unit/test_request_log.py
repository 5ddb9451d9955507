"""The log of requests that came to nothing is bounded, whatever they are."""

from __future__ import annotations

import logging

import pytest

from penstock.producer.gateway.monitoring.request_log import RequestLog

LOGGER = "penstock.gateway.requests"


def test_what_goes_well_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        log = RequestLog()
        log.note("GET", "/v1/models", 200, "req-1")
        log.note("GET", "/v1/models", 404, "req-2")
    assert caplog.messages == ["GET /v1/models 404 req-2"]


def test_a_line_is_one_line_of_bounded_length(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        RequestLog().note("POST", "/a\nINFO forged\x1b[2J" + "x" * 10_000, 499, "")
    (line,) = caplog.messages
    assert line.startswith(r"POST /a\nINFO forged\x1b[2Jxxx")
    assert line.endswith("xxx... 499 -")
    assert len(line) < 300


def test_a_flood_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 10.0
    log = RequestLog(lambda: now)
    with caplog.at_level(logging.INFO, LOGGER):
        for number in range(1000):
            log.note("GET", f"/{number}", 429, "req")
        now = 11.0
        log.note("GET", "/later", 429, "req")
    assert len(caplog.messages) == 52
    assert caplog.messages[-2:] == [
        "950 more requests were refused or left",
        "GET /later 429 req",
    ]
