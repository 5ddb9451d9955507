"""HTTPS with a key that has a password, certificates of clients, and files that cannot be used."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from certificates import self_signed
from gateway.rig import GatewayProcess

from penstock.producer.cli import main
from penstock.shared.settings import environment_name

PASSWORD = "not-easy"


def test_only_clients_with_a_certificate_get_in(tmp_path: Path, redis_url: str) -> None:
    """Two processes, since each reads the key; the client's certificate signed itself."""
    for who in ("server", "client", "stranger"):
        (tmp_path / who).mkdir()
    certificate, key = self_signed(tmp_path / "server", PASSWORD)
    secret = tmp_path / "password"
    secret.write_text(f"{PASSWORD}\n")
    known, stranger = self_signed(tmp_path / "client"), self_signed(tmp_path / "stranger")
    gateway = GatewayProcess(
        redis_url,
        tmp_path / "gateway.log",
        gateway__processes=2,
        gateway__tls_certificate=certificate,
        gateway__tls_key=key,
        gateway__tls_key_password_file=secret,
        gateway__tls_client_ca=known[0],
    )

    def ask(own: tuple[Path, Path] | None) -> int:
        trust = ssl.create_default_context(cafile=str(certificate))
        if own is not None:
            trust.load_cert_chain(*own)
        return httpx.get(f"{gateway.url}/health", verify=trust, timeout=60).status_code

    try:
        assert ask(known) == 200
        for wrong in (None, stranger):
            with pytest.raises(httpx.TransportError):
                ask(wrong)
    finally:
        gateway.kill()


def _none(folder: Path) -> dict[str, Path]:
    return {"tls_key_password_file": folder / "nowhere"}


def _no_password(folder: Path) -> dict[str, Path]:
    return {}


def _wrong_password(folder: Path) -> dict[str, Path]:
    (folder / "password").write_text("another")
    return {"tls_key_password_file": folder / "password"}


def _wrong_authority(folder: Path) -> dict[str, Path]:
    (folder / "password").write_text(PASSWORD)
    (folder / "authority").write_text("no certificate")
    return {
        "tls_key_password_file": folder / "password",
        "tls_client_ca": folder / "authority",
    }


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (_none, "tls_key_password_file"),
        (_no_password, "tls_key_password_file"),
        (_wrong_password, "tls_key_password_file"),
        (_wrong_authority, "tls_client_ca"),
    ],
)
def test_files_that_cannot_be_used(
    given: Callable[[Path], dict[str, Path]], named: str,
    tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Said before anything is served, and nobody is asked for a password."""
    certificate, key = self_signed(tmp_path, PASSWORD)
    values = {"tls_certificate": certificate, "tls_key": key, **given(tmp_path)}
    for name, value in values.items():
        monkeypatch.setenv(environment_name(f"gateway.{name}"), str(value))
    assert main(["gateway", "--port", "0", "--redis", redis_url]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert named in said


@pytest.mark.parametrize("name", ["tls_key", "tls_key_password_file", "tls_client_ca"])
def test_settings_that_need_a_certificate(
    name: str, tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(environment_name(f"gateway.{name}"), str(tmp_path / "file"))
    assert main(["gateway", "--port", "0", "--redis", redis_url]) == 2
    assert "gateway.tls_certificate" in capsys.readouterr().err
