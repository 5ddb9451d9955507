"""``python -m penstock.tools.chaos``: the command without the program."""

from __future__ import annotations

import sys

import typer

from penstock.shared.errors import PenstockError

from .command import chaos

if __name__ == "__main__":
    try:
        typer.run(chaos)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
