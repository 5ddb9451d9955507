"""The gateway: OpenAI's HTTP API in front of the queue. :mod:`.application` makes the app."""
