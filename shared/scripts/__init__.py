"""The atomic operations: Lua scripts, and typed calls of them."""
