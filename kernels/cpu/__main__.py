"""Builds the native library for this machine ahead of its first use."""

from __future__ import annotations

import logging
import sys

from .compiler import NativeUnavailable
from .library import load_library


def main() -> int:
    """Say where the library is, or why there is none; 1 if there is none."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        library = load_library()
    except NativeUnavailable as error:
        print(f"no native library, PyTorch computes instead: {error}", file=sys.stderr)
        return 1
    print(f"native library for {library.name}: {library.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
