"""What goes over the bounds of processes, ports and files: the guards of ``docs/security.md``."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from boundaries.mutation import Bound
from prometheus_client import CollectorRegistry

from penstock.gpu_worker.edge import ingress
from penstock.gpu_worker.model.loading import fingerprint
from penstock.gpu_worker.model.structured import compile_server, render_loop
from penstock.gpu_worker.model.structured.compile_server import Setup
from penstock.gpu_worker.model.structured.matcher import ConstraintError, word_list
from penstock.gpu_worker.monitoring import health
from penstock.gpu_worker.monitoring.health import HealthServer
from penstock.producer.gateway.access import key_access
from penstock.producer.gateway.access.key_access import KeyAccess
from penstock.producer.gateway.api_errors import ApiError
from penstock.producer.gateway.openai.fields.chat_fields import CHAT_FIELDS
from penstock.shared.errors import ConfigurationError, UnsupportedModel
from penstock.shared.protocol.plain_entry import Entry
from penstock.shared.scripts.replies import Claim, Used, read_claims
from penstock.shared.settings import load_settings

TOKENIZER = Path(__file__).parents[2] / "gpu_worker/demo_model/target/tokenizer.json"
ENDLESS = "start: " + " ".join(['"a"?'] * 30_000)


@contextmanager
def forked(serve: Callable[[socket.socket], object]) -> Iterator[socket.socket]:
    """The connection to a fork of this program, mutated or not, which ends with the block."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            ours.close()
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)
            serve(theirs)
        os._exit(0)
    theirs.close()
    try:
        with ours:
            yield ours
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# -- the render process ----------------------------------------------------------------------------


def rendered(variables: dict[str, Any], source: str, memory_bytes: int | None = None) -> bytes:
    """The answer of a render process; empty if it ended itself."""

    def serve(job: socket.socket) -> None:
        if memory_bytes is not None:
            compile_server._limit_memory(Setup("", 0, [], 1.0, 1 << 20, memory_bytes))
        render_loop.serve_renders(job)

    with forked(serve) as job, job.makefile("rwb") as lines:
        for order in (source, variables):
            lines.write(json.dumps(order).encode() + b"\n")
            lines.flush()
            assert lines.readline() == b"\n"
            answer = lines.readline()
        return answer


def long_loop() -> None:
    """It ends by itself after a second or so; the limit is shorter here."""
    restore = Bound(render_loop, "RENDER_CPU_S", 0.05).apply()
    try:
        loop = "{% for a in range(1500) %}{% for b in range(1500) %}{% endfor %}{% endfor %}"
        assert rendered({}, loop) == b""
    finally:
        restore()


def wide_text() -> None:
    assert rendered({"a": "x"}, "{{ (a * 200000000)|length }}", memory_bytes=32 << 20) == b""


def long_text() -> None:
    assert b"longer than" in rendered({"a": "x"}, "{{ a * 5000000 }}")


def private_name() -> None:
    assert b"underscore" in rendered({}, "{% set ns = namespace(__class__=1) %}")
    assert b"underscore" in rendered({}, "{% set ns = namespace() %}{% set ns._a = 1 %}")


# -- the compile process ---------------------------------------------------------------------------


@cache
def words() -> Any:
    return word_list(TOKENIZER.read_text(), 4096, [0])


def compiled(field: str, source: str, **limits: Any) -> bytes:
    """The answer of a compile process; empty if it ended itself."""
    known = words()
    setup = Setup("", 4096, [0], **{
        "limit_s": 20.0, "stack_bytes": 4 << 20, "memory_bytes": 512 << 20, **limits
    })  # fmt: skip
    with forked(lambda job: compile_server._compile(job, known, setup)) as job:
        job.sendall(json.dumps({"field": field, "source": source}).encode())
        job.shutdown(socket.SHUT_WR)
        job.settimeout(60)
        answer = b""
        while part := job.recv(1 << 16):
            answer += part
    return answer.strip()


def long_chain() -> None:
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(3000))
    assert compiled("grammar", f'start: r0\n{chain}r3000: "a"\n') == b""


def memory_limit() -> None:
    """A compilation begins with a limit of its memory.

    When a fork of this program reaches it depends on what earlier tests left free in the heap.
    """

    def tell_limit(*_: object) -> None:
        raise ConstraintError(str(resource.getrlimit(resource.RLIMIT_AS)[0]))

    restore = Bound(compile_server, "compile_matcher", tell_limit).apply()
    try:
        answer = json.loads(compiled("grammar", "start: a"))
    finally:
        restore()
    assert int(answer["message"]) != resource.RLIM_INFINITY


def long_compilation() -> None:
    answer = json.loads(compiled("grammar", ENDLESS, limit_s=0.1))
    assert answer["outcome"] == compile_server.TIMED_OUT


def time_limits() -> tuple[float, int]:
    """Seconds of a clock and of CPU after which the kernel ends a compile process.

    A compiler may hold the interpreter lock, so that no thread of its process can end it.
    """

    def serve(job: socket.socket) -> None:
        compile_server._limit_time(Setup("", 0, [], 5.0, 0, 0))
        limits = signal.getitimer(signal.ITIMER_REAL)[0], resource.getrlimit(resource.RLIMIT_CPU)[0]
        job.sendall(json.dumps(limits).encode())

    with forked(serve) as job:
        clock_s, cpu_s = json.loads(job.recv(1 << 10))
    return clock_s, cpu_s


