"""Cost and latency of the way through Redis."""
