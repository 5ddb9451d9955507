"""HTTPS: what uvicorn is told of it, from files that are tried before anything is served."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from penstock.shared.errors import ConfigurationError
from penstock.shared.quoting import one_line
from penstock.shared.settings import GatewaySettings

__all__ = ["tls_arguments"]


def tls_arguments(gateway: GatewaySettings) -> dict[str, Any]:
    """Arguments of uvicorn's configuration; none without a certificate.

    Raises:
        ConfigurationError: settings that go together do not, or a file cannot be used.
    """
    certificate, key = gateway.tls_certificate, gateway.tls_key
    if (certificate is None) != (key is None):
        raise ConfigurationError("gateway.tls_certificate and gateway.tls_key go together")
    if certificate is None:
        for name in ("tls_key_password_file", "tls_client_ca"):
            if getattr(gateway, name) is not None:
                raise ConfigurationError(
                    f"gateway.{name} needs gateway.tls_certificate and gateway.tls_key"
                )
        return {}
    password = _password(gateway.tls_key_password_file)
    _try_files(gateway, password)
    arguments: dict[str, Any] = {"ssl_certfile": certificate, "ssl_keyfile": key}
    if password:
        arguments["ssl_keyfile_password"] = password
    if gateway.tls_client_ca is not None:
        arguments |= {"ssl_ca_certs": gateway.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return arguments


def _password(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        reason = one_line(f"gateway.tls_key_password_file {path} cannot be read: {error}", 500)
        raise ConfigurationError(reason) from None


def _try_files(gateway: GatewaySettings, password: str) -> None:
    """Load them once: OpenSSL would ask the terminal for a password that is missing."""
    assert gateway.tls_certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(gateway.tls_certificate, gateway.tls_key, lambda: password)
    except OSError as error:  # ssl's errors are such, too
        reason = one_line(
            f"gateway.tls_certificate {gateway.tls_certificate} and gateway.tls_key "
            f"{gateway.tls_key} cannot be used: {error}; a key with a password needs the right one "
            "in gateway.tls_key_password_file",
            1000,
        )
        raise ConfigurationError(reason) from None
    if gateway.tls_client_ca is None:
        return
    try:
        context.load_verify_locations(gateway.tls_client_ca)
    except OSError as error:
        reason = one_line(
            f"gateway.tls_client_ca {gateway.tls_client_ca} cannot be used: {error}; "
            "give a file of certificates in PEM",
            1000,
        )
        raise ConfigurationError(reason) from None
