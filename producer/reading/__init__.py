"""How a stream is read: log and live channel, merged by token index."""
