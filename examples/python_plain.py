"""penstock without penstock: redis-py, and nothing of penstock's.

python examples/python_plain.py "The list type"

The server is that of REDIS_URL. With TENANT=acme it uses that tenant's own ingress stream, as a
client must that an ACL confines. docs/ingress.md is the table of fields.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid

import redis

PREFIX = f"ps:{{{os.environ.get('SHARD', 'demo.0')}}}:"
TENANT = os.environ.get("TENANT")


def ask(server: redis.Redis, prompt: str, **fields: str | int | float) -> str:
    """Hand a request in; returns its id. Repeated until it is certain: the id makes it run once."""
    id = (f"{TENANT}." if TENANT else "") + uuid.uuid4().hex
    ingress = PREFIX + (f"ingress:{TENANT}" if TENANT else "ingress")
    while True:
        try:
            server.xadd(ingress, {"id": id, "prompt": prompt, "answer": "json", **fields})
            return id
        except (redis.ConnectionError, redis.TimeoutError) as error:
            print(f"{error}; trying again", file=sys.stderr)
            time.sleep(1)


def read(server: redis.Redis, id: str) -> dict[str, object]:
    """Print the text as it comes; returns the end."""
    last = "0-0"  # whoever keeps this can leave, and come back
    while True:
        try:
            streams = server.xread({f"{PREFIX}log:{id}": last}, block=2000)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            print(f"{error}; trying again", file=sys.stderr)
            time.sleep(1)
            continue
        for entry, fields in streams[0][1] if streams else []:
            last = entry
            event = json.loads(fields.get("chunk") or fields["end"])
            if "end" in event:
                return dict(event)
            print(event["text"], end="", flush=True)


def main() -> None:
    url = os.environ.get("REDIS_URL", "redis://localhost:6379")
    prompt = sys.argv[1] if len(sys.argv) > 1 else "The list type"
    with redis.Redis.from_url(url, decode_responses=True, protocol=2) as server:
        end = read(server, ask(server, prompt, max_tokens=64, lane="critical"))
    print()
    print(f"{end['state']} ({end['reason']}) {end['message']}", file=sys.stderr)
    sys.exit(0 if end["state"] == "completed" else 1)


if __name__ == "__main__":
    main()
