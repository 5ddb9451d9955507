"""Storms over other servers: TLS with ACL users, a cluster, a failover by Sentinel.

They print what they counted (``pytest -s``). ``STORM_SECONDS=240`` makes each last so long.
"""

from __future__ import annotations

import json
import os
from typing import Any, Self

import pytest
from certificates import acl_rules, self_signed, speaks_tls
from faults.replicated import ClusterServer, SentinelServer

from penstock.shared.local.server_binary import find_server
from penstock.tools.chaos import ALL_FAULTS, Fault, Storm, StormOptions
from penstock.tools.chaos.environment import OpenServer
from penstock.tools.chaos.faults.storm_server import OwnServer
from penstock.tools.chaos.storm.storm_report import report_storm

SECONDS = float(os.environ.get("STORM_SECONDS", "30"))
SEED = int(os.environ.get("STORM_SEED", "1"))
PACE = float(os.environ.get("STORM_PACE", "1"))

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(SECONDS + 400)]


class TlsServer(OwnServer):
    """It speaks TLS alone, and knows an operator and a worker; the user ``default`` is off."""

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True)
        certificate, key = self_signed(self._folder)
        place = f"127.0.0.1:{self.port}/0?ssl_ca_certs={certificate}"
        self.url = f"rediss://boss:boss-pw@{place}"
        self.storm_url = f"rediss://worker:worker-pw@{place}"
        users = self._folder / "users.acl"
        users.write_text(
            acl_rules("default.acl") + acl_rules("operator.acl", "boss", "boss-pw", "-")
            + acl_rules("worker.acl", "worker", "worker-pw", "-", "chaos.0")
        )  # fmt: skip
        self.lines = [
            "port 0", f"tls-port {self.port}", "tls-auth-clients no", f"aclfile {users}",
            f"tls-cert-file {certificate}", f"tls-key-file {key}",
        ]  # fmt: skip
        return await super().__aenter__()


PAST_THE_PROXIES = frozenset({Fault.KILL, Fault.STOP, Fault.DRAIN, Fault.REDIS_KILL, Fault.FLUSH})
"""In a cluster clients find the node of their shard, and no proxy stands before it."""

SERVERS: dict[str, tuple[OpenServer, frozenset[Fault]]] = {
    "tls": (TlsServer, ALL_FAULTS),
    "cluster": (ClusterServer, PAST_THE_PROXIES),
    "sentinel": (SentinelServer, ALL_FAULTS),
}


async def storm(name: str, open_server: OpenServer, faults: frozenset[Fault]) -> dict[str, Any]:
    """Run one, and print its figures; fails if a promise did not hold."""
    options = StormOptions(seconds=SECONDS, seed=SEED, pace=PACE, faults=faults)
    result = await Storm(options, open_server=open_server).run()
    figures = report_storm(result).figures
    print(json.dumps({"server": name, **figures}))
    assert not result.findings.found, "\n".join(map(str, result.findings.violations))
    return figures


@pytest.mark.parametrize("name", SERVERS)
async def test_a_storm_over(name: str) -> None:
    if name == "tls" and not speaks_tls(find_server()):
        pytest.skip("the Redis server of this machine was built without TLS")
    figures = await storm(name, *SERVERS[name])
    least = ["worker_kills", "worker_stops", "redis_kills", "migrated", "script_flushes"]
    if Fault.CUT in SERVERS[name][1]:
        least += ["connection_resets", "replies_cut"]
    for what in least:
        assert figures[what] >= 1, what