def compilation_by_the_clock() -> None:
    assert 0 < time_limits()[0] <= 6


def compilation_by_the_cpu() -> None:
    assert 0 < time_limits()[1] <= 6


# -- the metrics port ------------------------------------------------------------------------------


@contextmanager
def health_server() -> Iterator[int]:
    server = HealthServer(
        "127.0.0.1", 0, CollectorRegistry(), unhealthy=lambda: None, unready=lambda: None
    )
    try:
        yield server.port
    finally:
        server.close()


def other_path() -> None:
    with health_server() as port, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/../etc/passwd", timeout=60)
    assert caught.value.code == 404
    caught.value.close()


def silent_client() -> None:
    restore = Bound(health, "_CLIENT_TIMEOUT_S", 0.05).apply()
    try:
        with health_server() as port, socket.create_connection(("127.0.0.1", port), 2) as client:
            assert client.recv(1) == b""
    finally:
        restore()


# -- files of a checkpoint -------------------------------------------------------------------------


def header_of_any_length() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * 100)
        file.flush()
        assert fingerprint._header(struct.pack("<Q", 1 << 62), file.fileno(), 100) == b""


def header_of_another_shape() -> None:
    for header in (b"[1]", b"{", b'{"a": 1}', b'{"a": {}}'):
        assert len(fingerprint._middles(header, 1 << 27)) == 1024


def checkpoints_code() -> None:
    from transformers import dynamic_module_utils

    from penstock.gpu_worker.model.loading.checkpoint import load_config

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", name)
        patch.setattr(sys, "path", list(sys.path))
        folder, trace = Path(name), Path(name) / "it_was_run"
        (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).touch()\n")
        own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
        (folder / "config.json").write_text(json.dumps(own))
        with pytest.raises(UnsupportedModel, match="without running code"):
            load_config(folder)
        assert not trace.exists()


def model_refused(match: str, **config: Any) -> Callable[[], None]:
    def refused() -> None:
        from transformers import AutoConfig

        from penstock.gpu_worker.model.loading.load_gate import check_config

        with pytest.raises(UnsupportedModel, match=match):
            check_config(AutoConfig.for_model(**config))

    return refused


def rows_that_were_not_asked_for() -> None:
    """A model that gives the logits of all tokens, as Whisper's does."""
    import torch

    from penstock.gpu_worker.model.forward.batch import forward_logits

    rows = torch.tensor([3, 7])
    step: Any = SimpleNamespace(
        batches=[SimpleNamespace(positions=torch.arange(8))], rows=rows, num_rows=2,
        input_ids=torch.zeros(1, 8),
    )  # fmt: skip
    context: Any = SimpleNamespace(step=lambda *_: nullcontext())
    answer = SimpleNamespace(logits=torch.zeros(1, 8, 10))
    with pytest.raises(RuntimeError, match="does not heed logits_to_keep"):
        forward_logits(lambda **_: answer, context, step, SimpleNamespace())  # type: ignore[arg-type]


# -- the edge, the gateway and settings ------------------------------------------------------------


def large_entries() -> None:
    """They are parsed beside the event loop, which serves others meanwhile."""
    threads = []

    class Parser(ingress.Ingress):
        def __init__(self) -> None:
            self._redis = None  # type: ignore[assignment]

        def _judge(self, entries: object) -> list[Any]:
            threads.append(threading.current_thread())
            return []

    async def send(*_: object) -> list[Any]:
        return []

    restore = Bound(ingress, "run_calls", send).apply()
    try:
        with suppress(ValueError, IndexError):  # no call has no reply
            asyncio.run(Parser()._take_in([Entry(None, "1-1", [b"prompt", b"x" * (1 << 20)])]))
    finally:
        restore()
    assert threads
    assert threads[0] is not threading.current_thread()


def claim_row(entry: bytes) -> Claim:
    row = [b"a", 1, 2, 1, 0, b"", 5, 5, -1, 5, [(b"1-0", [b"e", entry])]]
    (claim,) = read_claims([[*row, b""]])
    return claim


def damaged_log() -> None:
    assert not claim_row(b"\xc1").intact
    assert claim_row(msgpack.packb([0, [1, 2], "x", 5])).intact


def log_with_a_gap() -> None:
    assert not claim_row(msgpack.packb([1, [1], "x", 5])).intact


def usage_that_is_none() -> None:
    assert Used.unpack(b"1 x 3 4") == Used()


def many_wrong_keys() -> None:
    class Store:
        async def find(self, secret: str) -> None:
            return None

    access = object.__new__(KeyAccess)
    access._cache, access._store = OrderedDict(), Store()  # type: ignore[assignment]
    restore = Bound(key_access, "_MOST_CACHED", 3).apply()

    async def guess() -> None:
        for number in range(10):
            assert await access._look_up(str(number)) is None

    try:
        asyncio.run(guess())
    finally:
        restore()
    assert len(access._cache) <= 3


def unknown_parameter() -> None:
    with pytest.raises(ApiError, match="there is no parameter 'colour'"):
        CHAT_FIELDS.read({"model": "demo", "colour": 1})


def parameter_out_of_range() -> None:
    with pytest.raises(ApiError, match="temperature"):
        CHAT_FIELDS.read({"model": "demo", "temperature": 1000})


def setting_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match=r"worker\.lease_ms"):
        load_settings({"worker.lease_ms": -1})
