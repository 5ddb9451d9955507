"""HEALTHCHECK of the images: does it answer where the PENSTOCK_* variables say that it listens?

It runs every few seconds, so it imports nothing of penstock, and reads neither flags nor a settings
file. Who sets the port or TLS by those overrides HEALTHCHECK, too.

    python healthcheck.py gateway|worker
"""

import http.client
import os
import ssl
import sys

TIMEOUT_S = 2


def setting(name: str, default: str = "off") -> str:
    """A variable's value; an empty one counts as not set, as everywhere in penstock."""
    return os.environ.get(f"PENSTOCK_{name}") or default


def address(host: str) -> str:
    """An address at which a server that listens on ``host`` is reached from its own machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def gateway() -> int:
    """Status of the gateway's ``/health``: 200 while Redis answers."""
    host = address(setting("GATEWAY__HOST", "127.0.0.1"))
    port = int(setting("GATEWAY__PORT", "8000"))
    if setting("GATEWAY__TLS_CERTIFICATE").lower() == "off":
        return ask(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S), "/health")
    context = ssl.create_default_context()
    context.check_hostname = False  # it names the gateway as clients know it
    context.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    if setting("GATEWAY__TLS_CLIENT_CA").lower() == "off":
        return ask(connection, "/health")
    # Without a client's certificate nothing is answered; that it speaks TLS is all there is to see.
    connection.connect()
    return 200


def worker() -> int:
    """Status of the worker's ``/readyz``: 200 while it takes work."""
    port = setting("WORKER__METRICS_PORT", "9464")
    if port.lower() == "off":
        return 200  # it serves nothing that could be asked
    host = address(setting("WORKER__METRICS_HOST", "127.0.0.1"))
    return ask(http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S), "/readyz")


def ask(connection: http.client.HTTPConnection, path: str) -> int:
    """Status of the answer."""
    connection.request("GET", path)
    return connection.getresponse().status


if __name__ == "__main__":
    try:
        status = {"gateway": gateway, "worker": worker}[sys.argv[1]]()
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"no answer: {error}")
    sys.exit(0 if status == 200 else f"status {status}")
