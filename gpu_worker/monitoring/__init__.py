"""What a worker shows of itself: metrics, health, heartbeats, logs, memory kills."""
