"""What operators ask of a queue: dead letters, usage, served models, shards, request states."""
