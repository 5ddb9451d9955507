"""Prints the reference: ``python -m penstock.shared.settings > docs/settings.md``."""

from __future__ import annotations

import sys

from .reference import render_reference

sys.stdout.write(render_reference())
