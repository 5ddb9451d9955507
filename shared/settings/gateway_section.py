"""The gateway's section of the settings tree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, field_validator

from .section import Section, setting

__all__ = ["GatewaySettings"]

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,95}")


class GatewaySettings(Section):
    """The HTTP server with OpenAI's API: where it listens, and what it allows."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. Without API keys only a loopback address is accepted.",
        min_length=1,
    )
    port: int = setting(8000, "Port to listen on; 0 takes a free one and logs it.", ge=0, le=65535)
    processes: int = setting(
        1, "Processes that share the port. Any of them answers for any request.", ge=1, le=256
    )
    tls_certificate: Path | None = setting(
        None, "Certificate chain in PEM; with `tls_key` it turns on HTTPS.", none="off"
    )
    tls_key: Path | None = setting(None, "Private key of the certificate in PEM.", none="off")
    tls_key_password_file: Path | None = setting(
        None,
        "File with the password of `tls_key`, as Docker and Kubernetes hand out secrets.",
        none="off",
    )
    tls_client_ca: Path | None = setting(
        None,
        "Certificates in PEM of those who sign clients' certificates. Then a client without such a "
        "certificate is not let in, also to `/health` and `/metrics`.",
        none="off",
    )
    cors_origins: str | None = setting(
        None,
        "Origins, separated by commas, whose web pages may call the gateway; `*` allows all.",
        none="off",
    )
    extra_models: str = setting(
        "",
        "Names of models, separated by commas, that are accepted although no worker serves them "
        "now. Their requests wait in the queue until a worker comes: scale from zero.",
    )
    reasoning_field: Literal["reasoning_content", "reasoning"] = setting(
        "reasoning_content", "Name of the field that carries a model's reasoning."
    )
    default_max_tokens: int = setting(
        4096,
        "Most output tokens of a chat request that names no `max_tokens`; the model's context "
        "bounds it further. `/v1/completions` takes 16, as OpenAI's does.",
        unit="tokens",
        ge=1,
        le=131_072,
    )
    upload_timeout_s: float = setting(
        300.0,
        "How long the upload of a file may take to arrive as a whole.",
        unit="s",
        gt=0,
        le=86_400,
    )
    response_retention_s: int = setting(
        24 * 3600,
        "How long a response of `/v1/responses` is kept after its end, unless `store` is false. It "
        "takes Redis memory for so long: its conversation and its output.",
        unit="s",
        ge=1,
        le=7 * 24 * 3600,
    )
    keep_alive_s: float = setting(
        15.0,
        "Longest silence of an event stream. After that a comment is sent, so that proxies keep "
        "the connection.",
        unit="s",
        gt=0,
        le=3600,
    )
    reader_grace_ms: int = setting(
        1_000,
        "How long a request goes on after its gateway died, unless its client asked to keep it. "
        "Gateways send a heartbeat for their clients three times as often.",
        unit="ms",
        ge=300,
        le=3_600_000,
    )
    outage_s: float = setting(
        10.0,
        "How long Redis may be unreachable before requests get 503 and streams an error.",
        unit="s",
        ge=0,
        le=3600,
    )
    admission_lease_ms: int = setting(
        30_000,
        "After how long another gateway looks after the requests of one that ended, for the "
        "limits of their keys. Gateways renew what runs three times as often.",
        unit="ms",
        ge=300,
        le=3_600_000,
    )
    max_body: ByteSize = setting(
        ByteSize(4 * 2**20),
        "Largest body of a request; a larger one gets 413.",
        unit="bytes",
        ge=1024,
        le=2**30,
    )
    body_timeout_s: float = setting(
        30.0,
        "How long a client may take to send a request, header and body; after that 408.",
        unit="s",
        gt=0,
        le=3600,
    )
    drain_timeout_s: float = setting(
        20.0,
        "How long answers may still take after SIGTERM. Streams that are open then end with an "
        "event that says where to resume.",
        unit="s",
        ge=0,
        le=3600,
    )

    @field_validator("extra_models")
    @classmethod
    def _check_names(cls, names: str) -> str:
        for name in _names(names):
            if not _MODEL.fullmatch(name):
                raise ValueError(
                    f"should be names of models, separated by commas; {name!r} is none"
                )
        return names

    @property
    def model_names(self) -> tuple[str, ...]:
        """``extra_models`` as names."""
        return _names(self.extra_models)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))
