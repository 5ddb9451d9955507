"""The ACL templates on real servers: what must work works, what must be denied is denied."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from waiting import wait_until
from workers import WorkerFactory

from penstock.producer.gateway.access.limit_scripts import load_limit_script
from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port
from penstock.shared.local.server_binary import ServerBinary, find_servers
from penstock.shared.scripts.script_loader import load_script, script_names

ROOT = Path(__file__).resolve().parents[2]
ACL = ROOT / "deploy" / "acl"
KEYS = Keys("demo")


def render(*arguments: str) -> list[str]:
    command = [str(ACL / "render"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


class Server:
    """A server with the users of the templates."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.admin = redis.Redis.from_url(url, decode_responses=True)
        self.version: str = self.admin.info("server")["redis_version"]
        self.old = self.version.startswith("6.")
        template = "tenant-6.2.acl" if self.old else "tenant-7.acl"
        for tenant in ("acme", "rival"):
            self.admin.sadd(KEYS.ingress_tenants, tenant)
            rules = render(template, tenant, f"{tenant}-pw", tenant)
            self.admin.execute_command("ACL SETUSER", *rules)
        self.admin.execute_command("ACL SETUSER", *render("worker.acl", "worker", "pw", "-"))

    def url_of(self, user: str, password: str) -> str:
        return self.url.replace("//", f"//{user}:{password}@")

    def close(self) -> None:
        self.admin.execute_command("ACL DELUSER", "acme", "rival", "worker")
        self.admin.close()


@pytest.fixture
def server(any_redis_url: str) -> Iterator[Server]:
    server = Server(any_redis_url)
    yield server
    server.close()


@pytest.fixture
def guarded(server: Server) -> Iterator[Server]:
    """The server with its default user switched off, and an operator instead of it."""
    server.admin.execute_command("ACL SETUSER", *render("operator.acl", "boss", "boss-pw", "-"))
    boss = redis.Redis.from_url(server.url_of("boss", "boss-pw"), decode_responses=True)
    boss.execute_command("ACL SETUSER", *render("default.acl"))
    yield server
    boss.execute_command("ACL SETUSER", "default", "on", "nopass", "~*", "&*", "+@all")
    boss.execute_command("ACL DELUSER", "boss")
    boss.close()


