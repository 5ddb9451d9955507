"""A recorded trace, replayed: tokens per second and latencies, by batching mode if asked."""
