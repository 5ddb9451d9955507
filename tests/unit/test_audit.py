"""The audit of dependencies tells vulnerable packages from those it could not check."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "audit_dependencies.py"
spec = importlib.util.spec_from_file_location("audit_dependencies", SCRIPT)
assert spec is not None
assert spec.loader is not None
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)

CLEAN = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "ours", "skip_reason": "not found on PyPI"}


def test_a_vulnerable_package_fails_the_audit(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report([CLEAN, BAD]) == 1
    assert "bad 2: CVE-1 (fixed in 3)" in capsys.readouterr().out


def test_what_could_not_be_checked_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report([CLEAN, UNKNOWN]) == 0
    shown = capsys.readouterr().out
    assert "1 packages checked, 0 with known" in shown
    assert "NOT CHECKED: ours" in shown
