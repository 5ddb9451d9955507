"""Programs that a command runs beside itself on this machine."""
