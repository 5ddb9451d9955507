"""The gateway: what it adds to a token's way, and what a stream costs it."""
