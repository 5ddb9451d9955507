"""``python -m penstock.producer.cli``: the program, wherever its script is installed."""

from __future__ import annotations

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
