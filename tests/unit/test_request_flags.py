"""The flags of ``penstock submit`` are the declared request options, read as declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.producer.cli.request_flags import read_request_options, with_request_options
from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.fields.collection_types import Biases
from penstock.shared.protocol.request import REQUEST_OPTIONS, Request


def submitted(*arguments: str) -> dict[str, Any]:
    """The fields that these arguments give."""
    found: dict[str, Any] = {}

    @with_request_options
    def command(prompt: str, chat: bool = False, json: bool = False, **options: Any) -> None:
        found.update(read_request_options(options))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["x", *arguments], catch_exceptions=True)
    if isinstance(result.exception, InvalidRequest):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found


def test_every_option_has_a_flag() -> None:
    given = {
        "max_tokens": 8, "temperature": 0.5, "seed": 7, "ignore_eos": True, "stop": ["a", "[b]"],
        "stop_token_ids": [1, 2], "logit_bias": {"42": -1.5}, "n": 2, "early_stopping": "never",
        "beam_width": 2, "lane": "batch", "json_schema": '{"type":"integer"}',
    }  # fmt: skip
    arguments = [
        "--max-tokens", "8", "--temperature", "5e-1", "--seed", "7", "--ignore-eos", "--stop", "a",
        "--stop", "[b]", "--stop-token-ids", "[1,2]", "--logit-bias", '{"42":-1.5}', "-n", "2",
        "--early-stopping", "never", "--beam-width", "2", "--lane", "batch",
        "--json-schema", '{"type":"integer"}',
    ]  # fmt: skip
    assert submitted(*arguments) == given
    assert submitted() == {}
    forms = {"boolean": [], "list of integers": ["[1]"], Biases.wire: ["{}"]}
    for item in REQUEST_OPTIONS:
        negative = "no-" if item.default is True else ""
        flag = f"--{negative}{item.name.replace('_', '-')}"
        assert submitted(flag, *forms.get(item.type.wire, ["1"])).keys() == {item.name}


def test_flags_without_values_are_requests() -> None:
    Request.build(id="a", prompt="x", **submitted("--early-stopping", "false", "--top-k", "0"))


def test_a_text_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "grammar.lark"
    file.write_text('start: "ä"', "utf-8")
    assert submitted("--grammar", f"@{file}") == {"grammar": 'start: "ä"'}
    with pytest.raises(InvalidRequest, match=r"^regex: got '@/none'; allowed: .*No such file"):
        submitted("--regex", "@/none")


@pytest.mark.parametrize("flag", ["--max-tokens", "--temperature", "--stop-token-ids"])
def test_a_wrong_form_is_refused_by_field(flag: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{flag[2:].replace('-', '_')}: got 'many'"):
        submitted(flag, "many")
