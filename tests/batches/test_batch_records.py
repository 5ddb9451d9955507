"""What is decided before anything is computed: validation, and changes of the record."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from batches.conftest import completion_lines, drive, start, upload

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.lines.input_lines import parse_line
from penstock.producer.batches.lines.line_endpoints import LineRefused
from penstock.producer.batches.stores.batch_store import BatchChanged, UnknownBatch
from penstock.producer.batches.stores.file_store import UnknownFile
from penstock.producer.batches.stores.records import Batch, BatchState
from penstock.shared.errors import InvalidRequest


def line(**changes: Any) -> bytes:
    """A line that is right but for the changes; body's fields are given by ``body``."""
    body = {"model": "letters", "prompt": "x", **changes.pop("body", {})}
    fields = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps({**fields, **changes}).encode()


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (b'{"custom_id"', "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b"[" * 5000, "invalid_json_line"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint"),
        (line(custom_id="\ud800"), "invalid_text"),
        (line(body={"prompt": "\udcff"}), "invalid_text"),
        (line(body={"user": "\ud83d"}), "invalid_text"),
        (line(body={"\ud800": 1}), "invalid_text"),
        (line(url="\ud800"), "invalid_text"),
        (line(**{"\ud800": 1}), "unknown_parameter"),
        (line(custom_id="line 1"), "duplicate_custom_id"),
        (line(extra=1), "unknown_parameter"),
        (line(body={"model": "other"}), "mismatched_model"),
        (line(body={"stream": True}), "unsupported_parameter"),
        (line(body={"temperature": 99}), "invalid_value"),
    ],
)
async def test_malformed_line_is_named_and_nothing_is_computed(
    service: BatchService, broken: bytes, code: str
) -> None:
    data = completion_lines(3) + broken + b"\n"
    batch = await start(service, data)
    batch = await drive(service, batch)
    assert batch.state is BatchState.FAILED
    assert [(error.line, error.code) for error in batch.errors] == [(4, code)]
    assert batch.next_line == 0


def test_half_of_a_surrogate_pair_is_named_with_its_field_and_a_whole_one_is_text() -> None:
    with pytest.raises(LineRefused, match=r"body\.prompt\[1\]: has \\ud83d, half of") as refused:
        parse_line(line(body={"prompt": ["x", "\ud83d"]}), "/v1/completions")
    assert refused.value.param == "body.prompt[1]"
    whole = parse_line(line(custom_id="\U0001f600"), "/v1/completions")
    assert whole.custom_id == "\U0001f600"


async def test_text_that_has_no_bytes_is_refused_or_replaced(service: BatchService) -> None:
    """Shells hand over file names and arguments that are not UTF-8 as half surrogates."""
    file_id = await upload(service, completion_lines(1), filename="n\udcffght.jsonl")
    assert (await service.files.get(file_id)).filename == "n?ght.jsonl"
    good = {"input_file_id": file_id, "endpoint": "/v1/completions", "tenant": "tests"}
    for field, value in [("metadata", {"a": "\ud800"}), ("metadata", {"\udfff": ""}),
                         ("tenant", "\udcff"), ("endpoint", "\udcff")]:  # fmt: skip
        with pytest.raises(InvalidRequest, match=field):
            await service.create(**{**good, field: value})
    with pytest.raises(UnknownFile):
        await service.create(**{**good, "input_file_id": "\ud800"})
    with pytest.raises(UnknownBatch):
        await service.batches.get("\ud800")
    with pytest.raises(UnknownBatch):
        await service.batches.page("tests", after="\ud800")
    with pytest.raises(InvalidRequest, match="tenant"):
        await service.files.page("\udcff")


async def test_of_two_changes_of_one_version_one_is_refused(
    service: BatchService,
) -> None:
    batch = await start(service, completion_lines(1))
    changed = await service.batches.change(batch, batch.model_copy(update={"read_lines": 1}))
    with pytest.raises(BatchChanged):
        await service.batches.change(batch, batch)
    assert await service.batches.get(batch.id) == changed
    await asyncio.gather(*(service.batches.get(batch.id) for _ in range(8)))  # opens connections
    outcomes = await asyncio.gather(
        *(service.batches.change(changed, changed) for _ in range(8)), return_exceptions=True
    )
    assert sum(isinstance(outcome, Batch) for outcome in outcomes) == 1
    refused = [outcome for outcome in outcomes if not isinstance(outcome, Batch)]
    assert {type(outcome) for outcome in refused} == {BatchChanged}


async def test_one_job_at_a_time_waits_for_a_batch(service: BatchService) -> None:
    """Whoever looks each second would else queue a job each second, while all slots are taken."""
    batches, batch = service.batches, await start(service, completion_lines(1))
    assert batch.id in await batches.undriven()
    assert [await batches.may_queue(batch.id) for _ in range(3)] == [True, False, False]
    async with batches.drive(batch.id) as held:
        assert held
        assert batch.id not in await batches.undriven()
        async with batches.drive(batch.id) as held_twice:
            assert not held_twice
    assert batch.id in await batches.undriven()
    assert await batches.may_queue(batch.id)
