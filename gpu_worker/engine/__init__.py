"""The pure engine: which tokens to compute next, in which blocks, and when a request ends."""
