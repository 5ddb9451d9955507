"""The process that talks to Redis. It never imports torch."""
