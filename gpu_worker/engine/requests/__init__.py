"""Requests in the engine: their form, what is refused, and the manager of those that run."""
