"""The settings tree: every knob with its unit, range, default and effect.

This file, and those of its larger sections, are the only place where a setting is described:
``docs/settings.md`` and error messages are made from them. Objects are immutable;
:func:`penstock.shared.settings.load_settings` builds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ByteSize,
    StringConstraints,
    field_validator,
    model_validator,
)

from ..quoting import one_line
from ..redis.address import check_address, with_password
from .batcher_section import BatcherSettings
from .batches_section import BatchesSettings
from .engine_section import EngineSettings
from .gateway_section import GatewaySettings
from .model_section import ModelSettings
from .section import Section, setting
from .speculation import SpeculationSettings

__all__ = [
    "BatcherSettings",
    "BatchesSettings",
    "EngineSettings",
    "GatewaySettings",
    "ModelSettings",
    "QueueSettings",
    "RedisSettings",
    "Settings",
    "SpeculationSettings",
    "WorkerSettings",
]

_WEEK_S = 7 * 24 * 3600
_ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,95}$")]
_WorkerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class RedisSettings(Section):
    """Which Redis server holds the queues and the token logs."""

    url: str | None = setting(
        None,
        "Address of the server: `redis://[user:password@]host:port/db`, `rediss://` for TLS, "
        "`unix:///path`. `REDIS_URL` is honoured, too, after `PENSTOCK_REDIS__URL`.",
        none="unset",
        repr=False,  # it may hold a password
    )
    password_file: Path | None = setting(
        None,
        "File with the server's password, as Docker and Kubernetes hand out secrets; it takes the "
        "place of a password in `url`.",
        none="off",
    )
    socket_timeout_s: float = setting(
        5.0,
        "How long a command may wait for its reply before the connection counts as broken and is "
        "replaced. Without a bound a frozen server would hang its clients for ever.",
        unit="s",
        gt=0,
        le=600,
    )
    embedded: Literal["auto", "never", "always"] = setting(
        "auto",
        "Whether a command that can bring its own server (`demo`, `worker`) does so: `auto` when "
        "no address is given, `always` even if one is, `never` to fail instead.",
    )
    embedded_dir: Path | None = setting(
        None,
        "Directory in which the embedded server keeps its data in an append-only file. `off` keeps "
        "everything in memory: requests are gone when the server ends.",
        none="off",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_password(cls, values: Any) -> Any:
        """The address with the password of the file in it."""
        if not isinstance(values, dict):
            return values
        path, url = values.get("password_file"), values.get("url")
        if not isinstance(path, str | Path) or path == "off" or not isinstance(url, str):
            return values  # what is neither, the fields' own checks refuse
        try:
            password = Path(path).read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            reason = one_line(f"password_file {path} cannot be read: {error}", 500)
            raise ValueError(reason) from None
        return {**values, "url": with_password(url, password)}

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        check_address(url)
        return url


class QueueSettings(Section):
    """Which queue is used, and what it accepts.

    Bounds count the queued requests of one shard, of all lanes and tenants together. A submit over
    a bound is refused at once with a hint when to try again; nothing is dropped later.
    """

    model: _ModelName = setting(
        "demo",
        "Name under which the model is served: 1 to 96 characters of `A-Z a-z 0-9 _ . / -`, the "
        "first a letter or digit. Producers and workers meet by it; it is part of every key.",
    )
    shard: int = setting(
        0,
        "Number of the shard. Shards of one model share nothing, so each may live on its own node "
        "of a Redis Cluster.",
        ge=0,
        le=65535,
    )
    retention_s: int = setting(
        600,
        "How long the record and the token log of a finished request stay readable.",
        unit="s",
        ge=1,
        le=_WEEK_S,
    )
    usage_retention_days: int = setting(
        400,
        "How long the usage ledger of a day is kept, counted from the end of the day (UTC). It is "
        "the workers' setting.",
        unit="days",
        ge=1,
        le=3650,
    )
    compact_logs_after_s: int | None = setting(
        10,
        "How long after the end of a request its token log becomes one entry. That takes a third "
        "of the memory or less and reads the same. Live readers have read it by then. `off` leaves "
        "logs as they were written.",
        unit="s",
        none="off",
        ge=0,
        le=_WEEK_S,
    )
    reader_grace_ms: int = setting(
        10_000,
        "How long a silent reader still counts as present, for requests with `on_disconnect` "
        "`cancel`. Readers send a heartbeat three times as often. It is the reader's setting; of "
        "several readers the latest end counts.",
        unit="ms",
        ge=100,
        le=3_600_000,
    )
    default_deadline_s: int = setting(
        600,
        "Time after which a request that names no deadline of its own expires, counted from its "
        "submission.",
        unit="s",
        ge=1,
        le=_WEEK_S,
    )
    max_queued_requests: int = setting(
        10_000, "Most requests that may wait.", unit="requests", ge=1, le=10_000_000
    )
    max_queued_tokens: int = setting(
        20_000_000,
        "Most tokens that may wait: estimated prompt tokens plus likely output tokens, summed.",
        unit="tokens",
        ge=1,
        le=10**12,
    )
    max_queued_bytes: ByteSize = setting(
        ByteSize(256 * 2**20),
        "Most payload bytes that may wait. Keep it well below the server's `maxmemory`.",
        unit="bytes",
        ge=1024,
        le=2**40,
    )
    max_tenant_requests: int = setting(
        0,
        "Most requests that one tenant may have waiting. 0 sets no bound per tenant; the bounds "
        "above still hold.",
        unit="requests",
        ge=0,
        le=10_000_000,
    )
    tenant_share: int = setting(
        100,
        "How much of the free room one tenant may fill, by requests, tokens and bytes. It is this "
        "part, times the weight of the request's lane (8, 4, 1). With 100 a lone tenant "
        "fills half of the room for `batch`, and 80 % of that for `normal`; the rest is there for "
        "others. `batch` may use 80 % of each bound above and `normal` 95 %. 0 switches all of "
        "this off.",
        unit="%",
        ge=0,
        le=100_000,
    )

    @property
    def retention_ms(self) -> int:
        """``retention_s`` in milliseconds, the unit of the scripts."""
        return self.retention_s * 1000

    @property
    def usage_retention_ms(self) -> int:
        """``usage_retention_days`` in milliseconds, the unit of the scripts."""
        return self.usage_retention_days * 86_400_000

    @property
    def default_deadline_ms(self) -> int:
        """``default_deadline_s`` in milliseconds, the unit of the scripts."""
        return self.default_deadline_s * 1000


class WorkerSettings(Section):
    """The process that owns a device: its claims, its health, its logs."""

    name: _WorkerName | None = setting(
        None,
        "Name in logs and metrics, 1 to 64 characters of `A-Z a-z 0-9 _ . -`. `auto` takes the "
        "host's. The id in the protocol adds a new part at every start: a worker that took over "
        "the id of a dead one would keep its lease alive.",
        none="auto",
    )
    profile: Literal["balanced", "throughput", "latency", "memory"] = setting(
        "balanced",
        "A set of settings for one aim; a setting that is given, in whatever way, overrules it. "
        "See [performance.md](performance.md#profiles).",
    )
    lease_ms: int = setting(
        2_000,
        "How long a silent worker still counts as alive. After that others take over its "
        "requests. Shorter recovers faster from a lost machine and forgives shorter pauses.",
        unit="ms",
        ge=100,
        le=600_000,
    )
    heartbeat_ms: int | None = setting(
        None,
        "How often the lease is renewed while no engine step does it. `auto` takes a quarter of "
        "`lease_ms`; over a third is refused, so that one lost heartbeat costs nothing.",
        unit="ms",
        none="auto",
        ge=10,
        le=200_000,
    )
    claim_batch: int = setting(
        16, "Most requests claimed in one engine step.", unit="requests", ge=1, le=128
    )
    stream_interval_ms: float = setting(
        20.0,
        "How long a token may wait to be published together with those of later steps. Fewer and "
        "larger messages cost the worker, Redis and readers less. The first token and the end of "
        "a request never wait. 0 publishes after every step, as does a model whose steps take "
        "longer.",
        unit="ms",
        ge=0,
        le=1000,
    )
    model_change: Literal["refuse", "rolling"] = setting(
        "refuse",
        "What a worker does if workers of its shard serve a model with another "
        "[fingerprint](operations.md#changing-the-model): `refuse` ends it with exit code 2; "
        "`rolling` lets it serve beside them, and streams continue on workers of their own model.",
    )
    hang_timeout_s: float = setting(
        30.0,
        "Silence of the engine after which it counts as hung: `/healthz` fails, and the supervisor "
        "replaces the worker. The other loops of a worker get four times `redis.socket_timeout_s` "
        "more. Must be longer than the longest step.",
        unit="s",
        gt=0,
        le=3600,
    )
    drain_timeout_s: float = setting(
        10.0,
        "How long a worker tries to hand over its requests after SIGTERM while Redis does not "
        "answer. What is left then is taken over by others when the lease ends.",
        unit="s",
        gt=0,
        le=3600,
    )
    metrics_host: str = setting(
        "127.0.0.1",
        "Address on which `/metrics`, `/healthz` and `/readyz` are served. `0.0.0.0` for all "
        "interfaces, as in a container.",
        min_length=1,
    )
    metrics_port: int | None = setting(
        9464,
        "Port for the same. 0 takes a free one and logs it; `off` serves nothing.",
        none="off",
        ge=0,
        le=65535,
    )
    step_log: Path | None = setting(
        None,
        "File that records the work and the time of every step: one JSON object a line, of about "
        "120 bytes. `penstock simulate --steps` fits its step times to it. It grows for as long as "
        "the worker serves.",
        none="off",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severity that is logged."
    )
    log_format: Literal["text", "json"] = setting(
        "text", "One readable line per event, or one JSON object."
    )

    @property
    def heartbeat_interval_ms(self) -> int:
        """``heartbeat_ms``, or what ``auto`` means: a quarter of the lease, in milliseconds."""
        return self.lease_ms // 4 if self.heartbeat_ms is None else self.heartbeat_ms

    @model_validator(mode="after")
    def _check_heartbeat(self) -> Self:
        if self.heartbeat_interval_ms * 3 > self.lease_ms:
            raise ValueError(
                f"heartbeat_ms ({self.heartbeat_ms}) must be at most a third of "
                f"lease_ms ({self.lease_ms})"
            )
        return self

    @model_validator(mode="after")
    def _check_stream_interval(self) -> Self:
        if self.stream_interval_ms * 4 > self.hang_timeout_s * 1000:
            raise ValueError(
                f"stream_interval_ms ({self.stream_interval_ms:g}) must be at most a quarter of "
                f"hang_timeout_s ({self.hang_timeout_s:g} s): the engine's messages are its sign "
                "of life"
            )
        return self


class Settings(Section):
    """All settings, one attribute per section."""

    redis: RedisSettings = RedisSettings()
    queue: QueueSettings = QueueSettings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    batcher: BatcherSettings = BatcherSettings()
    gateway: GatewaySettings = GatewaySettings()
    batches: BatchesSettings = BatchesSettings()
