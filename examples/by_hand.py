"""The wire protocol without penstock: only a Redis client, a msgpack library and submit.lua.

python examples/by_hand.py

The server is that of REDIS_URL, or of the argument.

Written to be translated into other languages; docs/protocol.md explains every step.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sys
import uuid
import zlib
from pathlib import Path
from typing import Any

import msgpack
import redis

SCRIPTS = Path(__file__).parent.parent / "shared" / "scripts" / "lua"
PREFIX = "ps:{demo.0}:"


def read_script(path: Path) -> str:
    """A script with its include lines replaced by the files they name."""

    def include(line: re.Match[str]) -> str:
        return read_script(SCRIPTS / line[1])

    return re.sub(r"^--@include (\S+)$", include, path.read_text("utf-8"), flags=re.MULTILINE)


def submit(server: redis.Redis, text: str, max_tokens: int) -> str:
    id, lane, tenant = uuid.uuid4().hex, "normal", "default"
    payload = msgpack.packb({"v": 1, "id": id, "prompt": text, "max_tokens": max_tokens})
    cost = -(-len(text.encode()) // 4) + max_tokens
    keys = [
        PREFIX + name for name in (
            f"request:{id}", f"log:{id}", f"queue:{lane}:{tenant}", f"tenants:{lane}",
            "lanes", "virtual_time", "deadlines", "counters", "bell",
        )
    ]  # fmt: skip
    arguments: list[Any] = [
        id, lane, tenant, payload, hashlib.sha256(payload).digest()[:16],
        cost, max_tokens, 600_000, 0, 600_000, 10_000, 20_000_000, 268_435_456, 0, 100,
        "", "", "", "",
    ]  # fmt: skip
    # redis-py sends EVALSHA, and the whole script if the server does not know it yet.
    script = server.register_script(read_script(SCRIPTS / "submit.lua"))
    reply = script(keys, arguments)
    if reply[0] not in (b"ok", b"dup"):
        sys.exit(f"refused: {reply}")
    return id


def read(server: redis.Redis, id: str) -> None:
    """Print tokens exactly once, in order, whatever the channel loses or repeats."""
    index = digest = 0
    channel: Any = server.pubsub()  # type: ignore[no-untyped-call]
    channel.subscribe(f"{PREFIX}events:{id}")
    look_into_log = True  # what was published before the subscription stood is only there
    while True:
        packed: list[bytes] = []
        if not look_into_log:
            message = channel.get_message(timeout=1.0)
            if message is None:
                look_into_log = True  # a second of silence: ask the log whether it was one
            elif message["type"] == "subscribe":
                look_into_log = True  # subscribed (again): what came before is only in the log
            else:
                packed = [message["data"]]
        if look_into_log:
            look_into_log = False
            entries: Any = server.xrange(f"{PREFIX}log:{id}", f"{index}-0", "+")
            packed = [value for _, fields in entries for value in fields.values()]
        for event in map(msgpack.unpackb, packed):
            if event[0] == -1:
                _, n, state, reason, message_text, usage = event[:6]
                if n == index:
                    print(f"\n{state} ({reason}) after {n} tokens {message_text}\n{usage}")
                    return
                look_into_log = True
                continue
            start, ids, text, expected = event[:4]
            if start + len(ids) <= index:
                continue  # known already
            if start > index:
                look_into_log = True  # a gap: the log has what is missing
                continue
            known = index - start  # more than 0 if it is the one chunk of a compact log
            if known:
                text = text.encode()[sum(event[5][:known]) :].decode()
                ids = ids[known:]
            digest = zlib.crc32(struct.pack(f"<{len(ids)}I", *ids), digest)
            assert digest == expected, "these are not the tokens the worker published"
            print(text, end="", flush=True)
            index += len(ids)


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else os.environ["REDIS_URL"]
    with redis.Redis.from_url(url) as connection:
        read(connection, submit(connection, "The list type", 48))
