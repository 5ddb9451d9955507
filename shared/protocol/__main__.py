"""Prints the reference: ``python -m penstock.shared.protocol > docs/options.md``."""

from __future__ import annotations

import sys

from .fields.option_reference import render_options

sys.stdout.write(render_options())
