"""The command ``penstock worker``. Imports no torch: only the engine process needs it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.shared.distribution import install_command
from penstock.shared.errors import ConfigurationError
from penstock.shared.local.embedded import open_redis
from penstock.shared.settings import Settings, load_settings
from penstock.shared.settings.model_name import with_model_name
from penstock.shared.synthetic import SYNTHETIC

from .supervisor import Supervisor

__all__ = ["worker"]


def worker(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint directory, or `demo` for the shipped model.", metavar="DIR"),
    ] = None,
    batcher: Annotated[
        str | None,
        typer.Option(
            help="Serve a class that maps lists of payloads to lists of results instead.",
            metavar="MODULE:NAME",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name the model is served under; producers ask for it."),
    ] = None,
    shard: Annotated[int | None, typer.Option(help="Shard of the queue to serve.")] = None,
    redis: Annotated[str | None, typer.Option(help="Address of the Redis server.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Of weights: auto, none, int8, int4, nf4 or fp8.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Settings for throughput, latency or memory.")
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(help="Sequences that run at the same time.")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache, such as 512MiB.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for the model.")] = None,
    metrics_port: Annotated[
        str | None, typer.Option(help="Port of /metrics; 0 for any free one, or off.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Written once it serves: worker's id, process id, metrics port."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file in TOML.")] = None,
) -> None:
    """Serve a model: pull requests from Redis, publish tokens back.

    Runs until SIGTERM or Ctrl-C, then hands its running requests over to other workers. Every
    setting can also be given as PENSTOCK_* variable or in a file; see docs/settings.md.
    """
    settings = load_settings(
        {
            "model.path": model,
            "batcher.target": batcher,
            "queue.model": name,
            "queue.shard": shard,
            "redis.url": redis,
            "model.device": device,
            "model.dtype": dtype,
            "model.quantization": quantization,
            "worker.profile": profile,
            "engine.max_sequences": max_sequences,
            "engine.kv_memory": kv_memory,
            "engine.threads": threads,
            "worker.metrics_port": metrics_port,
            "worker.log_level": log_level,
            "worker.log_format": log_format,
        },
        config=config,
    )
    settings = with_model_name(settings)
    _require_packages(settings)
    _check_ready_file(ready_file)
    with open_redis(settings.redis) as url:
        if url != settings.redis.url:
            typer.echo(f"started a Redis server of its own: export REDIS_URL={url}", err=True)
        served = _with(settings, "redis", url=url)
        code = asyncio.run(Supervisor(served, ready_file).run())
    raise typer.Exit(code)


def _check_ready_file(path: Path | None) -> None:
    """Say now that it cannot be written: the edge process could only break, again and again.

    Raises:
        ConfigurationError: its directory is missing or may not be written to.
    """
    if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"--ready-file {path}: {path.parent} is no directory that can be written to; make it, "
            "or give another path"
        )


def _require_packages(settings: Settings) -> None:
    """Say what is missing now: the engine process could only fail at import, again and again.

    Raises:
        ConfigurationError: the base install does not bring what a worker needs.
    """
    needed = ["prometheus_client"]
    if settings.model.path != SYNTHETIC and settings.batcher.target is None:
        needed += ["torch", "transformers"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"a worker needs {', '.join(missing)}, which the base install does not bring: "
            f"{install_command('worker')}"
        )


def _with(settings: Settings, section: str, **values: object) -> Settings:
    """Settings with some values of a section replaced, validated anew."""
    tree = settings.model_dump()
    tree[section].update(values)
    return Settings.model_validate(tree)
