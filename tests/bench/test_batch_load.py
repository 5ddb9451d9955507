"""``penstock bench batches``, on a small load."""

from __future__ import annotations

import json

import pytest
from bench.commands import bench


@pytest.mark.slow
def test_a_batch_beside_chat_is_compared_with_the_engine_alone() -> None:
    done = bench("batches", "--lines", "40", "--tokens", "3", "--chat-seconds", "2", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["chat_alone.requests"] > 0
    assert figures["chat_beside_batch.requests"] > 0
    assert figures["batch_tokens_per_s"] > 0
    assert figures["offline_tokens_per_s"] > 0
