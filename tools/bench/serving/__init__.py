"""``penstock bench serve``: load on a deployment that is already running."""
