"""Asking the doctor, and finding what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.shared.settings import Settings, load_settings
from penstock.tools.doctor import Diagnosis, Finding

MIB = 1 << 20
ACL_FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "acl"


def settings(url: str, **values: Any) -> Settings:
    flags = {name.replace("__", "."): value for name, value in values.items()}
    return load_settings({"redis.url": url, **flags})


def find(diagnosis: Diagnosis, name: str) -> Finding:
    (finding,) = [finding for finding in diagnosis.findings if finding.name == name]
    return finding
