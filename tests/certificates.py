"""Certificates for servers of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that it signed itself, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", *words.split(), *alternative, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return certificate, key
