"""The simulator beside a real worker."""
