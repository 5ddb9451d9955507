"""The process that owns a device: pulls requests, runs the model, publishes tokens."""
