"""The simulator compared with a real worker."""
