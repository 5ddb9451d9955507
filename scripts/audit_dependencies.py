#!/usr/bin/env python
"""Looks up the installed packages in the advisory database of PyPI, by pip-audit.

    python scripts/audit_dependencies.py

Exit code 1 if an installed version has a known vulnerability. Without access to the database the
script says which packages it could not check, and passes: an audit that cannot run is no finding.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TIMEOUT_S = 120
SHOWN = 5


def main() -> int:
    """Run the audit and print its outcome; returns the exit code."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        found = json.loads(run.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        print("audit: NOT CHECKED, the advisory database cannot be reached")
        return 0
    return report(found)


def report(dependencies: list[dict[str, Any]]) -> int:
    """Print vulnerabilities and unchecked packages; returns 1 if there is a vulnerability."""
    checked = [item for item in dependencies if "skip_reason" not in item]
    skipped = [item["name"] for item in dependencies if "skip_reason" in item]
    vulnerable = [item for item in checked if item["vulns"]]
    for item in vulnerable:
        for found in item["vulns"]:
            fixed = ", ".join(found.get("fix_versions") or ()) or "no fixed version"
            print(f"audit: {item['name']} {item['version']}: {found['id']} (fixed in {fixed})")
    print(f"audit: {len(checked)} packages checked, {len(vulnerable)} with known vulnerabilities")
    if skipped:
        more = f" and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
        print(f"audit: NOT CHECKED: {', '.join(skipped[:SHOWN])}{more} (not in the database here)")
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(main())
