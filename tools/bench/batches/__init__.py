"""``penstock bench batches``: a batch file beside chat, and the same lines offline."""
