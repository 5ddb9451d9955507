"""A child of ``penstock gateway --processes N``: its settings come on standard input."""

import sys

from penstock.shared.settings import Settings

from .gateway_processes import run_child

settings = Settings.model_validate_json(sys.stdin.buffer.read())
sys.exit(0 if run_child(settings, int(sys.argv[1])) else 1)
