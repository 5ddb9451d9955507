"""The settings of batch files, webhooks and schedules."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize

from .section import Section, setting

__all__ = ["BatchesSettings"]

_DAY_S = 24 * 3600


class BatchesSettings(Section):
    """Batch files, webhooks and schedules: where files are, and what is allowed."""

    storage: str = setting(
        "penstock-files",
        "Directory of inputs and outputs, or an fsspec URL such as `s3://bucket/prefix`, whose "
        "package you install. Gateways and `penstock batches` processes must see the same one.",
        min_length=1,
    )
    in_flight: int = setting(
        256,
        "Most lines of one batch that are queued or computed at once. Fewer than the fleet "
        "computes at once leave it idle; more only wait in the queue.",
        unit="lines",
        ge=1,
        le=4096,
    )
    max_lines: int = setting(50_000, "Most lines of a batch.", unit="lines", ge=1, le=10_000_000)
    max_line_bytes: ByteSize = setting(
        ByteSize(2**20), "Longest line.", unit="bytes", ge=1024, le=16 * 2**20
    )
    max_file_bytes: ByteSize = setting(
        ByteSize(200 * 10**6), "Largest file.", unit="bytes", ge=1024, le=2**40
    )
    file_expiry_s: int = setting(
        30 * _DAY_S,
        "How long outputs, and records of ended batches, are kept; and inputs for which their "
        "sender names no other time.",
        unit="s",
        ge=3600,
        le=10 * 365 * _DAY_S,
    )
    metrics_host: str = setting(
        "127.0.0.1",
        "Address on which a `penstock batches` process serves `/metrics`.",
        min_length=1,
    )
    metrics_port: int | None = setting(
        None,
        "Port for the same. 0 takes a free one and prints it; `off` serves nothing.",
        none="off",
        ge=0,
        le=65535,
    )
    webhook_secrets: Path | None = setting(
        None,
        "File with the secrets that sign webhooks: `whsec_` and base64, one a line. Calls are "
        "signed with each, so that receivers can change from one to the next. `off` signs nothing.",
        none="off",
    )
    webhook_private: bool = setting(
        False,
        "Also call addresses that are not public: loopback, private and link-local networks. "
        "Leave it off where people you do not trust may name webhooks.",
    )
