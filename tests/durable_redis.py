"""A Redis server that comes back with its data after it was killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import redis
from waiting import wait_until

from penstock.shared.local.children import spawn_bound
from penstock.shared.local.server_binary import find_server


def start_durable_redis(port: int, folder: Path) -> subprocess.Popen[bytes]:
    """A server of the test's own that comes back on the same port with the same data.

    ``always``, since with ``everysec`` Redis puts off its writes while a slow disk still syncs the
    last ones, and a kill then loses what it has acknowledged meanwhile.
    """
    options = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync always --dir {folder}"
    argv = [find_server().path, "--save", "", *options.split()]
    process = spawn_bound(argv, stdout=subprocess.DEVNULL)
    with redis.Redis(port=port) as client:
        wait_until(lambda: _answers(client), "Redis is up")
    return process


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:  # also: still loading
        return False
