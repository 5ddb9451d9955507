"""Whether Triton is installed; CPU-only installs usually have none, and need none."""

from __future__ import annotations

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
