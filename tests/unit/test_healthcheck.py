"""deploy/healthcheck.py, which the images run: it follows the variables that move the servers."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from certificates import self_signed

from penstock.shared.settings import load_settings

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "healthcheck.py"


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/health": 200, "/readyz": 200}.get(self.path, 404))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Unready(Pages):
    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()


@contextlib.contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], context: ssl.SSLContext | None = None
) -> Iterator[str]:
    """A server's port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context is not None:
        # The handshake belongs to a connection's own thread: a failed one ends no server.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield str(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


def check(service: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), service], capture_output=True, text=True, timeout=60,
        env={f"PENSTOCK_{name}": value for name, value in variables.items()}, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.strip()


def test_its_defaults_are_those_of_the_settings() -> None:
    settings, script = load_settings(environment={}), SCRIPT.read_text()
    for name, default in (
        ("GATEWAY__HOST", settings.gateway.host),
        ("GATEWAY__PORT", settings.gateway.port),
        ("WORKER__METRICS_HOST", settings.worker.metrics_host),
        ("WORKER__METRICS_PORT", settings.worker.metrics_port),
    ):
        assert f'"{name}", "{default}"' in script


def tls(folder: Path) -> tuple[ssl.SSLContext, Path]:
    certificate, key = self_signed(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


@pytest.mark.parametrize("host", ["", "0.0.0.0", "127.0.0.1"])
def test_it_asks_the_port_that_is_set(host: str) -> None:
    with serving(Pages) as port:
        assert check("gateway", GATEWAY__HOST=host, GATEWAY__PORT=port) == (0, "")
        assert check("worker", WORKER__METRICS_HOST=host, WORKER__METRICS_PORT=port) == (0, "")


def test_what_is_not_ready_or_not_there_is_unhealthy() -> None:
    with serving(Unready) as port:
        assert check("gateway", GATEWAY__PORT=port) == (1, "status 503")
        assert check("worker", WORKER__METRICS_PORT=port) == (1, "status 503")
    code, error = check("gateway", GATEWAY__PORT=port)
    assert (code, error[:10]) == (1, "no answer:")
    assert check("worker", WORKER__METRICS_PORT=port)[0] == 1


def test_a_gateway_with_a_certificate_is_asked_over_tls(tmp_path: Path) -> None:
    context, certificate = tls(tmp_path)
    with serving(Pages, context) as port:
        given = {"GATEWAY__PORT": port, "GATEWAY__TLS_CERTIFICATE": str(certificate)}
        assert check("gateway", **given) == (0, "")
        assert check("gateway", **given | {"GATEWAY__TLS_CERTIFICATE": "off"})[0] == 1
    with serving(Unready, context) as port:
        assert check("gateway", **given | {"GATEWAY__PORT": port}) == (1, "status 503")


def test_a_gateway_that_wants_certificates_is_healthy_if_it_speaks_tls(tmp_path: Path) -> None:
    context, certificate = tls(tmp_path)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate)
    given = {"TLS_CERTIFICATE": str(certificate), "TLS_CLIENT_CA": str(certificate)}
    variables = {f"GATEWAY__{name}": value for name, value in given.items()}
    with serving(Pages, context) as port:
        assert check("gateway", **variables, GATEWAY__PORT=port) == (0, "")
    with serving(Pages) as port:  # no TLS
        assert check("gateway", **variables, GATEWAY__PORT=port)[0] == 1


def test_a_worker_that_serves_nothing_is_not_asked() -> None:
    assert check("worker", WORKER__METRICS_PORT="OFF") == (0, "")
