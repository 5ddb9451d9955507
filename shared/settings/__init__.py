"""Settings: one tree of typed values, read from flags, environment, file and defaults."""

from __future__ import annotations

from .sources import CONFIG_VARIABLE, environment_name, load_settings, setting_names
from .tree import (
    BatchesSettings,
    EngineSettings,
    GatewaySettings,
    ModelSettings,
    QueueSettings,
    RedisSettings,
    Settings,
    WorkerSettings,
)

__all__ = [
    "CONFIG_VARIABLE",
    "BatchesSettings",
    "EngineSettings",
    "GatewaySettings",
    "ModelSettings",
    "QueueSettings",
    "RedisSettings",
    "Settings",
    "WorkerSettings",
    "environment_name",
    "load_settings",
    "setting_names",
]
