"""``python -m penstock.gpu_worker.edge``: the edge process; see :mod:`.main`.

It starts the engine process before its own imports, so that both load side by side.
"""

from __future__ import annotations

import sys

from penstock.shared.local.gc_tuning import without_collector

from ..engine_start import start_engine

if __name__ == "__main__":
    line = sys.stdin.buffer.readline()
    engine = start_engine(line)

    with without_collector():
        from .main import main

    sys.exit(main(line, engine))
