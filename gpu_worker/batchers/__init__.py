"""Models that answer at once: items are gathered into batches, by size and time window."""
