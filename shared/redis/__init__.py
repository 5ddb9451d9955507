"""The way to a Redis server: its address, its cluster, and refusals that pass."""
