"""What runs on this machine: an embedded Redis server, and children that end with their owner."""
