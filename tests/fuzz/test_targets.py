"""A short run of the targets of ``make fuzz`` that need no model, and what they once found."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fuzz.driver import TARGETS
from fuzz.targets import Checkpoints, Constraints, SettingsTrees, Target

CASES = 300


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    made = TARGETS[request.param]()
    made.open()
    yield made
    made.close()


SHORT = [name for name in TARGETS if name not in ("worker", "checkpoints", "constraints")]


@pytest.mark.parametrize("target", SHORT, indirect=True)
def test_short_run(request: pytest.FixtureRequest, target: Target) -> None:
    name = request.node.callspec.params["target"]
    cases = [(n, target.case(random.Random(f"{name}:{n}"))) for n in range(CASES)]
    target.run_batch(cases, [0])


@pytest.mark.parametrize(
    ("flags", "environment", "lines"),
    [
        ({"\x1b[2Jredis.url": 1}, {}, ""),
        ({}, {"PENSTOCK_\u202e__X": "1"}, ""),
        ({}, {}, '"\\u001b" = 1\n'),
        ({}, {}, '[queue]\n"\\u202e" = 1\n'),
        ({"engine.threads": 10**3000}, {}, ""),
        ({"redis.url": "redis://a", "redis.password_file": 2**31}, {}, ""),
        ({"redis.url": 1, "redis.password_file": "x"}, {}, ""),
    ],
    ids=["flag", "variable", "section", "name", "digits", "a number for a file", "for a url"],
)
def test_settings_that_once_escaped(
    flags: dict[str, object], environment: dict[str, str], lines: str
) -> None:
    target = SettingsTrees()
    target.open()
    target.run((flags, environment, lines))
    target.close()


def test_a_model_type_that_once_was_logged_raw() -> None:
    target = Checkpoints()
    target.open()
    target.run(("config.json", '{"model_type": "\u202e\u001b"}'.encode()))
    target.close()


def test_constraints_that_once_were_quoted_raw() -> None:
    target = Constraints()
    target.open()
    target.run(("regex", "(a|bC\x00*[^e]{2,3e]"))
    target.run(("grammar", "start: a (\x12\x1a"))
    target.run(("json_schema", '{"properties": {"a": {"type": "string", "pattern": {"\x7f": 1}}}}'))
    target.sandbox.check("choice", ["\xf5\x7f", "\x00", "\U0010fffe"])  # once refused
    target.close()
