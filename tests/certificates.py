"""Certificates and users for servers of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.shared.local.server_binary import ServerBinary

RENDER = Path(__file__).resolve().parents[1] / "deploy/acl/render"


def acl_rules(*arguments: str) -> str:
    """A line of an ACL file, from a template."""
    rendered = subprocess.run([RENDER, *arguments], capture_output=True, text=True, check=True)
    return f"user {' '.join(rendered.stdout.split())}\n"


def self_signed(folder: Path, password: str | None = None) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that it signed itself, and its key, which may have a password."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=127.0.0.1"]
    words += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", *words, *alternative, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return certificate, key


def speaks_tls(binary: ServerBinary) -> bool:
    """Whether it was built with TLS: the server that a wheel brings was not."""
    words = [binary.path, "--port", "0", "--tls-port", "1", "--tls-cert-file", "/nowhere"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return "Failed to configure TLS" in done.stdout or "/nowhere" in done.stdout
