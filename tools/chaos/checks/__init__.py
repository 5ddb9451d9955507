"""What must hold after a storm: each request, the counters, the keys that are left."""
