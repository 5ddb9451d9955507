"""Connections to a Redis server: address, cluster redirects, transient errors, retries, checks."""
