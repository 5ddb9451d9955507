"""The program ``penstock``: a thin layer of commands over the client."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
