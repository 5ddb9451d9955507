"""How the app runs: the HTTP server, its bounds, its processes and its end."""
