"""Options of a storm, and the settings derived from them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from penstock.shared.errors import ConfigurationError
from penstock.shared.settings import Settings, environment_name

from .faults.fault_schedule import ALL_FAULTS, Fault

__all__ = ["StormOptions", "storm_settings", "worker_arguments", "worker_environment"]

_SOCKET_TIMEOUT_S = 1.0
"""Short, so that clients notice half-open connections within the storm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormOptions:
    """Options of a storm.

    Attributes:
        seconds: how long the storm submits requests and injects faults.
        faults: the kinds of faults; an empty set is a calm run.
        workers: number of worker machines.
        in_flight: concurrent requests.
        tokens: maximum output tokens of a request.
        seed: of requests and faults.
        model: ``synthetic``, ``demo`` or a checkpoint's directory.
        redis: address of a server on loopback; None starts one.
        lease_ms: lease of the workers in ms.
        step_ms: duration of a step of the synthetic model in ms.
        pace: factor on the rate of faults.
        retention_s: how long ended requests stay readable.
        logs: directory for the workers' logs; None discards them.
    """

    seconds: float = 30.0
    faults: frozenset[Fault] = ALL_FAULTS
    workers: int = 6
    in_flight: int = 100
    tokens: int = 100
    seed: int = 0
    model: str = "synthetic"
    redis: str | None = None
    lease_ms: int = 800
    step_ms: float = 20.0
    pace: float = 1.0
    retention_s: int = 600
    logs: Path | None = None

    def __post_init__(self) -> None:
        if self.redis is not None and Fault.REDIS_KILL in self.faults:
            raise ConfigurationError(
                "a server given with --redis is not killed, since it could not be started again "
                "as it was: leave --redis out, or name the faults without --redis-kill"
            )


def storm_settings(options: StormOptions) -> Settings:
    """Settings of the storm's workers and clients.

    They ignore the user's own settings, so that a storm is the same for everybody.
    """
    share = -(-options.in_flight // options.workers)
    # A name of its own, so that it touches no other keys on a given server.
    name = "chaos" if options.redis is None else f"chaos-{time.time_ns():x}"
    return Settings.model_validate(
        {
            "redis": {"socket_timeout_s": _SOCKET_TIMEOUT_S},
            # Logs are made compact while they are read.
            "queue": {"model": name, "retention_s": options.retention_s, "compact_logs_after_s": 0},
            "worker": {"lease_ms": options.lease_ms, "metrics_port": None},
            "engine": {
                "max_sequences": max(4, share + share // 4),
                "threads": 1,
                "kv_memory": "64MiB",
            },
            "model": {"path": options.model, "synthetic_step_ms": options.step_ms},
        }
    )


def worker_arguments(settings: Settings) -> list[str]:
    """Command line arguments for ``penstock worker``."""
    return ["--model", settings.model.path, "--name", settings.queue.model]


def worker_environment(settings: Settings, url: str) -> dict[str, str]:
    """The settings that are not the default, as environment variables for workers.

    Args:
        settings: of the storm.
        url: where workers find Redis.
    """
    tree, defaults = settings.model_dump(mode="json"), Settings().model_dump(mode="json")
    given = {
        environment_name(f"{section}.{name}"): "off" if value is None else str(value)
        for section, values in tree.items()
        for name, value in values.items()
        if value != defaults[section][name]
    }
    return given | {
        environment_name("redis.url"): url,
        environment_name("redis.embedded"): "never",
    }
