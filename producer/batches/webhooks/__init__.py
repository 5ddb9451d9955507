"""Webhooks: calls that are signed, repeated until they succeed, and kept when they never do."""
