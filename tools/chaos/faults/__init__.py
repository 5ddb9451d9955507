"""What breaks in a storm: connections, workers, the server, and when."""
