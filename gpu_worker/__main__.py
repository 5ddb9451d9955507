"""``python -m penstock.gpu_worker``: ``penstock worker`` without the client's program."""

from __future__ import annotations

import sys

from penstock.shared.local.gc_tuning import without_collector

with without_collector():
    import typer

    from penstock.shared.errors import PenstockError

    from .command import worker

if __name__ == "__main__":
    app = typer.Typer(no_args_is_help=True, add_completion=False)
    app.callback()(lambda: None)
    app.command()(worker)
    try:
        app()
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
