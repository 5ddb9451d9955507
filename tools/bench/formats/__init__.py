"""Number formats of weights, compared in one process."""
