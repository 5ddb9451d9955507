"""Runs the app: uvicorn with httptools and uvloop, in one process or several behind one port."""

from __future__ import annotations

import ipaddress
import logging
import socket

import uvicorn

from penstock.shared.errors import ConfigurationError
from penstock.shared.settings import Settings

from .application import create_app

__all__ = ["serve"]

_log = logging.getLogger("penstock.gateway")


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; returns when everything is closed.

    Raises:
        ConfigurationError: the address cannot be used, or is open to others without API keys.
        RedisUnavailable: Redis cannot be reached.
    """
    gateway = settings.gateway
    _check_address(gateway.host)
    if (gateway.tls_certificate is None) != (gateway.tls_key is None):
        raise ConfigurationError("gateway.tls_certificate and gateway.tls_key go together")
    listener = _listen(gateway.host, gateway.port)
    with listener:
        host, port = listener.getsockname()[:2]
        scheme = "http" if gateway.tls_certificate is None else "https"
        print(f"gateway: {scheme}://{host}:{port}/v1 (no API keys: loopback only)", flush=True)
        config = uvicorn.Config(
            create_app(settings),
            http="httptools",
            loop="uvloop",
            ws="none",
            lifespan="on",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(gateway.drain_timeout_s),
            ssl_certfile=gateway.tls_certificate,
            ssl_keyfile=gateway.tls_key,
        )
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
        if not server.started:
            raise ConfigurationError("the gateway could not start; its log says why")


def _check_address(host: str) -> None:
    """Without keys anybody who reaches the port may use everything.

    Raises:
        ConfigurationError: others than this machine could reach it.
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigurationError(
            f"gateway.host is {host!r}, but there are no API keys: without them the gateway "
            "listens on a loopback address only"
        )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
