"""What runs on this machine: an embedded Redis server, children, and their garbage collectors."""
