"""Throughput of the engine, and the cost of its parts."""
