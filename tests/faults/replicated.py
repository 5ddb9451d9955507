"""Servers with replicas for storms: their primary is killed, and a replica takes over.

Replication is asynchronous, so a kill between a reply and its replication loses an acknowledged
write. What is promised then is another thing, and has tests of its own (``test_failover.py``). So
by default writes are held back just before a kill, until a replica has them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from penstock.shared.errors import RedisUnavailable
from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port
from penstock.shared.local.server_binary import find_server
from penstock.tools.chaos.faults.storm_server import (
    KillableServer,
    OwnServer,
    Server,
    through,
)
from penstock.tools.chaos.faults.tcp_proxy import Proxy

SLOTS = 16384
HIGHEST_PORT = 55_535
"""The cluster's bus takes a port 10,000 above."""


class ReplicatedServer(KillableServer):
    """A primary, its replica, and whatever makes one of the other.

    Attributes:
        primary: serves the shard now.
        replica: follows it.
        failovers_unasked: those that came without a kill.
    """

    primary: OwnServer
    replica: OwnServer

    def __init__(self, folder: Path, *, lossless: bool = True) -> None:
        super().__init__("redis://127.0.0.1:1/0")  # until it is started
        self.folder = folder
        self.lossless = lossless
        self.password = secrets.token_urlsafe(18)
        self.failovers_unasked = 0
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with self._stack:
            await self.open(self._stack)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def command(self, *words: str) -> Any:
        """Run one command on the primary."""
        return await self.primary.command(*words)

    async def kill_and_restart(self, pause_s: float) -> None:
        """Kill the primary; once the replica has taken over, the killed one follows it."""
        if (await self.primary.command("ROLE"))[0] != b"master":
            self.failovers_unasked += 1
            self.primary, self.replica = self.replica, self.primary
        if self.lossless:
            await self.primary.command("CLIENT", "PAUSE", "5000", "WRITE")
            await until(self.is_in_step, "the replica has every write")
        began = time.monotonic()
        self.primary.kill()
        self.primary, self.replica = self.replica, self.primary
        await until(self.is_promoted, "the replica takes over")
        self.note_outage(time.monotonic() - began)
        await asyncio.sleep(pause_s)
        await self.bring_back()
        await until(self.is_in_step, "the killed one follows")

    async def is_in_step(self) -> bool:
        """Whether the replica has what the primary had when this was asked."""
        role, offset, *_ = await self.primary.command("ROLE")
        assert role == b"master"
        facts = await self.replica.command("ROLE")
        return facts[0] == b"slave" and facts[3] == b"connected" and int(facts[4]) >= int(offset)

    async def node(self, name: str, *lines: str) -> OwnServer:
        """Start a server, which ends with this one."""
        own = ["repl-diskless-sync-delay 0", f"masterauth {self.password}", *lines]
        while True:
            server = OwnServer(self.folder / name, own, self.password)
            if server.port <= HIGHEST_PORT:
                break
        return await self._stack.enter_async_context(server)

    @abstractmethod
    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start everything."""

    @abstractmethod
    async def is_promoted(self) -> bool:
        """Whether clients find the new primary."""

    @abstractmethod
    async def bring_back(self) -> None:
        """Start the killed one again, as a replica."""


class ClusterServer(ReplicatedServer):
    """Three nodes that divide the slots, and a replica of the one that serves the shard.

    Clients are given the address of a node that does not serve it. What they are told there leads
    past the storm's proxies.
    """

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start four nodes, and make them a cluster."""
        options = "cluster-enabled yes", "cluster-node-timeout 3000"
        nodes = [await self.node(f"node-{i}", *options) for i in range(4)]
        for node in nodes[1:]:
            await nodes[0].command("CLUSTER", "MEET", "127.0.0.1", str(node.port))
        for i, node in enumerate(nodes[:3]):
            slots = range(SLOTS * i // 3, SLOTS * (i + 1) // 3)
            await node.command("CLUSTER", "ADDSLOTS", *map(str, slots))

        async def agree() -> bool:
            facts = [str(await node.command("CLUSTER", "INFO")) for node in nodes]
            return all("state:ok" in f and "known_nodes:4" in f for f in facts)

        async def replicates() -> bool:
            with contextlib.suppress(RedisUnavailable):  # it may not know that node yet
                await self.replica.command("CLUSTER", "REPLICATE", name)
                return True
            return False

        await until(agree, "a cluster")
        slot = int(await nodes[0].command("CLUSTER", "KEYSLOT", Keys("chaos").counters))
        at = slot * 3 // SLOTS
        self.primary, self.replica = nodes[at], nodes[3]
        name = (await self.primary.command("CLUSTER", "MYID")).decode()
        await until(replicates, "a replica")
        await until(self.is_in_step, "the replica follows")
        self._entrance = nodes[(at + 1) % 3]
        self.url = self.storm_url = self._entrance.url

    async def is_promoted(self) -> bool:
        """Whether the node that clients ask names the new primary as owner of the slot."""
        key = Keys("chaos").counters
        slot = int(await self._entrance.command("CLUSTER", "KEYSLOT", key))
        rows = await self._entrance.command("CLUSTER", "SLOTS")
        ports = [owner[1] for owner in owners(rows, slot)]
        state = str(await self.primary.command("CLUSTER", "INFO"))
        return ports == [self.primary.port] and "cluster_state:ok" in state

    async def bring_back(self) -> None:
        """Start it: the others tell it whom to follow."""
        await self.replica.start()


class SentinelServer(ReplicatedServer):
    """A primary, a replica, three Sentinels, and an address that leads where these say."""

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start servers, Sentinels and the address."""
        self.primary = await self.node("first")
        self.replica = await self.node("second", f"replicaof 127.0.0.1 {self.primary.port}")
        self.replica.lines.pop()  # this time only
        await until(self.is_in_step, "the replica follows")
        self._sentinels = [self._start_sentinel(i, stack) for i in range(3)]
        await until(self._agree, "three Sentinels")
        self._front = await stack.enter_async_context(Proxy("127.0.0.1", self.primary.port))
        self.url = self.storm_url = through(self.primary.url, self._front.port)
        follower = asyncio.create_task(self._follow())
        stack.callback(follower.cancel)

    def _start_sentinel(self, number: int, stack: contextlib.AsyncExitStack) -> Server:
        port, folder = free_port(), self.folder / f"sentinel-{number}"
        folder.mkdir(parents=True)
        (folder / "sentinel.conf").write_text(
            f"port {port}\nbind 127.0.0.1\n"
            f"sentinel monitor storm 127.0.0.1 {self.primary.port} 2\n"
            f"sentinel auth-pass storm {self.password}\n"
            "sentinel down-after-milliseconds storm 2000\n"
            "sentinel failover-timeout storm 3000\n"
        )
        words = [find_server().path, "sentinel.conf", "--sentinel"]
        with (folder / "sentinel.log").open("wb") as log:
            process = spawn_bound(words, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return Server(f"redis://127.0.0.1:{port}/0")

    async def _agree(self) -> bool:
        """Whether each knows the others and a sound replica."""
        try:
            for sentinel in self._sentinels:
                # Look at replicas more often; Redis 6.2 cannot.
                with contextlib.suppress(RedisUnavailable):
                    await sentinel.command("SENTINEL", "DEBUG", "INFO-PERIOD", "1000")
                await sentinel.command("SENTINEL", "CKQUORUM", "storm")
                (facts,) = await sentinel.command("SENTINEL", "REPLICAS", "storm")
                (others,) = {len(await sentinel.command("SENTINEL", "SENTINELS", "storm"))}
                words = [str(word) for word in flat(facts)]
                if others != 2 or "b'slave'" not in words or "b'ok'" not in words:
                    return False
        except (RedisUnavailable, ValueError):
            return False
        return True

    async def _primary_port(self) -> int:
        words = "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "storm"
        _, port = await self._sentinels[0].command(*words)
        return int(port)

    async def _follow(self) -> None:
        """Lead later connections to whom a Sentinel names."""
        while True:
            with contextlib.suppress(RedisUnavailable):
                self._front.lead_to("127.0.0.1", await self._primary_port())
            await asyncio.sleep(0.1)

    async def is_promoted(self) -> bool:
        """Whether the Sentinel that is asked names the new primary."""
        return await self._primary_port() == self.primary.port

    async def bring_back(self) -> None:
        """Start it as a replica: with an old configuration it would come as a primary."""
        await self.replica.start(f"replicaof 127.0.0.1 {self.primary.port}")
        await until(self._agree, "Sentinels that know the killed one again")


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Poll; whoever does not answer meanwhile is asked again.

    Raises:
        RedisUnavailable: it does not come true within two minutes.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(RedisUnavailable):
            if await condition():
                return
        await asyncio.sleep(0.05)
    raise RedisUnavailable(f"not within two minutes: {what}")


def flat(value: Any) -> list[Any]:
    """All that is in an answer, names of fields, too."""
    if isinstance(value, dict):
        return [part for pair in value.items() for one in pair for part in flat(one)]
    if isinstance(value, list | tuple | set):
        return [part for one in value for part in flat(one)]
    return [value]


def owners(rows: Any, slot: int) -> list[Any]:
    """Those that an answer to CLUSTER SLOTS names as owners of a slot."""
    if isinstance(rows, dict):
        return [row["primary"] for (a, b), row in rows.items() if a <= slot <= b]
    return [row[2] for row in rows if int(row[0]) <= slot <= int(row[1])]
