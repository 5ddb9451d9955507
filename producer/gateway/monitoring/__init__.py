"""What operators see of a gateway: its metrics, and the requests that came to nothing."""