@pytest.fixture
def acme(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(
        server.url_of("acme", "acme-pw"), decode_responses=True, protocol=2
    ) as client:
        yield client


def test_a_confined_producer_asks_and_reads(
    server: Server, acme: redis.Redis, tmp_path: Path
) -> None:
    """And the worker that answers has no more rights than its template gives."""
    workers = WorkerFactory(server.url_of("worker", "pw"), tmp_path)
    try:
        worker = workers.engine("w", model__path="synthetic", model__synthetic_step_ms=5)
        pubsub = acme.pubsub()
        pubsub.subscribe(KEYS.channel("acme.1"))
        assert pubsub.get_message(timeout=60)
        ask = {"id": "acme.1", "prompt": "Hi", "max_tokens": 4, "answer": "json"}
        acme.xadd(KEYS.ingress("acme"), ask)
        message: Any = None
        while message is None or "end" not in message:
            message = json.loads(pubsub.get_message(timeout=60)["data"])
        assert message["state"] == "completed"
        pubsub.close()
        chunks = [json.loads(fields["chunk"]) for _, fields in acme.xrange(KEYS.log("acme.1"))[:-1]]
        assert sum(len(chunk["ids"]) for chunk in chunks) == 4
        assert acme.xlen(KEYS.log("acme.1")) == len(chunks) + 1
        entry = acme.xadd(KEYS.ingress("acme"), {"prompt": "Hi", "answer": "json", "max_tokens": 0})
        ((_, ((_, refusal),)),) = acme.xread({KEYS.log(f"acme.{entry}"): "0-0"}, block=60_000)
        assert json.loads(refusal["end"])["reason"] == "invalid"
        assert server.admin.hget(KEYS.request("acme.1"), "tenant") == "acme"
        # A forged tenant, and an id of the other tenant's: refused where only acme can read it.
        for forged in ({"tenant": "rival"}, {"id": "rival.1"}):
            entry = acme.xadd(KEYS.ingress("acme"), {"prompt": "Hi", "answer": "json", **forged})
            ((_, ((_, refusal),)),) = acme.xread({KEYS.log(f"acme.{entry}"): "0-0"}, block=60_000)
            assert json.loads(refusal["end"])["reason"] == "invalid"
        assert not server.admin.exists(KEYS.request("rival.1"), KEYS.log("rival.1"))
        assert worker.terminate() == 0
        assert "NOPERM" not in worker.log.read_text()
        assert not re.search(r"\b(error|warning)\b", worker.log.read_text()), worker.log.read_text()
    finally:
        workers.close()


OWN, RIVAL = KEYS.log("acme.1"), KEYS.log("rival.1")

DENIED: list[tuple[object, ...]] = [
    ("XADD", KEYS.ingress("rival"), "*", "prompt", "Hi"),
    ("XADD", KEYS.ingress(), "*", "prompt", "Hi"),
    ("XADD", KEYS.ingress("acme2"), "*", "prompt", "Hi"),
    ("XADD", RIVAL, "*", "chunk", "x"),
    ("XADD", KEYS.bell, "*", "wake", "1"),
    ("XRANGE", RIVAL, "-", "+"),
    ("XREAD", "STREAMS", RIVAL, "0"),
    ("XREAD", "STREAMS", OWN, RIVAL, "0", "0"),
    ("XRANGE", KEYS.log("acme2.1"), "-", "+"),
    ("XRANGE", KEYS.log("acme"), "-", "+"),
    ("XRANGE", KEYS.ingress("rival"), "-", "+"),
    ("XRANGE", KEYS.ingress(), "-", "+"),
    ("XRANGE", "ps:{demo.1}:log:acme.1", "-", "+"),
    ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", KEYS.ingress("acme"), ">"),
    ("XGROUP", "CREATE", KEYS.ingress("acme"), "h", "$"),
    ("XACK", KEYS.ingress("acme"), "workers", "0-1"),
    ("XDEL", KEYS.ingress("acme"), "0-1"),
    ("XTRIM", KEYS.ingress("acme"), "MAXLEN", 0),
    ("XINFO", "STREAM", KEYS.ingress("acme")),
    ("HGETALL", KEYS.request("acme.1")),
    ("HSET", KEYS.request("acme.1"), "state", "completed"),
    ("GET", "x"),
    ("SET", OWN, "x"),
    ("DEL", OWN),
    ("UNLINK", OWN),
    ("EXPIRE", OWN, 1),
    ("RENAME", OWN, "x"),
    ("COPY", RIVAL, OWN),
    ("DUMP", OWN),
    ("SMEMBERS", KEYS.ingress_tenants),
    ("SADD", KEYS.ingress_tenants, "evil"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("SELECT", 1),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", 1),
    ("EVAL", "return 1", 0),
    ("EVALSHA", "0" * 40, 0),
    ("SCRIPT", "FLUSH"),
    ("PUBLISH", KEYS.channel("acme.1"), "x"),
    ("SUBSCRIBE", KEYS.channel("rival.1")),
    ("SUBSCRIBE", "anything"),
    ("PSUBSCRIBE", "*"),
    ("PSUBSCRIBE", KEYS.channel("acme.*")),
    ("PUBSUB", "CHANNELS"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "PAUSE", 1000),
    ("MONITOR",),
    ("INFO",),
    ("SHUTDOWN", "NOSAVE"),
    ("REPLICAOF", "NO", "ONE"),
    ("SAVE",),
    ("MULTI",),
    ("WATCH", OWN),
    ("BLPOP", OWN, 1),
    ("MODULE", "LIST"),
]
DENIED_SINCE_7 = [
    ("XADD", OWN, "*", "chunk", "x"),
    ("XRANGE", KEYS.ingress("acme"), "-", "+"),
    ("XREAD", "STREAMS", KEYS.ingress("acme"), "0"),
    ("FUNCTION", "LIST"),
    ("SSUBSCRIBE", KEYS.channel("acme.1")),
]


def test_what_a_confined_producer_must_not_do(server: Server, acme: redis.Redis) -> None:
    server.admin.xadd(OWN, {"chunk": "x"}, id="1-0")
    server.admin.xadd(RIVAL, {"chunk": "x"}, id="1-0")
    server.admin.xgroup_create(KEYS.ingress("acme"), "workers", mkstream=True)
    allowed = []
    for command in [*DENIED, *([] if server.old else DENIED_SINCE_7)]:
        try:
            reply = acme.execute_command(*command)
        except NoPermissionError:
            continue
        except ResponseError as error:
            reply = error
        allowed.append((command, reply))
    assert not allowed
    assert server.admin.xlen(OWN) == server.admin.xlen(RIVAL) == 1


def test_the_holes_that_are_stated_are_there(server: Server, acme: redis.Redis) -> None:
    """Documented, so a server that closes one should be noticed."""
    stream = KEYS.ingress("acme")
    for _ in range(3):
        acme.xadd(stream, {"prompt": "Hi"})
    acme.execute_command("XADD", stream, "MAXLEN", 0, "*", "prompt", "Hi")
    assert server.admin.xlen(stream) == 0
    page = (ROOT / "docs" / "ingress.md").read_text("utf-8")
    assert "MAXLEN 0" in page
    if server.old:
        assert acme.xadd(OWN, {"chunk": "x"})


def test_users_of_the_templates_reach_no_other_shard(server: Server) -> None:
    with redis.Redis.from_url(server.url_of("worker", "pw")) as worker:
        assert worker.hset(KEYS.counters, "x", "1") == 1
        for key in ("ps:{demo.1}:counters", "counters", "ps:{other.0}:counters"):
            with pytest.raises(NoPermissionError):
                worker.hset(key, "x", "1")
        for command in ("FLUSHALL", "KEYS *", "CONFIG GET *", "SCRIPT FLUSH", "ACL LIST"):
            with pytest.raises(NoPermissionError):
                worker.execute_command(*command.split())


def test_an_open_default_user_confines_nobody(acme: redis.Redis) -> None:
    """Why there is a template that switches it off."""
    assert acme.execute_command("AUTH", "default", "x")
    assert acme.execute_command("KEYS", "*") is not None


def test_a_default_user_switched_off(guarded: Server, acme: redis.Redis) -> None:
    for words in (("default", "x"), ("default", ""), ("x",)):
        with pytest.raises((ResponseError, AuthenticationError)):
            acme.execute_command("AUTH", *words)
    with pytest.raises(NoPermissionError):
        acme.execute_command("KEYS", "*")
    with redis.Redis.from_url(guarded.url) as nobody, pytest.raises(AuthenticationError):
        nobody.ping()


@pytest.mark.parametrize("binary", find_servers(), ids=lambda b: f"{b.kind}-{b.version}")
def test_a_restart_keeps_what_scripts_wrote(binary: ServerBinary, tmp_path: Path) -> None:
    """Redis loads its append-only file as the user ``default``, whose rights every EXEC checks."""
    users = tmp_path / "users.acl"
    lines = (
        render("operator.acl", "boss", "boss-pw", "-"),
        render("worker.acl", "worker", "pw", "-"),
        render("default.acl"),
    )
    users.write_text("".join(f"user {' '.join(words)}\n" for words in lines))
    options = f"--bind 127.0.0.1 --appendonly yes --appendfsync always --aclfile {users}".split()
    port = free_port()
    argv = [binary.path, "--port", str(port), "--dir", str(tmp_path), "--save", "", *options]
    place = f"127.0.0.1:{port}/0"
    with (
        redis.Redis.from_url(f"redis://boss:boss-pw@{place}") as boss,
        redis.Redis.from_url(f"redis://worker:pw@{place}") as worker,
    ):
        for keys_before in (0, 2):
            server = spawn_bound(argv, stdout=subprocess.DEVNULL)
            try:
                wait_until(lambda: answers(boss), "the server answers", 60)
                assert boss.dbsize() == keys_before
                script = "for _, k in ipairs(KEYS) do redis.call('HSET', k, 'n', 1) end"
                worker.eval(script, 2, KEYS.counters, KEYS.sweep)
            finally:
                server.kill()
                server.wait(60)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:  # not up, or still loading
        return False


@pytest.mark.parametrize("template", ["worker.acl", "gateway.acl"])
def test_the_rules_have_every_command_of_every_script(template: str) -> None:
    rules = set(render(template, "w", "pw", "-"))
    scripts = [load_script(name) for name in script_names()]
    if template == "gateway.acl":
        scripts += [load_limit_script(name) for name in ("admit", "claim", "renew", "settle")]
    for script in scripts:
        for command in script.header.commands:
            assert f"+{command.lower()}" in rules, f"{script.name} needs {command}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("tenant-7.acl", "n", "pw", "*"),
        ("tenant-7.acl", "n", "pw", "a.b"),
        ("tenant-7.acl", "n", "pw", "acme* ~*"),
        ("tenant-7.acl", "n", "pw +@all", "acme"),
        ("tenant-7.acl", "n", "pw", "acme", "*"),
        ("tenant-7.acl", "n", "pw", ""),
        ("tenant-7.acl", "n"),
    ],
)
def test_render_refuses_what_would_open_more(arguments: tuple[str, ...]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        render(*arguments)
    assert failure.value.returncode == 2
    assert not failure.value.stdout
