"""A worker without a model: claims like a real one and answers ``<0><1>...`` to everything.

Run as a program, as the demo runs its worker: ``python scripted_worker.py --ready-file PATH``.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio

from penstock.shared.keys import Keys
from penstock.shared.protocol.events import Chunk, End, Usage, rolling_digest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Reason
from penstock.shared.scripts.operations import Append, Operations
from penstock.shared.scripts.replies import read_statuses
from penstock.shared.settings import load_settings

LEASE_MS = 60_000
METRICS = """\
# TYPE penstock_step_sequences histogram
penstock_step_sequences_bucket{{le="1.0"}} 0
penstock_step_sequences_sum {sequences}
penstock_step_sequences_count {steps}
penstock_kv_blocks_used 7
penstock_kv_blocks_total 100
"""


@dataclass
class Running:
    request: Request
    epoch: int
    n: int = 0

    def next(self, failing: bool) -> Append:
        """One more token ``n``, and the end when ``max_tokens`` are there."""
        self.n += 1
        ids = tuple(range(self.n))
        chunk = Chunk(self.n - 1, ids[-1:], f"<{self.n - 1}>", rolling_digest(ids))
        item = {"id": self.request.id, "epoch": self.epoch, "start": self.n - 1, "num_tokens": 1}
        if self.n < self.request.options.max_tokens:
            return Append(**item, chunk=chunk.pack())  # type: ignore[arg-type]
        reason = Reason.ENGINE_ERROR if failing else Reason.LENGTH
        usage = Usage(prompt_tokens=3, output_tokens=self.n, queue_ms=1, ttft_ms=2, attempts=1)
        message = "as the test wished" if failing else ""
        end = End(n=self.n, reason=reason, message=message, usage=usage)
        return Append(**item, chunk=chunk.pack(), end=end.pack(), state=reason.state, reason=reason)  # type: ignore[arg-type]


async def serve(ready_file: Path, *, sequences: int, die_after: int | None) -> None:
    settings = load_settings()
    assert settings.redis.url is not None
    client = redis.asyncio.Redis.from_url(settings.redis.url)
    operations = Operations(client, Keys(settings.queue.model, settings.queue.shard))
    steps = Steps()
    facts = {"worker_id": "scripted-1", "pid": os.getpid(), "metrics_port": steps.serve()}
    part = ready_file.with_suffix(".part")
    part.write_text(json.dumps(facts))
    part.rename(ready_file)
    running: list[Running] = []
    while True:
        free = sequences - len(running)
        items = [one.next("fail" in str(one.request.prompt)) for one in running]
        claim = operations.claim(
            "scripted-1", lease_ms=LEASE_MS, requests=free, tokens=10_000, suspect_ok=True
        )
        append = operations.append("scripted-1", items, lease_ms=LEASE_MS)
        statuses, claimed = await operations.run([append, claim])
        alive = [status == 0 for status in read_statuses(statuses, len(items))]
        running = [
            one
            for one, item, ok in zip(running, items, alive, strict=True)
            if ok and not item.reason
        ]
        claims = operations.read_claim(claimed).claims if free else ()
        running += [Running(Request.unpack(one.payload), one.epoch) for one in claims]
        steps.count += bool(running)
        steps.sequences += len(running)
        if die_after is not None and steps.count > die_after:
            sys.exit("error: out of luck")
        await asyncio.sleep(0.002)


class Steps:
    """Counts steps and serves them as ``/metrics``."""

    count = 0
    sequences = 0

    def serve(self) -> int:
        steps = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                text = METRICS.format(sequences=steps.sequences, steps=steps.count)
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return int(server.server_address[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--die-after", type=int)
    given = parser.parse_args()
    if given.refuse:
        print("error: no such model", file=sys.stderr)
        sys.exit(2)
    asyncio.run(serve(given.ready_file, sequences=given.sequences, die_after=given.die_after))
