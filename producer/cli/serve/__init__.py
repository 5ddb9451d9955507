"""``penstock serve``: Redis, workers and the gateway of one model, by one command."""
