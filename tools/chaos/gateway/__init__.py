"""A storm at the gateway: processes and connections are killed under clients that resume."""
