"""Dynamic batching against none, fixed sizes, fixed windows and a batcher within the process."""
