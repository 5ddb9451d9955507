"""The tokens of reasoning in what a batch has used."""

from __future__ import annotations

import json

from batches.conftest import client as client
from batches.conftest import drive, start
from batches.conftest import service as service
from batches.conftest import settings as settings

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.stores.records import BatchState
from penstock.producer.gateway.batch_files.batch_endpoints import batch_object

GRAMMAR = "start: <think> /[a-z]{8}/ </think> /[a-z]{5}/"


async def test_reasoning_is_counted_by_token(service: BatchService) -> None:
    """Of each choice the mark that begins to reason, and a token for each of the eight letters."""
    lines = b""
    for n in (1, 2):
        body = {
            "model": "caller", "messages": [{"role": "user", "content": "Why?"}], "n": n,
            "max_tokens": 40, "structured_outputs": {"grammar": GRAMMAR},
        }  # fmt: skip
        fields = {"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions"}
        lines += json.dumps({**fields, "body": body}).encode() + b"\n"
    batch = await drive(service, await start(service, lines, endpoint="/v1/chat/completions"))
    assert (batch.state, batch.completed, batch.failed) == (BatchState.COMPLETED, 2, 0)
    usage = batch_object(batch)["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3 * 9}
    assert 3 * (9 + 1 + 5) <= usage["output_tokens"] <= 3 * (9 + 1 + 5 + 1)
